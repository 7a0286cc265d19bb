"""Find how a model is replayed, and test that replaying gives its logits.

A forward pass may start at any layer (`method_of`), or with tokens at the first block (`entry_of`).
Whether it can is tested on two images of noise, and again if the model's weights have changed.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.change import Set
from vitlens.lens.intervene import Changes, intervene, prepare_changes
from vitlens.lens.places import accesses
from vitlens.lens.replay_pass import (
    CarriedArgument,
    PassKind,
    ReplayMethod,
    ReplayRecord,
    ReplayStart,
    StopForward,
    recording,
    replay_pass,
)
from vitlens.lens.trace import (
    Layer,
    TracedHeads,
    blocks,
    layers,
    probe_images,
    trace,
    traced_heads,
)
from vitlens.models.hooks import Arguments, Key, foreign_forward, other_hooks
from vitlens.models.known_modules import is_known_block
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model
from vitlens.models.recording import Shape, Trace
from vitlens.models.trials import largest_allowed
from vitlens.shapes import Images, Logits, Tokens

_FP32_BYTES: Final = 4  # of one number
_MASK_SEED: Final = 1
_CONSTANT_LOGITS: Final = (
    "its logits do not depend on the image, so they cannot show whether a replay is exact"
)
# what a model of another structure may raise when its forward pass starts in the middle
_STRUCTURE_ERRORS: Final = (
    RuntimeError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AssertionError,
)


def _start(model: Model, layer: Layer, single: Trace, double: Trace) -> ReplayStart:
    """Return how to start at a layer.

    single, double: traces of one image and of two; the axis that doubles is the batch.
    """
    # a block without attention has no heads
    heads_single = TracedHeads()
    heads_double = TracedHeads()
    if layer.attention:
        heads_single = traced_heads(model, 1)[layer.attention]
        heads_double = traced_heads(model, 2)[layer.attention]
    begin = double.by_module[layer.unit][0].begin  # place in the order of all calls of the pass
    arguments_single = single.by_module[layer.unit][-1].arguments
    arguments_double = double.by_module[layer.unit][-1].arguments
    batched_keys = []  # the arguments that are twice as long for two images
    for key, value in arguments_double.items():
        if value.shape and value.shape[0] == 2 * arguments_single[key].shape[0]:
            batched_keys.append(key)
    batched = frozenset(batched_keys)
    # Later units may take the same tensor again (`number` identifies a tensor). In a replay, they
    # must then take the recorded one, too.
    carried = []
    for later in blocks(model):
        if later.index <= layer.index:
            continue
        for later_key, value in double.by_module[later.unit][-1].arguments.items():
            for key in batched:
                if arguments_double[key].number == value.number:
                    carried.append(CarriedArgument(key, later.index, later_key))
    skipped = tuple(_skippable(model.module, name="", begin=begin, single=single, double=double))
    # True if the output of the attention is recorded, and changes of heads are added to it, so that
    # the pass need not run the attention of this layer again
    branch = layer.attention != layer.unit and heads_single.branch and heads_double.branch
    size = sum(arguments_single[key].bytes for key in batched) + heads_single.bytes
    return ReplayStart(
        skipped=skipped, batched=batched, carried=tuple(carried), branch=branch, bytes=size
    )


def _skippable(
    module: nn.Module, name: str, begin: int, single: Trace, double: Trace
) -> Iterator[tuple[str, Shape]]:
    """Yield the modules that need not run because their calls end before `begin`.

    Each comes with the shape of its output for one image, in which the batch is the first axis.
    Parts of such a module are not listed.
    """
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        shape = _batched_shape(full, single, double)
        calls = double.by_module.get(full, ())
        if shape is not None and all(call.end < begin for call in calls):
            yield full, shape
        else:
            yield from _skippable(child, full, begin, single, double)


def _batched_shape(name: str, single: Trace, double: Trace) -> Shape | None:
    """Return the shape of a module's output for one image.

    Returns None if the output is not one tensor with the batch as its first axis.
    """
    if name not in single.by_module or name not in double.by_module:
        return None
    single_call = single.by_module[name][-1]
    double_call = double.by_module[name][-1]
    # `bytes` is 0 unless the output is one tensor
    is_tensor = single_call.bytes and double_call.bytes
    if not (is_tensor and single_call.output and double_call.output):
        return None
    batch, *other_sizes = single_call.output
    if double_call.output != (2 * batch, *other_sizes):
        return None
    return single_call.output


def rows_read(model: Model) -> int | None:
    """Return how many of the first tokens the classifier reads from the last block.

    Returns None if it reads all of them, or if the form of the block is unknown.
    """
    layout = model.anatomy.layout
    last = blocks(model)[-1]
    if layout is None or not is_known_block(model.module.get_submodule(last.unit)):
        return None
    if model.anatomy.readout == "cls" and layout.positions("cls") == (0,):
        return 1
    read_positions = layout.positions("cls") + layout.positions("distillation")
    if model.anatomy.readout == "cls+distillation" and read_positions == (0, 1):
        return 2
    return None


@once_per_model
def method_of(model: Model) -> ReplayMethod:
    """Return how a model is replayed.

    Three ways are tried in this order, and the first exact one is taken: with a last block of only
    the tokens that the classifier reads, with a whole last block, and by full forward passes.
    """
    single = trace(model, 1)
    double = trace(model, 2)
    starts = {block.index: _start(model, block, single, double) for block in blocks(model)}
    shapes = [_batched_shape(name, single, double) for name in single.by_module]
    elements = max(math.prod(shape) for shape in shapes if shape is not None)
    largest = _FP32_BYTES * elements
    reason = _reason_not_to_try(model)
    note_on_last_block = ""
    rows = rows_read(model)
    if rows is not None and not reason:
        # the last block computes only the tokens that the classifier reads
        method = ReplayMethod(starts, largest, rows)
        reason_against_rows = _reason_not_exact(model, method)
        if not reason_against_rows:
            return method
        note_on_last_block = f"{model.alias}'s last block is run whole: {reason_against_rows}"
        if reason_against_rows == _CONSTANT_LOGITS:
            reason = _CONSTANT_LOGITS  # computing all tokens does not change that
    if not reason:
        method = ReplayMethod(starts, largest, note=note_on_last_block)
        reason = _reason_not_exact(model, method)
        if not reason:
            return method
    note = f"{model.alias} is run by full forwards, not replayed: {reason}"
    return ReplayMethod(starts, largest, exact=False, note=note)


def _reason_not_to_try(model: Model) -> str:
    """Return why a model can certainly not be replayed, or ""."""
    if any(block.tokens_first for block in blocks(model)):
        return "its blocks take (tokens, batch, width)"
    if other_hooks(model) or foreign_forward(model) is not None:
        return "something changes what the whole model returns"
    return ""


def _reason_not_exact(model: Model, method: ReplayMethod) -> str:
    """Return why a method does not give the logits of the model, or "" if it does."""
    try:
        difference, allowed = _largest_difference(model, method)
    except _STRUCTURE_ERRORS as error:
        message = str(error).splitlines()
        if not message:  # a bare assert has no message
            return type(error).__name__
        return f"{type(error).__name__}: {message[0]}"
    if not allowed:
        return _CONSTANT_LOGITS
    if difference <= allowed:
        return ""
    return f"its logits would differ by {difference:.1e}"


def _largest_difference(model: Model, method: ReplayMethod) -> tuple[float, float]:
    """Return the largest difference from the logits of the model, and the largest allowed one.

    The second is the largest difference that rounding explains. The model is started at every
    layer, and at the first and the last one also with a head set to zero.
    """
    images = probe_images(model, 2)
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with recording(model, [*method.starts]) as records:
            plain: Tensor = model(images)

        def compute_difference(kind: PassKind, changes: Changes) -> float:
            with intervene(model, changes):
                expected = model(images) if changes else plain
            sets = [prepare_changes(model, changes)]
            record = records[kind.start]
            by_set = replay_pass(
                model,
                method,
                record,
                kind=kind,
                sets=sets,
                part=slice(0, len(images)),
                images=len(images),
            )
            return float((by_set[0] - expected).abs().max())

        # a pass that changes no head runs the attention again only if it cannot add to its output
        kinds = {}
        for number, start in method.starts.items():
            kinds[number] = PassKind(number, attention=not start.branch, rows=method.rows)
        differences = [compute_difference(kind, {}) for kind in kinds.values()]
        model_layers = layers(model)
        for layer in (model_layers[0], model_layers[-1]):
            kind = kinds[layer.index]
            with_attention = replace(kind, attention=True)
            differences.append(compute_difference(with_attention, {}))
            head = f"blocks.{layer.index}.head.{layer.heads - 1}"
            if head in accesses(model):
                differences.append(compute_difference(kind, {head: "zero"}))
    return max(differences), largest_allowed(plain)


@dataclass(frozen=True)
class Entry:
    """A way to run a model from its first block on: tokens to logits, without the patch embedding.

    Variants of an image that differ only in some tokens are embedded once and combined before the
    first block.

    method: how the model is replayed.
    stream: the argument of the first block that is the residual stream.
    fixed: the other arguments of the first block.
    only_tokens: whether the block takes tokens and nothing that depends on their number or
        positions, such as rotary embeddings. Then, tokens can be left out.
    block: the number of the first block.
    """

    method: ReplayMethod
    stream: Key
    fixed: Arguments
    only_tokens: bool
    block: int = 0

    def tokens(self, model: Model, images: Images) -> Tokens:
        """Return the residual stream before the first block, (batch, tokens, dim)."""
        stream: Tensor = _arguments(model, images)[self.stream]
        return stream

    def logits(self, model: Model, tokens: Tokens) -> Logits:
        """Return the logits (batch, classes) for the stream before the first block."""
        record = ReplayRecord({**self.fixed, self.stream: tokens})
        count = len(tokens)
        kind = PassKind(self.block, attention=True, rows=self.method.rows)
        no_changes: list[Set] = [()]
        with evaluating(model):
            by_set = replay_pass(
                model,
                self.method,
                record,
                kind=kind,
                sets=no_changes,
                part=slice(0, count),
                images=count,
            )
            return by_set[0].float()


@once_per_model
@torch.no_grad()
def entry_of(model: Model) -> Entry | None:
    """Return the entry of a model in which every patch is one token.

    Returns None for a CNN, for windows, and for a stem that mixes patches.
    """
    if model.anatomy.layout is None:
        return None
    try:
        first = blocks(model)[0]
        method = method_of(model)
    except UnsupportedError:  # a token layout, but no attention
        return None
    start = method.starts[first.index]
    stream = first.stream
    holds_all_tokens = first.tokens == model.layout.tokens
    if stream is None or not method.exact or not holds_all_tokens:
        return None
    if start.batched != {stream} or start.carried:  # other arguments depend on the image
        return None
    with evaluating(model), torch.autocast(model.device.type, enabled=False):
        first_arguments = _arguments(model, probe_images(model, 2))
        fixed = {key: value for key, value in first_arguments.items() if key != stream}
        only_tokens = not any(isinstance(value, Tensor) for value in fixed.values())
        entry = Entry(
            method=method,
            stream=stream,
            fixed=fixed,
            only_tokens=only_tokens,
            block=first.index,
        )
        return entry if _is_exact(model, entry) else None


def _is_exact(model: Model, entry: Entry) -> bool:
    """Return True if mixing the tokens of two images is the same as mixing the images by patch.

    Both must give the same logits.
    """
    first, second = probe_images(model, 2).split(1)
    rows, columns = model.layout.grid
    noise = torch.rand(rows * columns, generator=torch.Generator().manual_seed(_MASK_SEED))
    patch_mask = noise.to(first.device) < 0.5  # about half of the patches are of the first image
    mask_map = patch_mask.view(1, 1, rows, columns).float()
    pixel_mask = F.interpolate(mask_map, size=model.input_size, mode="nearest-exact") > 0.5
    mixed = torch.where(pixel_mask, first, second)
    token_mask = torch.cat([patch_mask.new_zeros(len(model.layout.prefix)), patch_mask])
    tokens = torch.where(
        token_mask[:, None], entry.tokens(model, first), entry.tokens(model, second)
    )
    # the logits of both images scale the allowed difference
    plain: Tensor = model(torch.cat([mixed, first, second]))
    allowed = largest_allowed(plain)
    difference = (entry.logits(model, tokens) - plain[:1]).abs().max().item()
    return allowed > 0 and difference <= allowed


def _arguments(model: Model, images: Images) -> Arguments:
    """Return the arguments of the first block for these images."""
    first = blocks(model)[0].index
    with suppress(StopForward), recording(model, [first], stop=True) as records:
        model(images)
    return records[first].arguments
