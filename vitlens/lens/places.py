"""The places of a model: tensors by stable names, and how they are reached in a forward pass.

A `Place` is what a user sees, and an `Access` is the way to its tensor. `accesses` returns those of
a model, which a `_Reader` finds. The shapes of places are read in forward passes of one and of two
images. Two kinds of names exist but are not listed. "blocks.3.tokens" is a block's input as a
sequence, even if it is a map. The other kind is the block and MLP of a layer that shares its block
with a later one.
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
# the axes of each stage's tensor
_STAGES: Final[dict[Stage, tuple[str, ...]]] = {
    "queries": ("heads", "query", "head_dim"),
    "keys": ("heads", "key", "head_dim"),
    "values": ("heads", "key", "head_dim"),
    "scores": _WEIGHTS,
    "weights": _WEIGHTS,
}


@dataclass(frozen=True)
class Place:
    """One place in a model with a tensor that can be captured.

    name: a stable name such as "blocks.3.head.7"; blocks and heads count from 0.
    kind: what the tensor is, a key of KIND_WORDS.
    axes: the names of the tensor's axes for one image, without the batch axis.
    shape: the sizes of these axes.
    changeable: whether `intervene` can change the tensor.
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
        # first the heads of a block, then the blocks
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
    """Merge the lines that differ only in one number of the place's name.

    lines: as `Places.lines` returns them.
    pattern: matches a name in three groups: before the number, the number, and after it.
    """
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
    """Return numbers as a part of a pattern: "3", "{0..11}" or "{0,2..4}".

    A single "" (a name without a number) returns "".
    """
    runs: list[list[int]] = []  # of numbers that follow each other
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
    """Another form of the tensor at a place; the place is read and changed in this form."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return the form of the tensor."""
        ...

    def write(self, tensor: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return the tensor whose form was `old`, changed to `new`."""
        ...


@dataclass(frozen=True)
class Access:
    """The way to the tensor of one place.

    Tensors belong to the call of a module. `whole` gives them the batch of images as first axis,
    and `index` selects the place in it.

    place: the place.
    module: the name of the module.
    part: which tensor of the call it is: the input, the output, the heads joined before the output
        projection, or a stage of the attention.
    layer: the first layer that must run again if the tensor changes, or None if there is no replay.
    argument: the key of the argument that is the input. For an output, it is the argument that
        replaces the output if the block is removed, or None if the block cannot be removed.
    heads: the number of heads of the layer.
    windows: the number of calls of the module per image.
    tokens_first: whether the module's tensor is (tokens, batch, ..), not (batch, tokens, ..).
    head: the head that is meant, or None for all.
    tokens: the positions that are meant, or None for all.
    flat: whether a map is taken as tokens, row by row.
    listed: whether `places` lists the place.
    view: the form in which the tensor is read and changed, or None for the tensor itself.
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
        """Return the access to only some positions on the axis of tokens.

        Raises InputError for positions that do not exist.

        tokens: the positions.
        word: the positions as the user typed them; the new place's name ends with it.
        axis: the axis of tokens in the place's shape.
        """
        count = self.place.shape[axis]
        for token in tokens:
            if not 0 <= token < count:
                raise InputError(
                    f"expected positions from 0 to {count - 1} at {self.name}, found {token}"
                )
        shape = (*self.place.shape[:axis], len(tokens), *self.place.shape[axis + 1 :])
        if self.tokens is not None:  # the positions count within those that are already selected
            tokens = tuple(self.tokens[token] for token in tokens)
        place = replace(self.place, name=f"{self.name}[{word}]", shape=shape)
        return replace(self, place=place, tokens=tokens)

    def whole(self, raw: Tensor) -> Tensor:
        """Return the tensor of the module with the batch of images as first axis.

        Windows and heads are separate axes: (batch, windows, heads, tokens, ..), without those that
        the tensor does not have.
        """
        tensor = raw.transpose(0, 1) if self.tokens_first else raw
        if self.part == "joined":  # (calls, tokens, heads x head_dim)
            tensor = raw.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.flat and raw.dim() == 4:  # (batch, rows, columns, channels)
            tensor = tensor.flatten(1, 2)
        if self.windows > 1:
            tensor = tensor.unflatten(0, (-1, self.windows))
        return tensor

    def raw(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return the inverse of `whole`: the module's tensor.

        like: a tensor with the shape and the type of the result.
        """
        tensor = whole.flatten(0, 1) if self.windows > 1 else whole
        if self.part == "joined":
            tensor = tensor.transpose(1, 2)
        if self.tokens_first:
            tensor = tensor.transpose(0, 1)
        return tensor.reshape(like.shape).to(like.dtype)

    def index(self) -> Any:
        """Return the index of the place's tensor (batch, *shape) in `whole`."""
        everything = slice(None)
        index: list[Any] = [everything]  # the batch
        if self.windows > 1:
            index.append(everything)
        if self.part == "joined" and self.head is None:
            index.append(everything)
        elif self.part == "joined":
            index.append(self.head)
        if self.tokens is None:
            index.append(everything)
        else:
            index.append(list(self.tokens))
        return tuple(index)

    def read(self, raw: Tensor) -> Tensor:
        """Return the place's tensor (batch, *shape), from the module's."""
        tensor = self.whole(raw)[self.index()]
        return tensor if self.view is None else self.view.read(tensor)


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
            first=layer.unit not in units_before,
            last=layer.unit not in units_after,
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


# the shape of a tensor for one image and the axis of the batch, by module and part of its call
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
    """Return the shapes of tensors in a forward pass of so many images, by module and part.

    Modules that are called several times are left out.
    """
    calls = trace(model, count).by_module
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
        heads = traced_heads(model, count)[layer.attention]
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
    shapes: the shapes of the modules' tensors, with the axis of the batch.
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
        shape, batch_axis = self.shapes.get((module, part), ((), 0))  # () without such a tensor
        if not shape:
            return
        tokens_first = batch_axis == 1
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

    def layer(self, layer: Layer, *, first: bool, last: bool, is_input: bool) -> Iterator[Access]:
        """Yield the places of a layer, or of a block without attention.

        Layers may share a block, whose input and output are listed only once.

        first: whether it is the first layer of its block.
        last: whether it is the last layer of its block.
        is_input: whether the tokens of the image enter the model here.
        """
        name = f"blocks.{layer.index}"
        options: dict[str, Any] = {"layer": layer.index}
        unit_is_attention = layer.unit == layer.attention
        unit_is_block = not unit_is_attention or layer.unit in self.model.anatomy.blocks
        # SigLIP's pooling is attention with an MLP inside, without a block
        holds_mlp = layer.mlp is not None and layer.mlp.startswith(f"{layer.unit}.")
        has_residual = unit_is_block or holds_mlp
        yield from self._input(layer, listed=first and unit_is_block, is_input=is_input)
        if layer.attention:
            yield from self._heads(layer)
        if layer.attention and not (unit_is_attention and has_residual):
            yield from self.module(f"{name}.attention", "attention", layer.attention, **options)
        if layer.mlp is not None:
            yield from self.module(f"{name}.mlp", "mlp", layer.mlp, listed=last, **options)
        if not has_residual:
            return
        # the argument that replaces the output if the block is removed
        replacement = layer.stream if layer.removable else None
        for access in self.module(
            f"{name}.residual", "residual", layer.unit, argument=replacement, listed=last, **options
        ):
            axes = access.place.axes
            is_stream = unit_is_block and len(axes) > 1 and axes[-1] == "dim"
            if is_stream:
                yield access
            else:
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
            shape, batch_axis = self.shapes.get((module, stage), ((), 0))
            if len(shape) == 4 and batch_axis == 0:
                place = _place(f"{name}.attention.{stage}", stage, axes, shape)
                yield Access(place, module, stage, layer.index, heads=layer.heads, windows=shape[0])
        shape, batch_axis = self.shapes.get((module, "joined"), ((), 0))
        if not shape or batch_axis != 0 or not layer.head_dim:
            return
        windows, tokens, _ = shape  # of one image: (windows, tokens, heads x head_dim)
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
