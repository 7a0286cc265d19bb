"""The places of a model: tensors by stable names, and how they are reached in a forward pass.

Their shapes are read in forward passes of one and of two images. Two kinds of names are known but
not listed: "blocks.3.tokens", a block's input as a sequence also where it is a map, and the block
and MLP of a layer that shares its block with a later one.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.call import Stage
from vitlens.lens.stages import holds_another, stages, stream_width
from vitlens.lens.trace import Layer, trace, traced_heads
from vitlens.lens.trace import blocks as numbered_blocks
from vitlens.models.hooks import Key
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model, require_model
from vitlens.models.recording import Shape

Part = Literal["input", "output", "joined", "logits"] | Stage

KIND_WORDS: Final = {
    "patches": "patch tokens that enter the first block",
    "input": "residual stream before the block",
    "residual": "residual stream after the block",
    "block": "output of a block without a stream of tokens",
    "attention": "output of the attention, after its output projection",
    "queries": "queries, norms and rotary embeddings applied",
    "keys": "keys, norms and rotary embeddings applied",
    "values": "values",
    "scores": "scaled query-key products with bias, before the softmax",
    "weights": "attention weights, after the softmax",
    "heads": "outputs of all heads, before the output projection",
    "head": "output of one head, before the output projection",
    "mlp": "output of the MLP, before LayerScale or a norm after it",
    "stage": "last map of a stage",
    "latents": "latents of the dictionary of this place",
    "latent": "one latent of the dictionary",
    "logits": "logits",
}
_WEIGHTS: Final = ("heads", "query", "key")
_STAGES: Final[dict[Stage, tuple[str, ...]]] = {
    "queries": ("heads", "query", "head_dim"),
    "keys": ("heads", "key", "head_dim"),
    "values": ("heads", "key", "head_dim"),
    "scores": _WEIGHTS,
    "weights": _WEIGHTS,
}


@dataclass(frozen=True)
class Place:
    """One place in a model whose tensor can be captured.

    name: stable, such as "blocks.3.head.7", blocks and heads counted from 0.
    kind: what the tensor is, a key of KIND_WORDS.
    axes and shape: the names and sizes of its axes for one image, the batch axis left out.
    changeable: whether `intervene` can change it.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    changeable: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.described()})"

    def described(self) -> str:
        """Return its axes with their sizes: "tokens 197, dim 192"."""
        return ", ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.shape))


class Places(tuple[Place, ...]):
    """The places of a model, in forward order.

    In the printed table, equal places of several blocks are one line. A name in the table is a
    pattern that `capture`, `intervene` and `patch` take.
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return their names."""
        return tuple(place.name for place in self)

    def lines(self) -> list[tuple[str, str, str]]:
        """Return the table's lines: pattern, axes with sizes, and what the tensor is."""
        lines = []
        for place in self:
            words = KIND_WORDS[place.kind]
            if not place.changeable:
                words += " (captured only)"
            lines.append((place.name, place.described(), words))
        for pattern in (r"(.*\.(?:head|latent)\.)(\d+)()", r"(blocks\.|stages\.)(\d+)(.*)"):
            lines = _merge_lines(lines, pattern)
        return lines

    def __str__(self) -> str:
        lines = [("place", "shape for one image", "tensor"), *self.lines()]
        name_width = max(len(line[0]) for line in lines)
        shape_width = max(len(line[1]) for line in lines)
        return "\n".join(
            f"{name:{name_width}}  {shape:{shape_width}}  {words}" for name, shape, words in lines
        )

    __repr__ = __str__


def _merge_lines(lines: list[tuple[str, str, str]], pattern: str) -> list[tuple[str, str, str]]:
    """Merge the lines that differ only in the number matched by the second group of the pattern."""
    numbers_by_line: dict[tuple[str, str, str, str], list[str]] = {}
    for name, shape, words in lines:
        match = re.fullmatch(pattern, name)
        before, number, after = match.groups() if match else (name, "", "")
        numbers_by_line.setdefault((before, after, shape, words), []).append(number)
    merged = []
    for (before, after, shape, words), numbers in numbers_by_line.items():
        merged.append((f"{before}{_range(numbers)}{after}", shape, words))
    return merged


def _range(numbers: list[str]) -> str:
    """Return numbers as a part of a pattern: "3", "{0..11}" or "{0,2..4}"; of no number ""."""
    runs: list[list[int]] = []
    for number in sorted(map(int, filter(None, numbers))):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    if len(numbers) == 1:
        return "".join(words)
    return f"{{{','.join(words)}}}"


