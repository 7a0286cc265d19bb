"""Whether a forward pass can start at a layer (replay) or at the first block: tested once on two images of noise."""

from contextlib import suppress
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.intervene import intervened
from vitlens.lens.interventions import HeadReplaced, PreparedIntervention
from vitlens.lens.layers import Layer, layers, probe_images
from vitlens.lens.replay_pass import PassKind, ReplayBatch, ReplayMethod, replay_pass, rows_read
from vitlens.lens.replay_plan import ReplayRecord, StopForward, make_plan, recording
from vitlens.models.hooks import Arguments, Key, once_per_model
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits, Tokens

TOLERANCE = 1e-4  # fp32, on logits


@once_per_model
def method_of(model: Model) -> ReplayMethod:
    """How a model is replayed: with the shortest last block that gives its logits, or by full forwards."""
    plan, why = make_plan(model), ""
    if any(layer.tokens_first for layer in layers(model)):
        note = f"{model.alias} is run by full forwards, not replayed: its blocks take (tokens, batch, width)"
        return ReplayMethod(plan, None, exact=False, note=note)
    for rows in dict.fromkeys((rows_read(model), None)):
        method = ReplayMethod(plan, rows)
        try:
            difference = _largest_difference(model, method)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AssertionError) as error:
            # a model of another structure may raise anything when its forward starts in the middle
            why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))  # a bare assert has no message
            continue
        if difference <= TOLERANCE:
            return method if not why else replace(method, note=f"{model.alias}'s last block is run whole: {why}")
        why = f"its logits would differ by {difference:.1e}"
    return ReplayMethod(plan, None, exact=False, note=f"{model.alias} is run by full forwards, not replayed: {why}")


def _largest_difference(model: Model, method: ReplayMethod) -> float:
    """From the model's own logits: started at every layer, and with a head set to zero in the first and the last."""
    images, known = probe_images(model, 2), layers(model)
    records: dict[int, ReplayRecord] = {}
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with recording(model, records, which=range(len(known))):
            plain: Tensor = model(images)
        scale = max(1.0, plain.abs().max().item())
        pairs = [(_from(model, method, records, layer), plain) for layer in known]
        for layer in (known[0], known[-1]):
            pairs.append((_from(model, method, records, layer, attention=True), plain))
            if layer.head_dim:
                zero = HeadReplaced(layer.index, layer.heads - 1)
                pairs.append((_from(model, method, records, layer, zero), _changed(model, images, zero)))
        return max((ours - full).abs().max().item() for ours, full in pairs) / scale


def _from(
    model: Model,
    method: ReplayMethod,
    records: dict[int, ReplayRecord],
    layer: Layer,
    *changes: HeadReplaced,
    attention: bool = False,
) -> Tensor:
    kind = PassKind(layer.index, attention or not method.plan.starts[layer.index].branch, whole=False)
    batch = ReplayBatch(kind, tuple(map(PreparedIntervention, changes)), 1, slice(0, 2), 2)
    return replay_pass(model, method, records[layer.index], batch)[0]


def _changed(model: Model, images: Images, change: HeadReplaced) -> Tensor:
    with intervened(model, change):
        logits: Tensor = model(images)
    return logits


@dataclass(frozen=True)
class Entry:
    """Runs a model from its first block on: tokens to logits, without the patch embedding.

    Variants of an image that differ only in some tokens are embedded once and combined before the first block.
    largest: bytes of the widest tensor of one image; only_tokens: whether the block takes tokens and nothing that
    depends on their number or positions (no rotary embedding), so that tokens can be left out.
    """

    _model: "ref[Model]"
    method: ReplayMethod
    stream: Key
    fixed: Arguments
    largest: int
    only_tokens: bool

    def tokens(self, images: Images) -> Tokens:
        """The residual stream before the first block, (batch, tokens, dim)."""
        stream: Tensor = _arguments(self._owner(), images)[self.stream]
        return stream

    def logits(self, tokens: Tokens) -> Logits:
        """The logits (batch, classes) for the stream before the first block."""
        record = ReplayRecord({**self.fixed, self.stream: tokens})
        batch = ReplayBatch(PassKind(0, True, whole=False), (), 1, slice(0, len(tokens)), len(tokens))
        with evaluating(self._owner()):
            return replay_pass(self._owner(), self.method, record, batch)[0].float()

    def _owner(self) -> Model:
        model = self._model()
        if model is None:
            raise LensError("expected the model of this entry, found it deleted; keep a reference to the model")
        return model


@once_per_model
@torch.no_grad()
def entry_of(model: Model) -> Entry | None:
    """The entry of a model in which every patch is one token; None for a CNN, windows, or a stem that mixes patches."""
    if model.anatomy.layout is None:
        return None
    try:
        first, method = layers(model)[0], method_of(model)
    except UnsupportedError:  # a token layout, but no attention
        return None
    if not method.exact or first.stream is None or first.tokens != model.layout.tokens:
        return None
    start = method.plan.starts[0]
    if start.batched != {first.stream} or start.carried:
        return None
    with evaluating(model), torch.autocast(model.device.type, enabled=False):
        block_arguments = _arguments(model, probe_images(model, 2))
        fixed = {key: value for key, value in block_arguments.items() if key != first.stream}
        only = not any(isinstance(value, Tensor) for value in fixed.values())
        entry = Entry(ref(model), method, first.stream, fixed, method.plan.largest, only)
        return entry if _is_exact(model, entry) else None


def _is_exact(model: Model, entry: Entry) -> bool:
    """Whether mixing the tokens of two images gives the logits of the images mixed patch by patch."""
    first, second = probe_images(model, 2).split(1)
    rows, columns = model.layout.grid
    taken = torch.rand(rows * columns, generator=torch.Generator().manual_seed(1)).to(first.device) < 0.5
    large = taken.view(1, 1, rows, columns).float()
    pixels = torch.nn.functional.interpolate(large, size=model.input_size, mode="nearest-exact") > 0.5
    mixed = torch.where(pixels, first, second)
    prefix = taken.new_zeros(len(model.layout.prefix))
    tokens = torch.where(torch.cat([prefix, taken])[:, None], entry.tokens(first), entry.tokens(second))
    plain: Tensor = model(mixed)
    scale = max(1.0, plain.abs().max().item())
    return (entry.logits(tokens) - plain).abs().max().item() <= TOLERANCE * scale


def _arguments(model: Model, images: Images) -> Arguments:
    """The arguments of the first block for these images."""
    records: dict[int, ReplayRecord] = {}
    with suppress(StopForward), recording(model, records, which=(0,), keep="inputs", stop=True):
        model(images)
    return records[0].arguments
