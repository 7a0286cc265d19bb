"""The layers at which a model's features are read: blocks of a transformer, stages of a CNN; what
enters the first of them (the embedding, a CNN's stem); and the final norm.

They are determined from the shapes in one forward pass of two images, for any number of registers
and any grid.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from statistics import mode
from typing import Any, Final, Literal

from torch import Tensor, nn

from vitlens.errors import UnsupportedError
from vitlens.lens.cells import (
    Cells,
    calls_outside_attention,
    channel_axis_of,
    located_cells,
    reaches_logits,
)
from vitlens.lens.trace import trace
from vitlens.models.hooks import Arguments, Key, first_tensor, watching
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model
from vitlens.models.nested import tensors_in
from vitlens.models.recording import Shape, Trace
from vitlens.models.requirement import requirement
from vitlens.shapes import PrefixKind, Tokens

StageKind = Literal["block", "stage", "embedding", "stem"]
_BLOCK: Final[StageKind] = "block"
_STAGE: Final[StageKind] = "stage"


@dataclass(frozen=True)
class FeatureStage:
    """One layer at which features are read.

    index: from 0, a block's number, None before block 0.
    kind: a transformer's "block", a CNN's "stage" (the last map of one resolution or group of
        blocks), or what enters the first block: a transformer's "embedding", a CNN's "stem".
    module: the name of the module whose output it is.
    width: dim of its tokens, or channels.
    grid: (rows, columns) of patches or cells, None where their order is unknown.
    prefix: tokens before them.
    channel_axis: the channel axis of the tensor.
    argument: the one of the module that it is, None for the output.
    part: the tensor's index where the output is several.
    """

    index: int | None
    kind: StageKind
    module: str
    width: int
    grid: tuple[int, int] | None
    prefix: tuple[PrefixKind, ...]
    channel_axis: int
    argument: Key | None = None
    part: int = 0

    @property
    def title(self) -> str:
        """Return its name in reports: "block 5", "stage 2", "embedding"."""
        return self.kind if self.index is None else f"{self.kind} {self.index}"

    def tokens(self, output: Any) -> Tokens:
        """Return the module's output (or argument) as (batch, tokens, width).

        A map is flattened row by row.
        """
        tensor = tensors_in(output)[self.part]
        tokens: Tokens = tensor.movedim(self.channel_axis, -1).flatten(1, -2)
        return tokens


@dataclass(frozen=True)
class FinalNorm:
    """The norm between the last block and the classifier.

    width: the width of its input.
    on_tokens: whether its input is all tokens, or the pooled vector (timm's fc_norm).
    """

    module: str
    width: int
    on_tokens: bool


@requirement("features")
def require_features(model: Model) -> None:
    """Raise UnsupportedError for a model without a layer at which features can be read."""
    stages(model)


def stages(model: Model) -> tuple[FeatureStage, ...]:
    """Return every layer at which features can be read, in forward order; determined once per
    model.

    Blocks with a different number of tokens (CaiT's class attention) are skipped. Raises
    UnsupportedError where no layer is left.
    """
    return _places(model)[0]


def embedding_stage(model: Model) -> FeatureStage | None:
    """Return the tokens (a CNN's map) that enter the first block, before any attention.

    They are patches, positions and prefix tokens. The stage has no number, so that block 0 stays
    layer 0. None for a model without blocks, and where the input of the first one is no sequence of
    all patches.
    """
    return _places(model)[1]


def final_norm(model: Model) -> FinalNorm | None:
    """Return the model's final norm; None where it has none (CNNs, post-norm transformers)."""
    return _places(model)[2]


@contextmanager
def watching_stages(
    model: Model, chosen: Sequence[FeatureStage], reducer: Callable[[FeatureStage, Tokens], None]
) -> Iterator[None]:
    """Hand the chosen layers' tokens to the reducer as they are computed.

    The hooks are removed on exit.
    """
    outputs = {stage.module: stage for stage in chosen if stage.argument is None}
    inputs = {
        stage.module: (stage, stage.argument) for stage in chosen if stage.argument is not None
    }

    def before(name: str, values: Arguments) -> None:
        stage, argument = inputs[name]
        reducer(stage, stage.tokens(values[argument]))

    def after(name: str, _arguments: Arguments, output: Any) -> None:
        reducer(outputs[name], outputs[name].tokens(output))

    with watching(model.module, inputs, before=before), watching(model.module, outputs, after):
        yield


@contextmanager
def watching_blocks(model: Model, reducer: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand each block's output, where it is a tensor, to the reducer with the block's number."""
    numbers = {name: number for number, name in enumerate(model.anatomy.blocks)}

    def after(name: str, _arguments: Arguments, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            reducer(numbers[name], tensor)

    with watching(model.module, numbers, after):
        yield


@contextmanager
def watching_stream(model: Model, reducer: Callable[[int, Tokens], None]) -> Iterator[None]:
    """Hand the residual stream after each block, (batch, tokens, dim), to the reducer with the
    block's number.

    Maps, (batch, rows, columns, dim) or (batch, dim, rows, columns), are flattened row by row; the
    channel axis is the one of the block's width. Blocks whose output is neither tokens nor such a
    map are skipped.
    """

    def take(number: int, output: Tensor) -> None:
        width = stream_width(model.module.get_submodule(model.anatomy.blocks[number]))
        if output.dim() == 3:
            reducer(number, output)
        elif output.dim() == 4 and output.shape[3] == width:
            reducer(number, output.flatten(1, 2))
        elif output.dim() == 4 and output.shape[1] == width:
            reducer(number, output.flatten(2).transpose(1, 2))

    with watching_blocks(model, take):
        yield


@once_per_model
def _places(model: Model) -> tuple[tuple[FeatureStage, ...], FeatureStage | None, FinalNorm | None]:
    two_images = trace(model, 2)
    outputs = [
        (call.module, call.output)
        for call in two_images.calls
        if call.module and call.output is not None
    ]
    blocks = _stream_blocks(model, outputs)
    read = _stages(model, blocks, dict(outputs))
    if not read:
        raise UnsupportedError(_no_stages_message(model))
    return read, _embedding(model, blocks, read, two_images), _norm(model, outputs, read[-1])


def _no_stages_message(model: Model) -> str:
    anatomy = model.anatomy
    message = (
        f"expected blocks or maps to read features from, found none in {model.alias} "
        f"({anatomy.family})"
    )
    if anatomy.unread:
        message += f": {anatomy.unread}"
    if anatomy.layout is not None or anatomy.unread:  # a transformer
        message += (
            "; put each block, batch first, in a module of its own, or name them with blocks="
        )
    return message


def _stream_blocks(model: Model, outputs: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return the blocks that return the patches of each image, in forward order, without those that
    hold others.

    outputs: modules and the shapes of their outputs, in forward order.
    """
    shapes = dict(outputs)
    order = {name: position for position, (name, _) in enumerate(outputs)}
    layout = model.anatomy.layout
    token_count = None if layout is None else layout.tokens
    blocks = []
    for name in model.anatomy.blocks:
        if name not in shapes:
            continue
        holds_patches = _is_stream(shapes[name], token_count)
        if not holds_patches and layout is None:
            holds_patches = bool(located_cells(model).outputs.get(name))
        if holds_patches:
            blocks.append(name)
    innermost = [name for name in blocks if not holds_another(name, blocks)]
    return sorted(innermost, key=order.__getitem__)


def _stages(model: Model, blocks: list[str], shapes: dict[str, Shape]) -> tuple[FeatureStage, ...]:
    """Return the layers at which features are read, in forward order."""
    names = blocks
    kind = _BLOCK
    if model.anatomy.family == "cnn" and all(len(shapes[name]) == 4 for name in names):
        kind = _STAGE
        groups = groupby(names, key=lambda name: name.rpartition(".")[0])
        names = [list(group)[-1] for _, group in groups]
    if not names and model.anatomy.layout is None:
        kind = _STAGE
        names = _last_maps(model)
    numbers = {name: number for number, name in enumerate(names)}
    if kind == _BLOCK:
        every = [
            name
            for name in dict.fromkeys(model.anatomy.blocks)
            if not holds_another(name, model.anatomy.blocks)
        ]
        numbers = {name: number for number, name in enumerate(every)}
    read = list[FeatureStage]()
    for name in names:
        stage = _stage(model, numbers[name], kind, name, shapes[name])
        if stage is not None:
            read.append(stage)
    return tuple(read)


def _last_maps(model: Model) -> list[str]:
    """Return the modules of a model without blocks that return the last map of each resolution, in
    forward order.

    Empty where attention follows the last map, which is then the stem's.
    """
    attention_ends = [
        call.end for call in trace(model, 1).calls if call.module in model.anatomy.parts
    ]
    outputs = located_cells(model).outputs
    last = dict[tuple[int, int], str]()
    end = 0
    for call in reversed(calls_outside_attention(model)):
        maps = [cells for cells in outputs.get(call.module, ()) if max(cells.grid) > 1]
        if maps and maps[0].grid not in last and reaches_logits(model, call.module, maps[0]):
            last[maps[0].grid] = call.module
            end = max(end, call.end)
    if end < max(attention_ends, default=0):
        return []
    return [*reversed(last.values())]


def _embedding(
    model: Model, blocks: Sequence[str], read: Sequence[FeatureStage], two_images: Trace
) -> FeatureStage | None:
    """Return the first argument of the first block that holds all patches of each image."""
    if not blocks:
        return None
    layout = model.anatomy.layout
    tokens = None if layout is None else layout.tokens
    kind: StageKind = "embedding"
    if read[0].kind != _BLOCK:
        kind = "stem"
    first_call = two_images.by_module[blocks[0]][0]
    for argument, value in first_call.arguments.items():
        if _is_stream(value.shape, tokens):
            return _stage(model, None, kind, blocks[0], value.shape, argument)
    return None


def _stage(
    model: Model,
    index: int | None,
    kind: StageKind,
    name: str,
    shape: Shape,
    argument: Key | None = None,
) -> FeatureStage | None:
    """Return the layer that reads a module's output, or its argument.

    Returns None where the channel axis is unknown.
    """
    layout = model.anatomy.layout
    if len(shape) == 3 and layout is not None:
        return FeatureStage(index, kind, name, shape[2], layout.grid, layout.prefix, 2, argument)
    cells = _locate_cells(model, name, argument)
    if cells is not None:
        grid = None if cells.prefix else cells.grid  # all tokens are read
        return FeatureStage(
            index, kind, name, cells.width, grid, (), cells.channel_axis, argument, cells.part
        )
    axis = 2 if len(shape) == 3 else channel_axis_of(model.module.get_submodule(name), shape)
    if axis is None:
        return None
    return FeatureStage(index, kind, name, shape[axis], None, (), axis, argument)


def _locate_cells(model: Model, name: str, argument: Key | None) -> Cells | None:
    """Return the first cells of a module's output, or those of its argument."""
    located = located_cells(model)
    if argument is not None:
        return located.arguments.get((name, argument))
    outputs = located.outputs.get(name)
    return outputs[0] if outputs else None


def _is_stream(shape: Shape, tokens: int | None) -> bool:
    """Return True if an output has the patches of each of the two images."""
    if shape[0] != 2 or len(shape) not in (3, 4):
        return False
    if len(shape) == 4:
        return True
    if tokens is None:
        return shape[1] > 1
    return shape[1] == tokens


def holds_another(name: str, blocks: Sequence[str]) -> bool:
    """Return True if it contains other blocks (ConvNeXt's stages are repeated units too)."""
    return any(block.startswith(f"{name}.") for block in blocks)


def stream_width(block: nn.Module) -> int | None:
    """Return the width of the residual stream: the most frequent input width of the block's
    layers."""
    linear_widths = [
        module.in_features for module in block.modules() if isinstance(module, nn.Linear)
    ]
    convolution_widths = [
        module.in_channels for module in block.modules() if isinstance(module, nn.Conv2d)
    ]
    widths = linear_widths + convolution_widths
    return mode(widths) if widths else None


def _norm(
    model: Model, outputs: Sequence[tuple[str, Shape]], last: FeatureStage
) -> FinalNorm | None:
    """Return the first norm of the stream's width that runs after the last block, outside all
    blocks.
    """
    if last.kind == _STAGE:
        return None
    last_position = max(
        position for position, (name, _) in enumerate(outputs) if name == last.module
    )
    for name, shape in outputs[last_position + 1 :]:
        inside = any(
            name == block or name.startswith(f"{block}.") for block in model.anatomy.blocks
        )
        if inside or shape[-1] != last.width:
            continue
        kind = type(model.module.get_submodule(name)).__name__.lower()
        if "norm" in kind and not any(
            word in kind for word in ("batch", "group", "instance", "2d")
        ):
            return FinalNorm(name, last.width, on_tokens=len(shape) > 2)
    return None
