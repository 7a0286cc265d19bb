"""The places of a model: tensors by stable names, and how they are reached in a forward pass.

`accesses` returns the places of a model, which a `_Reader` finds. The shapes of places are read in
forward passes of one and of two images. Two kinds of names exist but are not listed.
"blocks.3.tokens" is a block's input as a sequence, even if it is a map. The other kind is the block
and MLP of a layer that shares its block with a later one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from vitlens.errors import UnsupportedError
from vitlens.lens.access import Access, Part, Place, Places
from vitlens.lens.call import Stage
from vitlens.lens.stages import holds_another, stages, stream_width
from vitlens.lens.trace import Layer, trace, traced_heads
from vitlens.lens.trace import blocks as numbered_blocks
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model, require_model
from vitlens.models.recording import Shape

_WEIGHTS: Final = ("heads", "query", "key")
# the axes of each stage's tensor
_STAGES: Final[dict[Stage, tuple[str, ...]]] = {
    "queries": ("heads", "query", "head_dim"),
    "keys": ("heads", "key", "head_dim"),
    "values": ("heads", "key", "head_dim"),
    "scores": _WEIGHTS,
    "weights": _WEIGHTS,
}


def places(model: Model) -> Places:
    """Return every place of which `capture` can return the tensor, in forward order.

    A place has a name, axes, and sizes for one image. Blocks and heads count from 0, in the order
    of the forward pass, like the layers of `attention`. An attention pooling at the end is the last
    of them. A block without attention has a number and no heads. Only places that the model has
    are listed. For example, attention that the model computes itself has no queries, and a CNN has
    blocks and stages. Attention with windows has an axis `windows`.

    >>> import vitlens
    >>> places = vitlens.places(vitlens.load("vit-digits"))
    >>> print(places[5], len(places), sep="; ")
    blocks.0.attention.scores (heads 4, query 65, key 65); 86
    >>> places.names[-3:]
    ('blocks.5.mlp', 'blocks.5.residual', 'logits')
    """
    require_model(model)
    return Places(access.place for access in accesses(model).values() if access.listed)


# the places that contexts have added, by model
_FURTHER: Final[WeakKeyDictionary[Model, list[Access]]] = WeakKeyDictionary()


@contextmanager
def further_places(model: Model, added: Sequence[Access]) -> Iterator[None]:
    """Add places to those of a model; removed on exit."""
    before = _FURTHER.get(model, [])
    _FURTHER[model] = [*before, *added]
    try:
        yield
    finally:
        _FURTHER[model] = before


def accesses(model: Model) -> dict[str, Access]:
    """Return how every place of a model is reached, by its name."""
    of_modules = _accesses_of_modules(model)
    if not _FURTHER.get(model):
        return of_modules
    *before_logits, logits = of_modules.values()
    return {access.name: access for access in (*before_logits, *_FURTHER[model], logits)}


@once_per_model
def _accesses_of_modules(model: Model) -> dict[str, Access]:
    """Return how every place that the model's modules have is reached, by its name."""
    model_layers: tuple[Layer, ...] = ()
    with suppress(UnsupportedError):  # raised for a model without attention
        model_layers = numbered_blocks(model)
    modules: list[str] = []  # the blocks and stages of a model without attention
    stage_modules: list[str] = []
    if not model_layers:
        modules, stage_modules = _blocks_and_stages(model)
    reader = _Reader(model, _batched_shapes(model, model_layers, modules))
    units = [layer.unit for layer in model_layers]
    ordered = list[Access]()
    for position, layer in enumerate(model_layers):
        units_before = units[:position]
        units_after = units[position + 1 :]
        ordered += reader.layer(
            layer,
            is_first_of_block=layer.unit not in units_before,
            is_last_of_block=layer.unit not in units_after,
            is_input=position == 0,
        )
    block_names = [name for name in modules if name in model.anatomy.blocks]
    for index, name in enumerate(block_names):
        ordered += reader.module(f"blocks.{index}", "block", name)
    stage_names = [name for name in modules if name in stage_modules]
    for index, name in enumerate(stage_names):
        ordered += reader.module(f"stages.{index}", "stage", name)
    logits = Place("logits", "logits", ("classes",), trace(model, 1).logits[1:], changeable=False)
    ordered.append(Access(logits, "", "logits"))
    return {access.name: access for access in ordered}


def _blocks_and_stages(model: Model) -> tuple[list[str], list[str]]:
    """Return the blocks and stages of a model without attention, and those that are stages."""
    names = [name for name in model.anatomy.blocks if not holds_another(name, model.anatomy.blocks)]
    stage_modules: list[str] = []
    with suppress(UnsupportedError):  # raised for a model without maps and tokens
        model_stages = stages(model)
        stage_modules = [stage.module for stage in model_stages if stage.kind == "stage"]
        names += [stage.module for stage in model_stages]
        names = list(dict.fromkeys(names))
    return names, stage_modules


