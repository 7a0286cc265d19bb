"""A model entered at its first block: tokens in, logits out, what comes before skipped.

Many variants of an image differ in some tokens alone; they are embedded once and put together before the first block.
Whether that is the model itself is tried on two images of noise, once for each model.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.layers import Key, layers, probe_images
from vitlens.lens.recording import Reached, Record, recording
from vitlens.lens.replay_check import TOLERANCE, method_of
from vitlens.lens.replay_pass import Kind, Method, Pass, replay_pass
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits, Tokens


@dataclass(frozen=True)
class Entry:
    """The way into a model's first block.

    largest: bytes of the widest tensor of one image; only_tokens: whether the block is given tokens and nothing that
    knows how many they are or where they stand (no rotary positions), so that some can be left out.
    """

    _model: "ref[Model]"
    method: Method
    stream: Key
    fixed: dict[Key, Any]
    largest: int
    only_tokens: bool

    def tokens(self, images: Images) -> Tokens:
        """The residual stream before the first block, (batch, tokens, dim)."""
        found: Tensor = _arguments(self._owner(), images)[self.stream]
        return found

    def logits(self, tokens: Tokens) -> Logits:
        """The logits (batch, classes) for the stream before the first block."""
        record = Record({**self.fixed, self.stream: tokens})
        what = Pass(Kind(0, True, whole=False), (), 1, slice(0, len(tokens)), len(tokens))
        with evaluating(self._owner()):
            return replay_pass(self._owner(), self.method, record, what)[0].float()

    def _owner(self) -> Model:
        found = self._model()
        if found is None:
            raise LensError("expected the model of this entry, found it gone; keep it as long as its entry")
        return found


_known: WeakKeyDictionary[Model, Entry | None] = WeakKeyDictionary()


@torch.no_grad()
def entry_of(model: Model) -> Entry | None:
    """The way into the first block where every patch is a token of its own; None for a CNN, windows, or a stem that
    lets patches see each other."""
    if model not in _known:
        _known[model] = _find(model)
    return _known[model]


def _find(model: Model) -> Entry | None:
    if model.anatomy.layout is None:
        return None
    try:
        first, method = layers(model)[0], method_of(model)
    except UnsupportedError:  # patches, and no attention between them
        return None
    if not method.exact or first.stream is None or first.tokens != model.layout.tokens:
        return None
    start = method.plan.starts[0]
    if start.batched != {first.stream} or start.carried:
        return None
    with evaluating(model), torch.autocast(model.device.type, enabled=False):
        given = _arguments(model, probe_images(model, 2))
        fixed = {key: value for key, value in given.items() if key != first.stream}
        only = not any(isinstance(value, Tensor) for value in fixed.values())
        entry = Entry(ref(model), method, first.stream, fixed, method.plan.largest, only)
        return entry if _is_the_model(model, entry) else None


def _is_the_model(model: Model, entry: Entry) -> bool:
    """Whether tokens of two images, mixed, are those of the images mixed, and their logits the model's."""
    one, other = probe_images(model, 2).split(1)
    rows, columns = model.layout.grid
    taken = torch.rand(rows * columns, generator=torch.Generator().manual_seed(1)).to(one.device) < 0.5
    large = taken.view(1, 1, rows, columns).float()
    pixels = torch.nn.functional.interpolate(large, size=model.input_size, mode="nearest-exact") > 0.5
    mixed = torch.where(pixels, one, other)
    prefix = taken.new_zeros(len(model.layout.prefix))
    tokens = torch.where(torch.cat([prefix, taken])[:, None], entry.tokens(one), entry.tokens(other))
    plain: Tensor = model(mixed)
    scale = max(1.0, plain.abs().max().item())
    return (entry.logits(tokens) - plain).abs().max().item() <= TOLERANCE * scale


def _arguments(model: Model, images: Images) -> dict[Key, Any]:
    """What the first block is given for these images."""
    records: dict[int, Record] = {}
    with suppress(Reached), recording(model, records, which=(0,), keep="inputs", stop=True):
        model(images)
    return records[0].arguments