class View(Protocol):
    """Another form of the tensor at a place, in which it is read and changed."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return the form of the tensor."""
        ...

    def write(self, tensor: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return the tensor whose form was `old`, changed to `new`."""
        ...


@dataclass(frozen=True)
class Access:
    """The way to the tensor of one place.

    module: the name of the module whose call it belongs to.
    part: that call's input (the argument `argument`), its output, the heads joined before its
        output projection, or a stage of its attention.
    layer: the first layer that must run again when it changes, None where replay has none;
        argument, of an output: the input that it is where the block is removed, None where it
        cannot be.
    heads: the number of heads of the layer.
    windows: calls of the module an image.
    tokens_first: whether the module's tensor is (tokens, batch, ..), not (batch, tokens, ..).
    head, tokens: which head and which positions of the tensor are meant, None: all.
    flat: a map is taken as tokens, row by row.
    listed: by `places`.
    view: the form in which the tensor is read and changed, None: its own.
    """

    place: Place
    module: str
    part: Part
    layer: int | None = None
    argument: Key | None = None
    heads: int = 0
    windows: int = 1
    tokens_first: bool = False
    head: int | None = None
    tokens: tuple[int, ...] | None = None
    flat: bool = False
    listed: bool = True
    view: View | None = None

    @property
    def name(self) -> str:
        """Return the name of its place."""
        return self.place.name

    def at(self, tokens: tuple[int, ...], word: str, axis: int) -> "Access":
        """Return the access to some positions on the axis of tokens only.

        word: the positions as the user typed them, which end the place's name. Raises InputError
        where there are no such positions.
        """
        count = self.place.shape[axis]
        for token in tokens:
            if not 0 <= token < count:
                raise InputError(
                    f"expected positions from 0 to {count - 1} at {self.name}, found {token}"
                )
        shape = (*self.place.shape[:axis], len(tokens), *self.place.shape[axis + 1 :])
        if self.tokens is not None:
            tokens = tuple(self.tokens[token] for token in tokens)
        place = replace(self.place, name=f"{self.name}[{word}]", shape=shape)
        return replace(self, place=place, tokens=tokens)

    def whole(self, raw: Tensor) -> Tensor:
        """Return the tensor of the module with the batch of images as first axis.

        Windows and heads are separate axes.
        """
        tensor = raw.transpose(0, 1) if self.tokens_first else raw
        if self.part == "joined":  # (calls, tokens, heads x head_dim)
            tensor = raw.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.flat and raw.dim() == 4:
            tensor = tensor.flatten(1, 2)
        if self.windows > 1:
            tensor = tensor.unflatten(0, (-1, self.windows))
        return tensor

    def raw(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return the inverse of `whole`; like: the module's tensor."""
        tensor = whole.flatten(0, 1) if self.windows > 1 else whole
        if self.part == "joined":
            tensor = tensor.transpose(1, 2)
        if self.tokens_first:
            tensor = tensor.transpose(0, 1)
        return tensor.reshape(like.shape).to(like.dtype)

    def index(self) -> Any:
        """Return the index of the place's tensor (batch, *shape) in `whole`."""
        index: list[Any] = [slice(None)]
        if self.windows > 1:
            index.append(slice(None))
        if self.part == "joined":
            index.append(slice(None) if self.head is None else self.head)
        index.append(slice(None) if self.tokens is None else list(self.tokens))
        return tuple(index)

    def read(self, raw: Tensor) -> Tensor:
        """Return the place's tensor (batch, *shape), from the module's."""
        tensor = self.whole(raw)[self.index()]
        return tensor if self.view is None else self.view.read(tensor)


def places(model: Model) -> Places:
    """Return every place whose tensor `capture` gives, in forward order.

    A place has a name, axes, and sizes for one image. Blocks and heads count from 0, in the order
    of the forward pass, as the layers of `attention`; an attention pooling at the end is the last
    of them. A block without attention has a number and no heads. A place that a model does not have
    is not listed: windows have weights of every window (an axis `windows`), attention that is
    computed by hand has no queries, a CNN has blocks and stages.

    >>> import vitlens
    >>> places = vitlens.places(vitlens.load("vit-digits"))
    >>> print(places[5], len(places), sep="; ")
    blocks.0.attention.scores (heads 4, query 65, key 65); 86
    >>> places.names[-3:]
    ('blocks.5.mlp', 'blocks.5.residual', 'logits')
    """
    require_model(model)
    return Places(access.place for access in accesses(model).values() if access.listed)


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
    *inner, logits = of_modules.values()
    return {access.name: access for access in (*inner, *_FURTHER[model], logits)}


@once_per_model
def _accesses_of_modules(model: Model) -> dict[str, Access]:
    """Return how every place that the model's modules have is reached, by its name."""
    model_layers: tuple[Layer, ...] = ()
    with suppress(UnsupportedError):  # no attention
        model_layers = numbered_blocks(model)
    blocks: list[str] = []
    maps: list[str] = []
    if not model_layers:
        blocks = [
            name for name in model.anatomy.blocks if not holds_another(name, model.anatomy.blocks)
        ]
        with suppress(UnsupportedError):  # no map and no token
            maps = [stage.module for stage in stages(model) if stage.kind == "stage"]
            blocks += [stage.module for stage in stages(model)]
            blocks = list(dict.fromkeys(blocks))
    reader = _Reader(model, _batched_shapes(model, model_layers, blocks))
    units = [layer.unit for layer in model_layers]
    ordered = list[Access]()
    for position, layer in enumerate(model_layers):
        before = units[:position]
        after = units[position + 1 :]
        ordered += reader.layer(
            layer,
            first=layer.unit not in before,
            last=layer.unit not in after,
            is_input=position == 0,
        )
    for index, name in enumerate(name for name in blocks if name in model.anatomy.blocks):
        ordered += reader.module(f"blocks.{index}", "block", name)
    for index, name in enumerate(name for name in blocks if name in maps):
        ordered += reader.module(f"stages.{index}", "stage", name)
    logits = Place("logits", "logits", ("classes",), trace(model, 1).logits[1:], changeable=False)
    ordered.append(Access(logits, "", "logits"))
    return {access.name: access for access in ordered}


# by module and the part of its call: the shape for one image, and the batch's axis
_Shapes = dict[tuple[str, str], tuple[Shape, int]]


def _batched_shapes(model: Model, model_layers: Sequence[Layer], blocks: Sequence[str]) -> _Shapes:
    """Return the shapes of tensors with a batch axis, with that axis."""
    single = _shapes(model, model_layers, blocks, 1)
    double = _shapes(model, model_layers, blocks, 2)
    shapes: _Shapes = {}
    for key, shape in single.items():
        axis = _batch_axis(shape, double.get(key))
        if axis is not None:
            shapes[key] = (shape, axis)
    return shapes


def _shapes(
    model: Model, model_layers: Sequence[Layer], blocks: Sequence[str], count: int
) -> dict[tuple[str, str], Shape]:
    """Return the shapes of a forward pass, by module and part, of what was computed once."""
    calls = trace(model, count).by_module
    names = list(blocks)
    for layer in model_layers:
        names += [layer.unit, layer.attention] if layer.attention else [layer.unit]
        if layer.mlp:
            names.append(layer.mlp)
    called_once = {name: calls[name][0] for name in names if len(calls.get(name, ())) == 1}
    shapes = {(name, "output"): call.output for name, call in called_once.items()}
    for layer in model_layers:
        if layer.stream is not None and layer.unit in called_once:
            shapes[layer.unit, "input"] = called_once[layer.unit].arguments[layer.stream].shape
        if not layer.attention:
            continue
        heads = traced_heads(model, count)[layer.attention]
        for stage, shape in heads.shapes.items():
            shapes[layer.attention, stage] = shape
        if len(heads.joined) == 1:
            shapes[layer.attention, "joined"] = heads.joined[0]
    return {key: shape for key, shape in shapes.items() if shape is not None}


def _batch_axis(single: Shape, double: Shape | None) -> int | None:
    """Return the axis that is twice as long with two images.

    It is the first axis, or the second one of tokens.
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
    """Return a place with windows as an axis of its own where there are several.

    sizes: the number of windows, then those of the axes.
    """
    if sizes[0] == 1:
        return Place(name, kind, axes, sizes[1:])
    return Place(name, kind, ("windows", *axes), sizes)


@dataclass(frozen=True)
class _Reader:
    """The places of a model's modules, and of its layers."""

    model: Model
    shapes: _Shapes

    def module(
        self, name: str, kind: str, module: str, part: Part = "output", **options: Any
    ) -> Iterator[Access]:
        """Yield the input or output of a module, where it is one tensor a forward pass."""
        shape, axis = self.shapes.get((module, part), ((), 0))
        if not shape:
            return
        if axis == 1:
            shape = (shape[1], shape[0], shape[2])
        windows, *sizes = shape
        place = _place(name, kind, self._axes(module, sizes), (windows, *sizes))
        yield Access(place, module, part, windows=windows, tokens_first=axis == 1, **options)

    def _axes(self, module: str, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the axes of a module's tensor of one image, or of one window."""
        if len(sizes) == 3:
            channels_last = sizes[2] == stream_width(self.model.module.get_submodule(module))
            return ("rows", "columns", "dim") if channels_last else ("channels", "rows", "columns")
        vectors: dict[int, tuple[str, ...]] = {0: (), 1: ("dim",), 2: ("tokens", "dim")}
        if len(sizes) in vectors:
            return vectors[len(sizes)]
        return tuple(f"axis{index}" for index in range(1, len(sizes) + 1))

    def layer(self, layer: Layer, *, first: bool, last: bool, is_input: bool) -> Iterator[Access]:
        """Yield the places of a layer, or of a block without attention.

        first, last: of the layers that share its block, whose input and output are listed once.
        is_input: whether the tokens of the image enter the model here.
        """
        name = f"blocks.{layer.index}"
        options = dict[str, Any](layer=layer.index)
        # its unit is a residual block, not attention without one
        block = layer.unit != layer.attention or layer.unit in self.model.anatomy.blocks
        # or attention with an MLP after it (SigLIP's pooling)
        output = block or (layer.mlp is not None and layer.mlp.startswith(f"{layer.unit}."))
        yield from self._input(layer, listed=first and block, is_input=is_input)
        if layer.attention:
            yield from self._heads(layer)
        if layer.attention and (layer.attention != layer.unit or not output):
            yield from self.module(f"{name}.attention", "attention", layer.attention, **options)
        if layer.mlp is not None:
            yield from self.module(f"{name}.mlp", "mlp", layer.mlp, listed=last, **options)
        if not output:
            return
        removed = layer.stream if layer.removable else None
        for access in self.module(
            f"{name}.residual", "residual", layer.unit, argument=removed, listed=last, **options
        ):
            if block and access.place.axes[-1] == "dim" and len(access.place.axes) > 1:
                yield access
            else:  # no stream of tokens
                yield replace(access, place=replace(access.place, name=name, kind="block"))

    def _input(self, layer: Layer, *, listed: bool, is_input: bool) -> Iterator[Access]:
        """Yield the residual stream that enters its block, where it has one."""
        if layer.stream is None:
            return
        name = f"blocks.{layer.index}"
        layout = self.model.anatomy.layout
        options: dict[str, Any] = {"layer": layer.index, "argument": layer.stream}
        for access in self.module(f"{name}.input", "input", layer.unit, "input", **options):
            dim = access.place.shape[-1]
            if listed:
                if is_input and layout is not None and access.place.shape == (layout.tokens, dim):
                    place = Place("patches", "patches", ("patches", "dim"), (layout.patches, dim))
                    tokens = tuple(range(len(layout.prefix), layout.tokens))
                    yield Access(place, layer.unit, "input", tokens=tokens, **options)
                yield access
            place = Place(f"{name}.tokens", "input", ("tokens", "dim"), (layer.tokens, dim))
            yield Access(place, layer.unit, "input", flat=True, listed=False, **options)

    def _heads(self, layer: Layer) -> Iterator[Access]:
        """Yield the stages of its attention, and its heads."""
        name = f"blocks.{layer.index}"
        module = layer.attention
        for stage, axes in _STAGES.items():
            shape, axis = self.shapes.get((module, stage), ((), 0))
            if len(shape) == 4 and axis == 0:
                place = _place(f"{name}.attention.{stage}", stage, axes, shape)
                yield Access(place, module, stage, layer.index, heads=layer.heads, windows=shape[0])
        shape, axis = self.shapes.get((module, "joined"), ((), 0))
        if not shape or axis or not layer.head_dim:
            return
        windows, tokens, _ = shape
        axes = ("heads", "tokens", "head_dim")
        sizes = (windows, layer.heads, tokens, layer.head_dim)
        place = _place(f"{name}.heads", "heads", axes, sizes)
        whole = Access(place, module, "joined", layer.index, heads=layer.heads, windows=windows)
        yield whole
        for head in range(layer.heads):
            place = _place(
                f"{name}.head.{head}", "head", axes[1:], (windows, tokens, layer.head_dim)
            )
            yield replace(whole, place=place, head=head)