class _BatchedShape(NamedTuple):
    """The shape of a tensor in a forward pass of one image, and its axis of the batch."""

    shape: Shape
    batch_axis: int


_PartKey = tuple[str, str]  # a module, and a part of its call as in `Access`
_Shapes = dict[_PartKey, _BatchedShape]


def _batched_shapes(model: Model, model_layers: Sequence[Layer], blocks: Sequence[str]) -> _Shapes:
    """Return the shapes of tensors with a batch axis."""
    single = _shapes(model, model_layers, blocks, images=1)
    double = _shapes(model, model_layers, blocks, images=2)
    shapes: _Shapes = {}
    for key, shape in single.items():
        axis = _batch_axis(shape, double.get(key))
        if axis is not None:
            shapes[key] = _BatchedShape(shape, axis)
    return shapes


def _shapes(
    model: Model, model_layers: Sequence[Layer], blocks: Sequence[str], *, images: int
) -> dict[_PartKey, Shape]:
    """Return the shapes of tensors in a forward pass of this number of images.

    Modules that are called several times are left out.
    """
    calls = trace(model, images).by_module
    names = list(blocks)
    for layer in model_layers:
        names.append(layer.unit)
        if layer.attention:
            names.append(layer.attention)
        if layer.mlp:
            names.append(layer.mlp)
    called_once = {name: calls[name][0] for name in names if len(calls.get(name, ())) == 1}
    shapes = {(name, "output"): call.output for name, call in called_once.items()}
    for layer in model_layers:
        if layer.stream is not None and layer.unit in called_once:
            shapes[layer.unit, "input"] = called_once[layer.unit].arguments[layer.stream].shape
        if not layer.attention:
            continue
        heads = traced_heads(model, images)[layer.attention]
        for stage, shape in heads.shapes.items():
            shapes[layer.attention, stage] = shape
        if len(heads.joined) == 1:
            shapes[layer.attention, "joined"] = heads.joined[0]
    return {key: shape for key, shape in shapes.items() if shape is not None}


def _batch_axis(single: Shape, double: Shape | None) -> int | None:
    """Return the axis that is twice as long with two images, or None.

    It is the first axis, or the second one of (tokens, batch, width).
    """
    if double is None or len(single) != len(double):
        return None
    longer = [axis for axis in range(len(single)) if single[axis] != double[axis]]
    if len(longer) != 1:
        return None
    axis = longer[0]
    is_batch = axis == 0 or (axis == 1 and len(single) == 3)
    if is_batch and double[axis] == 2 * single[axis]:
        return axis
    return None


def _place(name: str, kind: str, axes: tuple[str, ...], sizes: Shape) -> Place:
    """Return a place, with an axis for the windows if there are several.

    sizes: the number of windows, then the sizes of the axes.
    """
    if sizes[0] == 1:
        return Place(name, kind, axes, sizes[1:])
    return Place(name, kind, ("windows", *axes), sizes)


