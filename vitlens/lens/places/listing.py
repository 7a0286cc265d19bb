"""The places of a model, with their shapes, read in forward passes of one and of two images."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vitlens.errors import UnsupportedError
from vitlens.lens.attention import Stage
from vitlens.lens.capture import stream_width
from vitlens.lens.layers import Layer, layers
from vitlens.lens.places.access import Access
from vitlens.lens.places.place import Place, PlaceKind, Places
from vitlens.lens.stages import stages
from vitlens.lens.trace import trace, traced_heads
from vitlens.models.hooks import once_per_model
from vitlens.models.model import Model, require_model
from vitlens.models.recording import Shape

_STAGES: tuple[tuple[Stage, tuple[str, ...]], ...] = (
    ("queries", ("heads", "query", "head_dim")),
    ("keys", ("heads", "key", "head_dim")),
    ("values", ("heads", "key", "head_dim")),
    ("scores", ("heads", "query", "key")),
    ("weights", ("heads", "query", "key")),
)


def places(model: Model) -> Places:
    """Every place whose tensor `capture` gives: names, axes and sizes for one image, in forward order.

    Blocks and heads count from 0, in the order of the forward pass, as the layers of `attention`; an attention pooling
    at the end is the last of them. A place that a model does not have is not listed: windows have weights of every
    window (an axis `windows`), attention that is computed by hand has no queries, a CNN has blocks and stages.

    >>> import vitlens
    >>> places = vitlens.places(vitlens.load("vit-digits"))
    >>> print(places[5], len(places), sep="; ")
    blocks.0.attention.scores (heads 4, query 65, key 65); 86
    >>> places.names[-3:]
    ('blocks.5.mlp', 'blocks.5.residual', 'logits')
    """
    require_model(model)
    return Places(access.place for access in accesses(model).values())


@once_per_model
def accesses(model: Model) -> dict[str, Access]:
    """How every place of a model is reached, by its name."""
    try:
        known = layers(model)
    except UnsupportedError:  # no attention
        known = ()
    maps = () if known else _maps(model)
    single, double = (_shapes(model, known, maps, count) for count in (1, 2))
    doubled = {key: (shape, _doubled_axis(shape, double.get(key))) for key, shape in single.items()}
    shapes = {key: (shape, axis) for key, (shape, axis) in doubled.items() if axis is not None}
    reader = _Reader(model, known, shapes)
    found = [*reader.layers(), *reader.blocks(maps), *reader.last(trace(model, 1).logits)]
    return {access.name: access for access in found}


def _shapes(model: Model, known: tuple[Layer, ...], maps: tuple[str, ...], count: int) -> dict[tuple[str, str], Shape]:
    """The shapes of a forward pass, by module and what of it, where it was computed once."""
    calls = trace(model, count).by_module
    units = (name for layer in known for name in (layer.unit, layer.attention, layer.mlp) if name)
    once = {name: calls[name][0] for name in (*maps, *units) if len(calls.get(name, ())) == 1}
    found = {(name, "output"): call.output for name, call in once.items()}
    for layer in known:
        if layer.stream is not None and layer.unit in once:
            found[layer.unit, "input"] = once[layer.unit].arguments[layer.stream].shape
        heads = traced_heads(model, count)[layer.attention]
        found |= {(layer.attention, stage): shape for stage, shape in heads.shapes.items()}
        if len(heads.joined) == 1:
            found[layer.attention, "joined"] = heads.joined[0]
    return {key: shape for key, shape in found.items() if shape is not None}


def _doubled_axis(single: Shape, double: Shape | None) -> int | None:
    """The axis of the batch: the one that is twice as long with two images, the first or, of tokens, the second."""
    if double is None or len(single) != len(double):
        return None
    longer = [axis for axis, (one, two) in enumerate(zip(single, double)) if one != two]
    twice = len(longer) == 1 and double[longer[0]] == 2 * single[longer[0]]
    return longer[0] if twice and (longer == [0] or (longer == [1] and len(single) == 3)) else None


def _maps(model: Model) -> tuple[str, ...]:
    """The blocks and stages of a model without attention, in forward order."""
    blocks = [name for name in model.anatomy.blocks if not _holds_another(name, model.anatomy.blocks)]
    with suppress(UnsupportedError):  # no map and no token
        blocks += [stage.module for stage in stages(model)]
    return tuple(dict.fromkeys(blocks))


def _holds_another(name: str, blocks: tuple[str, ...]) -> bool:
    return any(other.startswith(f"{name}.") for other in blocks)


@dataclass(frozen=True)
class _Reader:
    """Accesses from the shapes of one image; shapes: by module and what of it, with the axis of the batch."""

    model: Model
    known: tuple[Layer, ...]
    shapes: dict[tuple[str, str], tuple[Shape, int]]

    def layers(self) -> Iterator[Access]:
        """The places of all attention layers; several layers may share a block, whose places are named once."""
        units = [layer.unit for layer in self.known]
        for layer in self.known:
            first = units.index(layer.unit) == layer.index
            last = layer.index == len(units) - 1 - units[::-1].index(layer.unit)
            if first and layer.stream is not None and self._is_block(layer):
                yield from self._inputs(layer)
            yield from self._attention(layer)
            if last:
                yield from self._block(layer)

    def blocks(self, maps: tuple[str, ...]) -> Iterator[Access]:
        """The blocks and stages of a model without attention."""
        blocks = [name for name in self.model.anatomy.blocks if name in maps]
        for index, name in enumerate(blocks):
            yield from self._module(f"blocks.{index}", "block", name)
        for index, name in enumerate(name for name in maps if name in self._stages()):
            yield from self._module(f"stages.{index}", "stage", name)

    def last(self, logits: Shape) -> Iterator[Access]:
        """The logits."""
        yield Access(Place("logits", "logits", ("classes",), logits[1:], changeable=False), "", "logits")

    def _stages(self) -> tuple[str, ...]:
        try:
            return tuple(stage.module for stage in stages(self.model) if stage.kind == "stage")
        except UnsupportedError:
            return ()

    def _inputs(self, layer: Layer) -> Iterator[Access]:
        options = {"layer": layer.index, "argument": layer.stream}
        found = list(self._module(f"blocks.{layer.index}.input", "input", layer.unit, what="input", **options))
        layout = self.model.anatomy.layout
        if layer.index == 0 and found and layout is not None and found[0].place.axes == ("tokens", "dim"):
            count, dim = found[0].place.shape
            if count == layout.tokens:
                place = Place("patches", "patches", ("patches", "dim"), (layout.patches, dim))
                tokens = tuple(range(len(layout.prefix), count))
                yield Access(place, layer.unit, "input", 0, layer.stream, tokens=tokens)
        yield from found

    def _attention(self, layer: Layer) -> Iterator[Access]:
        name = f"blocks.{layer.index}"
        for stage, axes in _STAGES:
            shape, axis = self.shapes.get((layer.attention, stage), ((), 0))
            if len(shape) == 4 and axis == 0:
                yield self._access(f"{name}.attention.{stage}", stage, axes, shape, layer, "inside")
        shape, axis = self.shapes.get((layer.attention, "joined"), ((), 0))
        if shape and axis == 0 and layer.head_dim:
            axes = ("heads", "tokens", "head_dim")
            split = (shape[0], layer.heads, shape[1], layer.head_dim)
            heads = self._access(f"{name}.heads", "heads", axes, split, layer, "joined")
            yield heads
            for head in range(layer.heads):
                yield _of_head(heads, f"{name}.head.{head}", head)
        if layer.attention != layer.unit or not (self._is_block(layer) or _holds_mlp(layer)):
            yield from self._module(f"{name}.attention", "attention", layer.attention, layer=layer.index)

    def _block(self, layer: Layer) -> Iterator[Access]:
        name = f"blocks.{layer.index}"
        if layer.mlp is not None:
            yield from self._module(f"{name}.mlp", "mlp", layer.mlp, layer=layer.index)
        if not (self._is_block(layer) or _holds_mlp(layer)):
            return
        for access in self._module(f"{name}.residual", "residual", layer.unit, layer=layer.index):
            stream = self._is_block(layer) and access.place.axes[-1] == "dim" and len(access.place.axes) > 1
            block = Place(name, "block", access.place.axes, access.place.shape)
            yield access if stream else replace(access, place=block)

    def _is_block(self, layer: Layer) -> bool:
        """Whether the layer's unit is a residual block, not attention that stands alone."""
        return layer.unit != layer.attention or layer.unit in self.model.anatomy.blocks

    def _module(
        self, name: str, kind: PlaceKind, module: str, *, what: str = "output", **options: Any
    ) -> Iterator[Access]:
        """The input or output of a module, where it is one tensor a forward pass."""
        shape, axis = self.shapes.get((module, what), ((), 0))
        if not shape:
            return
        if axis == 1:
            shape = (shape[1], shape[0], shape[2])
        axes, sizes, windows = _axes(shape, self.model.module.get_submodule(module))
        place = Place(name, kind, axes, sizes)
        part = "input" if what == "input" else "output"
        yield Access(place, module, part, windows=windows, tokens_first=axis == 1, **options)  # type: ignore[arg-type]

    def _access(
        self, name: str, kind: PlaceKind, axes: tuple[str, ...], shape: Shape, layer: Layer, part: Any
    ) -> Access:
        windows = shape[0]
        if windows > 1:
            axes, shape = ("windows", *axes), (1, *shape)
        place = Place(name, kind, axes, shape[1:])
        return Access(place, layer.attention, part, layer.index, heads=layer.heads, windows=windows)


