"""Replay: a clean pass is kept, and changes of places run the model again only from the first layer they change.

Blocks l.. run again, many sets of changes in one batch. The attention of block l is not run again where only heads are
replaced, as the output projection is linear: branch + (replacement - output) W, with the head's columns W. The last
block is computed for the tokens that the classifier reads. `patch` runs one pass with the activations of another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.lens.capture import Captured, capture
from vitlens.lens.change import Set, in_force
from vitlens.lens.intervene import Change, Changes, Reference, intervene, prepared
from vitlens.lens.places import resolve_places
from vitlens.lens.replay_pass import PassKind, ReplayRecord, StopForward, method_of, recording, replay_pass
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_images, takes_images
from vitlens.shapes import Images, Logits
from vitlens.summary import Summary

DEFAULT_BUDGET: Final = 2 << 30  # bytes: ViT-B/16 and 64 images need 1.4e9
# bytes of the widest tensor in one forward: larger is slower on a CPU (most of all in bf16), smaller is slower on a GPU
_WORKING_SET: Final = {"cpu": 24 << 20}
_LARGE_WORKING_SET: Final = 512 << 20


class Replay:
    """A clean pass of some images, from which sets of changes are run; made by `replaying`.

    logits: of the clean pass (batch, classes); exact: whether changes are replayed, else each set is a full forward;
    note: why that is, and how much of the clean pass is not kept but computed again (which costs time and changes no
    number), or ""; forward_cost: multiply-adds of linear layers in one forward of these images.
    """

    def __init__(self, model: Model, images: Images, given: Set, *, budget: int, chunk: int | None) -> None:
        self.model = model
        self.images = images
        self._method = method_of(model)
        self._given = given
        self.exact = self._method.exact
        sizes = [start.bytes * len(images) for start in self._method.starts]
        keep: list[int] = []
        for index in reversed(range(len(sizes))):  # an early layer is soon computed again
            if sum(sizes[each] for each in (*keep, index)) <= budget:
                keep.append(index)
        kept = sum(sizes[index] for index in keep)
        short = f"{kept / 1e9:.2f} of {sum(sizes) / 1e9:.2f} GB of the clean pass are kept; the rest is computed again"
        self.note = "; ".join(filter(None, (self._method.note, "" if len(keep) == len(sizes) else short)))
        working_set = _WORKING_SET.get(images.device.type, _LARGE_WORKING_SET)
        self._chunk = chunk or max(1, working_set // self._method.largest)
        self._spent = LinearCount()
        with self._computing(), in_force(model, self._given), recording(model, keep) as self._records:
            self.logits: Logits = model(images)
        self.forward_cost = self.cost

    @property
    def cost(self) -> int:
        """Multiply-adds of linear layers spent so far, the clean pass included."""
        return self._spent.total

    @property
    def forward_equivalents(self) -> float:
        """Full forwards of these images spent so far, the clean pass included, counted by linear layers' FLOPs."""
        return self.cost / self.forward_cost

    def run(
        self, sets: Sequence[Changes], *, reference: Reference | None = None, seed: int = 0
    ) -> Float[Tensor, "sets batch classes"]:
        """Return the logits under each set of changes by place, {"blocks.3.head.7": "zero"}, those of
        `vitlens.intervene`.

        reference, seed: as there. Raises what `intervene` raises.
        """
        return self.run_prepared([prepared(self.model, each, reference=reference, seed=seed) for each in sets])

    def run_prepared(self, sets: Sequence[Set]) -> Float[Tensor, "sets batch classes"]:
        """As run, of changes that were prepared once for many runs."""
        found = list(sets)
        logits = self.logits.unsqueeze(0).repeat(len(sets), 1, 1)
        kinds: dict[PassKind, list[int]] = {}
        for number, changes in enumerate(found):
            if changes:  # what was given is changed again in the layers that run again
                start = min(change.access.layer or 0 for change in changes) if self.exact else 0
                found[number] = (*changes, *(each for each in self._given if (each.access.layer or 0) >= start))
                kinds.setdefault(self._method.kind(found[number]), []).append(number)
        for kind in sorted(kinds, key=lambda kind: (kind.start, kind.attention, kind.whole)):
            record = self._record(kind.start) if self.exact else ReplayRecord()
            for numbers, part in self._chunks(kinds[kind], whole=kind.whole):
                chosen = [found[number] for number in numbers]
                with self._computing():
                    if self.exact:
                        count = len(self.images)
                        found_logits = replay_pass(self.model, self._method, record, kind, chosen, part, count)
                    else:
                        with in_force(self.model, *chosen):
                            found_logits = self.model(self.images)
                logits[numbers, part] = found_logits
        return logits

    def tensor(self, place: str) -> Tensor:
        """Return the clean pass's tensor (batch, *shape) at a block's input or its heads: "blocks.3.heads"."""
        (access,) = resolve_places(self.model, place)
        record = self._record(access.layer or 0)
        raw = record.heads if access.part == "joined" else record.arguments[access.argument]  # type: ignore[index]
        assert raw is not None
        return access.read(raw)

    def close(self) -> None:
        """Release the kept tensors."""
        self._records.clear()

    def _chunks(self, members: list[int], *, whole: bool) -> Iterator[tuple[list[int], slice]]:
        """Yield the sets and images of each forward: at most `chunk` images, counting copies."""
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

    def _record(self, index: int) -> ReplayRecord:
        """Return the record of a layer in the clean pass: kept, or computed again."""
        if index in self._records and self._records[index].arguments:
            return self._records[index]
        again = recording(self.model, [index], stop=True)
        with suppress(StopForward), self._computing(), in_force(self.model, self._given), again as records:
            self.model(self.images)
        if records[index].arguments:
            return records[index]
        raise LensError(f"expected layer {index} to run again, found that it did not")

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, the model is evaluated without gradients, and its linear layers are counted."""
        with evaluating(self.model), torch.no_grad(), self._spent:
            yield


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
def replaying(
    model: Model,
    images: Images,
    *,
    given: Set = (),
    budget: int = DEFAULT_BUDGET,
    chunk: int | None = None,
) -> Iterator[Replay]:
    """A clean pass of images on the model's device, as `replay`; given: changes that are in force in all passes.

    Under autocast, everything runs in that precision. Interventions that are already applied stay applied, unless they
    hold a tensor per image: a replay splits the batch in its own way.
    """
    kept = Replay(model, images, given, budget=budget, chunk=chunk)
    try:
        yield kept
    finally:
        kept.close()


@takes_images
@contextmanager
def replay(
    model: Model, images: AnyImages, *, budget: int = DEFAULT_BUDGET, chunk: int | None = None
) -> Iterator[Replay]:
    """A clean pass of the images, kept inside the context, from which many changes are run.

    `replay.run([{place: change}, ...])` gives the logits (sets, batch, classes) under each set of changes, which are
    those of `intervene`: the model runs again only from the first layer that a set changes, several sets in one batch.
    `replay.logits` are those of the clean pass; `replay.exact`: whether the model can be started in the middle with
    equal logits (1e-4, tested once for its weights), else every set is a full forward pass, and `replay.note` says why.
    budget: bytes of activations that are kept, the rest is computed again; chunk: images in one forward, copies
    counted. No gradients. Contexts of `intervene` around it stay applied. Raises UnsupportedError for a model without
    attention.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)
    >>> with vitlens.replay(model, images) as replay:
    ...     logits = replay.run([{f"blocks.5.head.{head}": "zero"} for head in range(4)] + [{"blocks.0": "remove"}])
    >>> logits.shape, replay.exact
    (torch.Size([5, 2, 10]), True)
    """
    with replaying(model, as_images(images).to(model.device), budget=budget, chunk=chunk) as kept:
        yield kept


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity: == of tensors is elementwise
class Patched(Summary):
    """The logits of one run with another run's activations put in.

    places: the names that were patched together in each element of logits (places, batch, classes); clean, other: the
    logits (batch, classes) of the two runs; exact: whether replay computed them, not full forward passes (the numbers
    are those of full forward passes, to rounding, in both cases).
    """

    places: tuple[tuple[str, ...], ...]
    logits: Float[Tensor, "places batch classes"]
    clean: Logits
    other: Logits
    exact: bool

    def __getitem__(self, name: str) -> Logits:
        """Return the logits (batch, classes) of a place that was patched alone. Raises InputError for another."""
        if (name,) not in self.places:
            raise InputError(f"expected a place that was patched alone, found {name!r}; see .places")
        return self.logits[self.places.index((name,))]


@takes_images
def patch(
    model: Model,
    images: AnyImages,
    other: AnyImages | Captured,
    places: str | Sequence[str | tuple[str, ...]],
) -> Patched:
    """Return the logits of `images` with the activations of the other run put in at some places (activation patching).

    other: images in any form, as many as `images`, or what was captured at these places; places: names or
    patterns, every place they mean patched apart; a tuple of them is patched together. "blocks.*.input[*]" is every
    token of every block. Where the model can be replayed, each run starts at the first layer that it changes, many in
    one batch. Raises InputError for runs of different numbers of images, UnknownNameError for an unknown place.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(4, 3, 32, 32)
    >>> places = ["blocks.*.head.*", ("blocks.0.attention", "blocks.0.mlp")]
    >>> patched = vitlens.patch(model, images[:2], images[2:], places)
    >>> patched.logits.shape  # 24 heads, and attention and MLP of block 0 together
    torch.Size([25, 2, 10])
    >>> effect = patched["blocks.5.head.0"] - patched.clean
    """
    images = as_images(images).to(model.device)
    labels: list[tuple[str, ...]] = []
    for each in (places,) if isinstance(places, str) else places:
        names = tuple(access.name for access in resolve_places(model, each))
        labels += [(name,) for name in names] if isinstance(each, str) else [names]
    captured = (
        other if isinstance(other, Captured) else capture(model, other, [name for each in labels for name in each])
    )
    if len(captured.logits) != len(images):
        raise InputError(f"expected two runs of as many images, found {len(images)} and {len(captured.logits)}")
    sets: list[dict[str, Change]] = [{name: captured[name].detach() for name in each} for each in labels]
    with suppress(UnsupportedError), replaying(model, images) as replay:
        logits = replay.run(sets)
        return Patched(tuple(labels), logits, replay.logits, captured.logits.detach(), replay.exact)
    with evaluating(model), torch.no_grad():  # no attention
        clean: Tensor = model(images)
        logits = clean.new_empty(len(sets), *clean.shape)
        for number, changes in enumerate(sets):
            with intervene(model, changes):
                logits[number] = model(images)
    return Patched(tuple(labels), logits, clean, captured.logits.detach(), exact=False)