@dataclass(frozen=True)
class _Reader:
    """Reads the places of a model's modules and of its layers.

    model: the model.
    shapes: the shapes of the modules' tensors.
    """

    model: Model
    shapes: _Shapes

    def module(
        self, name: str, kind: str, module: str, part: Part = "output", **options: Any
    ) -> Iterator[Access]:
        """Yield the input or output of a module, if it is one tensor per forward pass.

        name, kind: the name and the kind of the place.
        options: further fields of its access.
        """
        batched = self.shapes.get((module, part))
        if batched is None:
            return
        shape = batched.shape
        tokens_first = batched.batch_axis == 1
        if tokens_first:  # (tokens, batch, width) -> (batch, tokens, width)
            shape = (shape[1], shape[0], shape[2])
        windows, *sizes = shape  # with one image, the batch has one element per window
        place = _place(name, kind, self._axes(module, sizes), (windows, *sizes))
        yield Access(place, module, part, windows=windows, tokens_first=tokens_first, **options)

    def _axes(self, module: str, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the axes of a module's tensor for one image, or for one window."""
        count = len(sizes)
        if count == 3:
            channels_last = sizes[2] == stream_width(self.model.module.get_submodule(module))
            return ("rows", "columns", "dim") if channels_last else ("channels", "rows", "columns")
        axes_by_count: dict[int, tuple[str, ...]] = {0: (), 1: ("dim",), 2: ("tokens", "dim")}
        if count in axes_by_count:
            return axes_by_count[count]
        return tuple(f"axis{number}" for number in range(1, count + 1))

    def layer(
        self, layer: Layer, *, is_first_of_block: bool, is_last_of_block: bool, is_input: bool
    ) -> Iterator[Access]:
        """Yield the places of a layer, or of a block without attention.

        Layers may share a block, whose input and output are listed only once.

        is_first_of_block, is_last_of_block: whether no earlier, or no later, layer has its block.
        is_input: whether the tokens of the image enter the model here.
        """
        # The unit is one of these:
        # - a block around its attention: input, heads, attention, MLP and residual are listed;
        # - a block that computes attention itself: the same, without its attention;
        # - attention without a block: only heads and attention, unless it holds an MLP as SigLIP's
        #   pooling does; then heads, MLP and, in place of its attention, its output.
        name = f"blocks.{layer.index}"
        options: dict[str, Any] = {"layer": layer.index}
        unit_is_attention = layer.unit == layer.attention
        unit_is_block = not unit_is_attention or layer.unit in self.model.anatomy.blocks
        # SigLIP's pooling is attention with an MLP inside, without a block
        holds_mlp = layer.mlp is not None and layer.mlp.startswith(f"{layer.unit}.")
        has_residual = unit_is_block or holds_mlp  # the unit returns more than its attention
        is_input_listed = is_first_of_block and unit_is_block
        yield from self._input(layer, listed=is_input_listed, is_input=is_input)
        if layer.attention:
            yield from self._heads(layer)
        # the output of a unit that computes attention itself is listed below, as its residual
        if layer.attention and not (unit_is_attention and has_residual):
            yield from self.module(f"{name}.attention", "attention", layer.attention, **options)
        if layer.mlp is not None:
            yield from self.module(
                f"{name}.mlp", "mlp", layer.mlp, listed=is_last_of_block, **options
            )
        if not has_residual:
            return
        # the argument that replaces the output if the block is removed
        replacement = layer.stream if layer.removable else None
        for access in self.module(
            f"{name}.residual",
            "residual",
            layer.unit,
            argument=replacement,
            listed=is_last_of_block,
            **options,
        ):
            axes = access.place.axes
            is_stream = unit_is_block and len(axes) > 1 and axes[-1] == "dim"
            if is_stream:
                yield access
            else:  # no stream with its width last: the output has only the name of the block
                yield replace(access, place=replace(access.place, name=name, kind="block"))

    def _input(self, layer: Layer, *, listed: bool, is_input: bool) -> Iterator[Access]:
        """Yield the residual stream that enters the layer's block, if it has one.

        listed: whether `places` lists it, and the patches if the image enters here (is_input).
        """
        if layer.stream is None:
            return
        name = f"blocks.{layer.index}"
        layout = self.model.anatomy.layout
        options: dict[str, Any] = {"layer": layer.index, "argument": layer.stream}
        for access in self.module(f"{name}.input", "input", layer.unit, "input", **options):
            dim = access.place.shape[-1]
            if listed and is_input and layout is not None:
                holds_all_tokens = access.place.shape == (layout.tokens, dim)
                if holds_all_tokens:
                    patches = Place("patches", "patches", ("patches", "dim"), (layout.patches, dim))
                    positions = tuple(range(len(layout.prefix), layout.tokens))
                    yield Access(patches, layer.unit, "input", tokens=positions, **options)
            if listed:
                yield access
            # the input as a sequence, even if it is a map
            sequence = Place(f"{name}.tokens", "input", ("tokens", "dim"), (layer.tokens, dim))
            yield Access(sequence, layer.unit, "input", flat=True, listed=False, **options)

    def _heads(self, layer: Layer) -> Iterator[Access]:
        """Yield the stages of the layer's attention, and its heads."""
        name = f"blocks.{layer.index}"
        module = layer.attention
        for stage, axes in _STAGES.items():
            batched = self.shapes.get((module, stage))
            if batched is None or batched.batch_axis != 0 or len(batched.shape) != 4:
                continue
            windows = batched.shape[0]  # of one image
            place = _place(f"{name}.attention.{stage}", stage, axes, batched.shape)
            yield Access(place, module, stage, layer.index, heads=layer.heads, windows=windows)
        joined = self.shapes.get((module, "joined"))
        if joined is None or joined.batch_axis != 0 or not layer.head_dim:
            return
        windows, tokens, _ = joined.shape  # (windows of an image, tokens, heads x head_dim)
        place = _place(
            f"{name}.heads",
            "heads",
            axes=("heads", "tokens", "head_dim"),
            sizes=(windows, layer.heads, tokens, layer.head_dim),
        )
        all_heads = Access(place, module, "joined", layer.index, heads=layer.heads, windows=windows)
        yield all_heads
        for head in range(layer.heads):
            place = _place(
                f"{name}.head.{head}",
                "head",
                axes=("tokens", "head_dim"),
                sizes=(windows, tokens, layer.head_dim),
            )
            yield replace(all_heads, place=place, head=head)