def _holds_mlp(layer: Layer) -> bool:
    """Whether the layer's unit is attention with an MLP after it (SigLIP's pooling)."""
    return layer.mlp is not None and layer.mlp.startswith(f"{layer.unit}.")


def _of_head(heads: Access, name: str, head: int) -> Access:
    axis = heads.place.axes.index("heads")
    axes, shape = (values[:axis] + values[axis + 1 :] for values in (heads.place.axes, heads.place.shape))
    place = Place(name, "head", axes, shape)  # type: ignore[arg-type]
    return Access(place, heads.module, "joined", heads.layer, heads=heads.heads, windows=heads.windows, head=head)


def _axes(shape: Shape, module: nn.Module) -> tuple[tuple[str, ...], Shape, int]:
    """Names and sizes of the axes after the batch, and how many calls there are an image."""
    windows, rest = shape[0], shape[1:]
    if len(rest) == 3:
        last = rest[2] == stream_width(module)
        names: tuple[str, ...] = ("rows", "columns", "dim") if last else ("channels", "rows", "columns")
    else:
        known = {0: (), 1: ("dim",), 2: ("tokens", "dim")}
        names = known.get(len(rest), tuple(f"axis{index}" for index in range(1, len(rest) + 1)))
    return (names, rest, 1) if windows == 1 else (("windows", *names), (windows, *rest), windows)
