"""The layers at which a model's features are read: blocks of a transformer, stages of a CNN.

There are also the layer that enters the first of them (the embedding, or a CNN's stem) and the
final norm. All are determined from the shapes in one forward pass of two images, for any number of
registers and any grid.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from statistics import mode
from typing import Any, Final, Literal, NamedTuple

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
# words in the class names of norms that a CNN has
_NORMS_OF_MAPS: Final = ("batch", "group", "instance", "2d")


@dataclass(frozen=True)
class FeatureStage:
    """One layer at which features are read.

    index: the number of the block or stage, from 0; None for what enters the first block.
    kind: "block" of a transformer, or "stage" of a CNN (the last map of one resolution or group of
        blocks). What enters the first block is "embedding" of a transformer, or "stem" of a CNN.
    module: the name of the module with this output or argument.
    width: the width of the tokens, or the number of channels.
    grid: the (rows, columns) of patches or cells, or None if their order is unknown.
    prefix: the kinds of the tokens before the patches.
    channel_axis: the axis of the tensor that holds the channels.
    argument: the argument of the module that is read, or None for its output.
    part: the index of the tensor if the module returns several.
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

    module: the name of the norm.
    width: the width of its input.
    on_tokens: whether its input is all tokens, rather than the pooled vector (timm's fc_norm).
    """

    module: str
    width: int
    on_tokens: bool


@requirement("features")
def require_features(model: Model) -> None:
    """Raise UnsupportedError for a model without a layer at which features can be read."""
    stages(model)


def stages(model: Model) -> tuple[FeatureStage, ...]:
    """Return every layer at which features can be read, in forward order.

    They are determined once per model. Blocks with a different number of tokens (CaiT's class
    attention) are skipped. Raises UnsupportedError if no layer is left.
    """
    return _feature_layers(model).stages


def embedding_stage(model: Model) -> FeatureStage | None:
    """Return the tokens (a CNN's map) that enter the first block, before any attention.

    They are patches with positions, and prefix tokens. The stage has no number, so that block 0
    stays layer 0. Returns None for a model without blocks, and if the input of the first block is
    no sequence of all patches.
    """
    return _feature_layers(model).embedding


def final_norm(model: Model) -> FinalNorm | None:
    """Return the model's final norm; None for CNNs and post-norm transformers, which have none."""
    return _feature_layers(model).norm


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
    """Call `reducer(number, stream)` with the residual stream after each block.

    The stream is (batch, tokens, dim). Maps, (batch, rows, columns, dim) or (batch, dim, rows,
    columns), are flattened row by row; the axis of the channels is the one of the block's width.
    Blocks that return neither tokens nor such a map are skipped.
    """

    def take(number: int, output: Tensor) -> None:
        width = stream_width(model.module.get_submodule(model.anatomy.blocks[number]))
        if output.dim() == 3:
            reducer(number, output)
        elif output.dim() == 4 and output.shape[3] == width:  # channels last
            reducer(number, output.flatten(1, 2))
        elif output.dim() == 4 and output.shape[1] == width:  # channels first
            reducer(number, output.flatten(2).transpose(1, 2))

    with watching_blocks(model, take):
        yield


class _FeatureLayers(NamedTuple):
    """What `stages`, `embedding_stage` and `final_norm` return for one model."""

    stages: tuple[FeatureStage, ...]
    embedding: FeatureStage | None
    norm: FinalNorm | None


@once_per_model
def _feature_layers(model: Model) -> _FeatureLayers:
    two_images = trace(model, 2)
    outputs = []  # modules and the shapes of their outputs, in forward order
    for call in two_images.calls:
        if call.module and call.output is not None:
            outputs.append((call.module, call.output))
    blocks = _stream_blocks(model, outputs)
    stages_read = _stages(model, blocks, dict(outputs))
    if not stages_read:
        raise UnsupportedError(_no_stages_message(model))
    return _FeatureLayers(
        stages=stages_read,
        embedding=_embedding(model, blocks, stages_read, two_images),
        norm=_norm(model, outputs, stages_read[-1]),
    )


def _no_stages_message(model: Model) -> str:
    """Return the message for a model without a layer at which features can be read."""
    anatomy = model.anatomy
    message = (
        f"expected blocks or maps to read features from, found none in {model.alias} "
        f"({anatomy.family})"
    )
    if anatomy.unread:
        message += f": {anatomy.unread}"
    if anatomy.layout is not None or anatomy.unread:  # a transformer
        message += "; put each block, batch first, in a separate module, or name them with blocks="
    return message


def _stream_blocks(model: Model, outputs: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return the innermost blocks that return the patches of each image, in forward order.

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
    kind, names = _modules_to_read(model, blocks, shapes)
    numbered = names  # the modules that are counted
    if kind == _BLOCK:  # blocks that are not read have a number, too
        numbered = []
        for name in dict.fromkeys(model.anatomy.blocks):
            if not holds_another(name, model.anatomy.blocks):
                numbered.append(name)
    numbers = {name: number for number, name in enumerate(numbered)}
    stages_read = list[FeatureStage]()
    for name in names:
        stage = _stage(model, numbers[name], kind, name, shapes[name])
        if stage is not None:
            stages_read.append(stage)
    return tuple(stages_read)


def _modules_to_read(
    model: Model, blocks: list[str], shapes: dict[str, Shape]
) -> tuple[StageKind, list[str]]:
    """Return the kind of the layers at which features are read, and the names of their modules."""
    if not blocks and model.anatomy.layout is None:
        return _STAGE, _last_maps(model)
    if model.anatomy.family == "cnn" and all(len(shapes[name]) == 4 for name in blocks):
        # the last block of each group: blocks of one group are children of one module
        groups = groupby(blocks, key=lambda name: name.rpartition(".")[0])
        return _STAGE, [list(group)[-1] for _, group in groups]
    return _BLOCK, blocks


def _last_maps(model: Model) -> list[str]:
    """Return the modules that return the last map of each resolution, in forward order.

    It is for a model without blocks. The list is empty if attention follows the last map, which is
    then the map of the stem.
    """
    attention_ends = [
        call.end for call in trace(model, 1).calls if call.module in model.anatomy.parts
    ]
    outputs = located_cells(model).outputs
    last_by_grid = dict[tuple[int, int], str]()  # the module with the last map of each grid
    last_end = 0  # when the last of these maps was computed
    # from the end: the first map that is met of each grid is its last one
    for call in reversed(calls_outside_attention(model)):
        maps = [cells for cells in outputs.get(call.module, ()) if max(cells.grid) > 1]
        if not maps or maps[0].grid in last_by_grid:
            continue
        if reaches_logits(model, call.module, maps[0]):
            last_by_grid[maps[0].grid] = call.module
            last_end = max(last_end, call.end)
    if last_end < max(attention_ends, default=0):
        return []
    return [*reversed(last_by_grid.values())]


def _embedding(
    model: Model, blocks: Sequence[str], stages_read: Sequence[FeatureStage], two_images: Trace
) -> FeatureStage | None:
    """Return the first argument of the first block that holds all patches of each image."""
    if not blocks:
        return None
    layout = model.anatomy.layout
    tokens = None if layout is None else layout.tokens
    kind: StageKind = "embedding"
    if stages_read[0].kind != _BLOCK:
        kind = "stem"
    first_call = two_images.by_module[blocks[0]][0]
    for argument, value in first_call.arguments.items():
        if _is_stream(value.shape, tokens):
            return _stage(
                model,
                index=None,
                kind=kind,
                name=blocks[0],
                shape=value.shape,
                argument=argument,
            )
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

    Returns None if the axis of the channels is unknown.

    shape: the shape of the output or the argument.
    """
    layout = model.anatomy.layout
    if len(shape) == 3 and layout is not None:
        return FeatureStage(
            index=index,
            kind=kind,
            module=name,
            width=shape[2],
            grid=layout.grid,
            prefix=layout.prefix,
            channel_axis=2,
            argument=argument,
        )
    cells = _locate_cells(model, name, argument)
    if cells is not None:
        # all tokens are read as features, so that cells after a prefix have no grid
        grid = None if cells.prefix else cells.grid
        return FeatureStage(
            index=index,
            kind=kind,
            module=name,
            width=cells.width,
            grid=grid,
            prefix=(),
            channel_axis=cells.channel_axis,
            argument=argument,
            part=cells.part,
        )
    axis = 2 if len(shape) == 3 else channel_axis_of(model.module.get_submodule(name), shape)
    if axis is None:
        return None
    return FeatureStage(
        index=index,
        kind=kind,
        module=name,
        width=shape[axis],
        grid=None,
        prefix=(),
        channel_axis=axis,
        argument=argument,
    )


def _locate_cells(model: Model, name: str, argument: Key | None) -> Cells | None:
    """Return the first cells of a module's output, or those of its argument."""
    located = located_cells(model)
    if argument is not None:
        return located.arguments.get((name, argument))
    outputs = located.outputs.get(name)
    return outputs[0] if outputs else None


def _is_stream(shape: Shape, tokens: int | None) -> bool:
    """Return True if an output has the patches of each of the two images.

    shape: the shape of the output.
    tokens: the number of tokens of an image, or None if the layout is unknown.
    """
    if shape[0] != 2 or len(shape) not in (3, 4):
        return False
    if len(shape) == 4:  # a map
        return True
    if tokens is None:
        return shape[1] > 1
    return shape[1] == tokens


def holds_another(name: str, blocks: Sequence[str]) -> bool:
    """Return True if a block contains other blocks; ConvNeXt's stages do, for example."""
    return any(block.startswith(f"{name}.") for block in blocks)


def stream_width(block: nn.Module) -> int | None:
    """Return the width of the residual stream: the most frequent input width of a block's layers.

    Returns None for a block without linear layers and convolutions.
    """
    linear_widths = [
        module.in_features for module in block.modules() if isinstance(module, nn.Linear)
    ]
    convolution_widths = [
        module.in_channels for module in block.modules() if isinstance(module, nn.Conv2d)
    ]
    widths = linear_widths + convolution_widths
    return mode(widths) if widths else None  # of equally frequent ones, the first


def _norm(
    model: Model, outputs: Sequence[tuple[str, Shape]], last: FeatureStage
) -> FinalNorm | None:
    """Return the first norm of the stream's width after the last block and outside all blocks.

    outputs: modules and the shapes of their outputs, in forward order.
    last: the last layer at which features are read.
    """
    if last.kind == _STAGE:
        return None
    last_position = max(
        position for position, (name, _) in enumerate(outputs) if name == last.module
    )
    for name, shape in outputs[last_position + 1 :]:
        is_inside_block = any(
            name == block or name.startswith(f"{block}.") for block in model.anatomy.blocks
        )
        if is_inside_block or shape[-1] != last.width:
            continue
        class_name = type(model.module.get_submodule(name)).__name__.lower()
        is_of_maps = any(word in class_name for word in _NORMS_OF_MAPS)
        if "norm" in class_name and not is_of_maps:
            return FinalNorm(name, last.width, on_tokens=len(shape) > 2)
    return None
