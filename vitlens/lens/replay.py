"""Replay: a clean pass is kept, and interventions run the model again only from the first layer they change.

Blocks l.. run again, many interventions in one batch. The attention of block l is not run again where only heads are
replaced, as the output projection is linear: branch + (replacement - output) W, with the head's columns W. The last
block is computed for the tokens that the classifier reads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError
from vitlens.lens.attention import tapped_in_part
from vitlens.lens.intervene import in_force
from vitlens.lens.interventions import Intervention, PreparedIntervention, Replacements, as_set, resolve
from vitlens.lens.layers import layer_of, layers
from vitlens.lens.places.changes import Changes, PreparedChange, Reference, prepared
from vitlens.lens.places.runs import as_interventions, run_sets
from vitlens.lens.replay_check import method_of
from vitlens.lens.replay_pass import PassKind, ReplayBatch, ReplayMethod, kind_of, replay_pass
from vitlens.lens.replay_plan import Cache, LayerMeans, ReplayRecord, StopForward, recording
from vitlens.models.hooks import as_call
from vitlens.models.model import Model
from vitlens.shapes import Heads, Images, Logits, Tokens

DEFAULT_BUDGET = 2 << 30  # bytes: ViT-B/16 and 64 images need 1.4e9
# bytes of the widest tensor in one forward: larger is slower on a CPU (most of all in bf16), smaller is slower on a GPU
_WORKING_SET = {"cpu": 24 << 20}
_LARGE_WORKING_SET = 512 << 20


class Replay:
    """A clean pass of some images, from which interventions are run; made by `replaying`.

    logits: of the clean pass (batch, classes); exact: whether it replays, or falls back to full forwards; cache: what
    is kept of the clean pass (the rest is computed again, which costs time and changes no number); note: both in words,
    empty for a replay that keeps everything; forward_cost: multiply-adds of linear layers in one forward of these
    images.
    """

    def __init__(self, model: Model, images: Images, method: ReplayMethod, *, budget: int, chunk: int | None) -> None:
        self.model = model
        self.images = images
        self._method = method
        inputs, outputs = (sum(start.bytes[part] for start in method.plan.starts) * len(images) for part in (0, 1))
        self.cache: Cache = "everything" if inputs + outputs <= budget else "inputs" if inputs <= budget else "nothing"
        short = f"kept of the clean pass: {self.cache}, as all would take {(inputs + outputs) / 1e9:.2f} GB of "
        short += f"{budget / 1e9:.2f}; the rest is computed again"
        self.note = "; ".join(filter(None, (method.note, "" if self.cache == "everything" else short)))
        working_set = _WORKING_SET.get(images.device.type, _LARGE_WORKING_SET)
        self._chunk = chunk or max(1, working_set // method.plan.largest)
        self._records: dict[int, ReplayRecord] = {}
        self._spent = LinearCount()
        self.logits, self._means = self._clean()
        self.forward_cost = self._spent.total

    def _clean(self) -> tuple[Logits, LayerMeans]:
        every = range(len(layers(self.model)))
        with (
            _without_gradients(self.model),
            self._spent,
            recording(self.model, self._records, which=every, keep=self.cache) as means,
        ):
            logits: Tensor = self.model(self.images)
        return logits, means

    @property
    def exact(self) -> bool:
        """Whether interventions are replayed; otherwise each is a full forward."""
        return self._method.exact

    @property
    def cost(self) -> int:
        """Multiply-adds of linear layers spent so far, the clean pass included."""
        return self._spent.total

    @property
    def forward_equivalents(self) -> float:
        """Full forwards of these images spent so far, the clean pass included, counted by linear layers' FLOPs."""
        return self.cost / self.forward_cost

    def run(
        self,
        interventions: Sequence["Changes | Intervention | Iterable[Intervention]"],
        *,
        replacements: Replacements | None = None,
        reference: Reference | None = None,
        seed: int = 0,
    ) -> Float[Tensor, "interventions batch classes"]:
        """The logits under each element of `interventions`: one intervention, or several applied together.

        Changes by place, {"blocks.3.head.7": "zero"}, are those of `vitlens.intervene`, with its reference and seed.
        replacements: the tensors that other interventions need; those with a batch axis, for all images of this replay.
        Raises what `intervene` and `intervened` raise.
        """
        tensors: dict[Intervention, Tensor] = dict(replacements or {})
        own: list[Intervention | Iterable[Intervention]] = []
        others: dict[int, tuple[PreparedChange, ...]] = {}  # sets that are no interventions of this replay
        for number, each in enumerate(interventions):
            if not isinstance(each, Mapping):
                own.append(each)
                continue
            changes = prepared(self.model, each, reference=reference, seed=seed)
            as_own = as_interventions(changes, f"run {number}")
            tensors.update(as_own or {})
            own.append(tuple(as_own or ()))
            if as_own is None:
                others[number] = changes
        logits = self._run(own, tensors)
        if others:
            logits[list(others)] = run_sets(self, list(others.values()))
        return logits

    def _run(
        self, interventions: Sequence[Intervention | Iterable[Intervention]], replacements: Replacements
    ) -> Float[Tensor, "interventions batch classes"]:
        sets = [resolve(self.model, as_set(each), replacements) for each in interventions]
        logits = self.logits.unsqueeze(0).repeat(len(sets), 1, 1)
        kinds = [kind_of(self._method, changes) if changes else None for changes in sets]
        for kind in sorted(set(filter(None, kinds))):
            members = [number for number, other in enumerate(kinds) if other == kind]
            record = self._record(kind.start) if self.exact else ReplayRecord()
            for numbers, part in self._chunks(members, kind.whole):
                logits[numbers, part] = self._pass(kind, [sets[number] for number in numbers], part, record)
        return logits

    @property
    def copies(self) -> int:
        """How many copies of the images one forward holds."""
        return max(1, self._chunk // len(self.images)) if self.exact else 1

    def again(self, layer: int, *, copies: int = 1) -> Float[Tensor, "copies batch classes"]:
        """The logits of a forward of copies of the images from a layer on, under whatever is applied to the model."""
        if not self.exact:
            with _without_gradients(self.model), self._spent:
                full: Tensor = self.model(self.images)
            return full.unsqueeze(0)
        record = self._record(layer)
        count = len(self.images)
        batch = ReplayBatch(PassKind(layer, True, whole=True), (), copies, slice(0, count), count)
        with _without_gradients(self.model), self._spent:
            return replay_pass(self.model, replace(self._method, rows=None), record, batch)

    def block_input(self, layer: int) -> Tokens:
        """The residual stream of the clean pass before a block, (batch, tokens, dim); a map row by row."""
        place = layer_of(self.model, layer)
        if place.stream is None:
            raise InputError(f"expected a block that takes tokens, found another at layer {layer} ({place.unit})")
        stream: Tensor = self._record(layer, outputs=False).arguments[place.stream]
        return stream.flatten(1, 2) if stream.dim() == 4 else stream

    def head_output(self, layer: int) -> Heads:
        """Each head's output before the output projection, (batch, heads, tokens, head_dim)."""
        place, joined = layer_of(self.model, layer), self._record(layer).heads
        if joined is None:
            raise InputError(f"expected an output projection that reads the heads at layer {layer}, found none")
        per_image = joined.unflatten(0, (-1, place.windows)).flatten(1, 2)
        heads: Tensor = per_image.unflatten(-1, (place.heads, place.head_dim)).transpose(1, 2)
        return heads

    def head_mean(self, layer: int) -> Float[Tensor, "heads tokens head_dim"]:
        """The mean of each head's output over these images."""
        place = layer_of(self.model, layer)
        if layer not in self._means.heads:
            raise InputError(f"expected an output projection that reads the heads at layer {layer}, found none")
        mean: Tensor = self._means.heads[layer].unflatten(-1, (place.heads, place.head_dim)).transpose(0, 1)
        return mean

    def mlp_mean(self, layer: int) -> Float[Tensor, "tokens dim"]:
        """The mean of a block's MLP output over these images."""
        if layer_of(self.model, layer).mlp is None:
            raise InputError(f"expected an MLP at layer {layer}, found none")
        return self._means.mlp[layer]

    def close(self) -> None:
        """Release the kept tensors."""
        self._records.clear()
        self.cache = "nothing"

    def _chunks(self, members: list[int], whole: bool) -> Iterator[tuple[list[int], slice]]:
        """The interventions and images of each forward: at most `chunk` images, counting copies."""
        count = len(self.images)
        if whole or not self.exact or count <= self._chunk:
            copies = max(1, self._chunk // count) if self.exact else 1
            for first in range(0, len(members), copies):
                yield members[first : first + copies], slice(0, count)
            return
        parts = -(-count // self._chunk)
        for member in members:
            for part in range(parts):  # sizes differ by one at most
                yield [member], slice(part * count // parts, (part + 1) * count // parts)

    def _pass(
        self, kind: PassKind, sets: list[tuple[PreparedIntervention, ...]], part: slice, record: ReplayRecord
    ) -> Float[Tensor, "interventions part classes"]:
        prepared = [
            PreparedIntervention(change.intervention, change.data, copy)
            for copy, changes in enumerate(sets)
            for change in changes
        ]
        with _without_gradients(self.model), self._spent:
            if not self.exact:
                with in_force(self.model, prepared):
                    full: Tensor = self.model(self.images)
                return full.unsqueeze(0)
            batch = ReplayBatch(kind, tuple(prepared), len(sets), part, len(self.images))
            return replay_pass(self.model, self._method, record, batch)

    def _record(self, index: int, *, outputs: bool = True) -> ReplayRecord:
        """The record of a layer in the clean pass: kept, or computed again."""
        record = self._records.get(index, ReplayRecord())
        if record.arguments and (record.branch is not None or not outputs):
            return record
        again: dict[int, ReplayRecord] = {}
        keep: Cache = "everything" if outputs else "inputs"
        recorded = recording(self.model, again, which=(index,), keep=keep, stop=True)
        with suppress(StopForward), _without_gradients(self.model), self._spent, recorded, ExitStack() as stack:
            if record.arguments:
                args, kwargs = as_call(record.arguments)
                stack.enter_context(tapped_in_part(self.model))
                self.model.module.get_submodule(layer_of(self.model, index).unit)(*args, **kwargs)
            else:
                self.model(self.images)
        if again[index].arguments:
            return again[index]
        raise LensError(f"expected layer {index} to run again, found that it did not")


class LinearCount(TorchFunctionMode):
    """Counts the multiply-adds of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count linear layers; pass every call through."""
        kwargs = kwargs or {}
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.total += args[0].numel() * len(weight)
        elif func is F.multi_head_attention_forward:  # projections of query, key and value, and the output projection
            query, key, value = args[:3]
            self.total += (2 * query.numel() + key.numel() + value.numel()) * query.shape[-1]
        return func(*args, **kwargs)


@contextmanager
def _without_gradients(model: Model) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def replaying(
    model: Model, images: Images, *, budget: int = DEFAULT_BUDGET, chunk: int | None = None
) -> Iterator[Replay]:
    """A clean pass of the images, kept inside the context, from which interventions are run.

    budget: bytes for what is kept; where it is too small, less is kept and the rest computed again (`cache`, `note`).
    chunk: images in one forward, counting copies; by default chosen for the device's caches. Under autocast, everything
    runs in that precision. Interventions that are already applied stay applied, unless they hold a tensor per image:
    a replay splits the batch in its own way. Raises UnsupportedError for a model without attention.

    >>> with replaying(model, images) as replay:
    ...     logits = replay.run([HeadReplaced(0, 1), (HeadReplaced(0, 1), BlockRemoved(2))])
    """
    replay = Replay(model, images, method_of(model), budget=budget, chunk=chunk)
    try:
        yield replay
    finally:
        replay.close()
