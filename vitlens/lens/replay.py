"""Keep a clean pass, and run the model again only from the first layer that a change affects.

The blocks from the changed one on run again, with many sets of changes in one batch. If only heads
are replaced, the attention of that block is not run again, because the output projection is linear.
Its new output is branch + (replacement - output) W, where W are the columns of the replaced heads.
The last block is computed only for the tokens that the classifier reads. `patch` runs one pass with
the activations of another.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.capture import Captured, capture
from vitlens.lens.change import Set, in_force
from vitlens.lens.intervene import Change, Changes, Reference, intervene, prepare_changes
from vitlens.lens.place_patterns import resolve_places
from vitlens.lens.replay_method import method_of
from vitlens.lens.replay_pass import PassKind, ReplayRecord, StopForward, recording, replay_pass
from vitlens.models.attention import positional
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_images
from vitlens.shapes import Images, Logits
from vitlens.summary import Summary

DEFAULT_BUDGET: Final = 2 << 30  # bytes: ViT-B/16 and 64 images need 1.4e9
# bytes of the widest tensor in one forward pass, by device: a larger one is slower on a CPU (most
# of all in bf16), a smaller one is slower on a GPU
_WORKING_SET: Final = {"cpu": 24 << 20}
_LARGE_WORKING_SET: Final = 512 << 20  # on other devices


class Replay:
    """A clean pass of some images, from which sets of changes are run; created by `replaying`.

    logits: the logits (batch, classes) of the clean pass.
    exact: whether changes are replayed. Otherwise, each set of changes is a full forward pass.
    note: why changes are not replayed, and how much of the clean pass is not kept but computed
        again. That costs time and changes no number. It is "" if there is nothing to say.
    forward_cost: the multiply-adds of linear layers in one forward pass of these images.
    """

    def __init__(
        self, model: Model, images: Images, given: Set, *, budget: int, chunk: int | None
    ) -> None:
        self.model = model
        self.images = images
        self._method = method_of(model)
        self._permanent_changes = given  # in force in all passes
        self.exact = self._method.exact
        stored_layers, note = self._layers_to_store(budget)
        self.note = "; ".join(filter(None, (self._method.note, note)))
        working_set = _WORKING_SET.get(images.device.type, _LARGE_WORKING_SET)
        self._chunk = chunk or max(1, working_set // self._method.largest)
        self._spent = LinearCount()
        with (
            self._computing(),
            in_force(model, self._permanent_changes),
            recording(model, stored_layers) as self._records,
        ):
            self.logits: Logits = model(images)
        self.forward_cost = self.cost

    def _layers_to_store(self, budget: int) -> tuple[list[int], str]:
        """Return the layers to keep within so many bytes, and a note if not all are kept."""
        sizes = {}
        for number, start in self._method.starts.items():
            sizes[number] = start.bytes * len(self.images)
        stored_layers: list[int] = []
        stored_bytes = 0
        # late layers first: an early layer takes little time to compute again
        for index in sorted(sizes, reverse=True):
            if stored_bytes + sizes[index] <= budget:
                stored_layers.append(index)
                stored_bytes += sizes[index]
        if len(stored_layers) == len(sizes):
            return stored_layers, ""
        share = f"{stored_bytes / 1e9:.2f} of {sum(sizes.values()) / 1e9:.2f} GB"
        return stored_layers, f"{share} of the clean pass are kept; the rest is computed again"

    @property
    def cost(self) -> int:
        """Return the multiply-adds of linear layers spent so far, the clean pass included."""
        return self._spent.total

    @property
    def forward_equivalents(self) -> float:
        """Return the cost so far, in full forward passes of these images.

        It is counted by the multiply-adds of linear layers.
        """
        return self.cost / self.forward_cost

    def run(
        self, sets: Sequence[Changes], *, reference: Reference | None = None, seed: int = 0
    ) -> Float[Tensor, "sets batch classes"]:
        """Return the logits under each set of changes by place, as `vitlens.intervene` would give.

        sets: such as {"blocks.3.head.7": "zero"}; reference, seed: as in `intervene`. Raises what
        `intervene` raises.
        """
        return self.run_prepared(
            [
                prepare_changes(self.model, changes, reference=reference, seed=seed)
                for changes in sets
            ]
        )

    def run_prepared(self, sets: Sequence[Set]) -> Float[Tensor, "sets batch classes"]:
        """Return the logits as `run` does, for changes that were prepared once for many runs."""
        # a set without changes keeps the clean logits
        logits = self.logits.unsqueeze(0).repeat(len(sets), 1, 1)
        complete_sets = [self._with_permanent_changes(changes) for changes in sets]
        numbers_by_kind: dict[PassKind, list[int]] = {}
        for number, changes in enumerate(complete_sets):
            if changes:
                numbers_by_kind.setdefault(self._method.kind(changes), []).append(number)
        for kind in sorted(
            numbers_by_kind, key=lambda kind: (kind.start, kind.attention, kind.whole)
        ):
            record = self._record(kind.start) if self.exact else ReplayRecord()
            for numbers, part in self._chunks(numbers_by_kind[kind], whole=kind.whole):
                chosen = [complete_sets[number] for number in numbers]
                logits[numbers, part] = self._run_chunk(chosen, kind, record, part)
        return logits

    def _with_permanent_changes(self, changes: Set) -> Set:
        """Return a set with those changes of all passes that are in the layers that run again.

        The other ones are already in the recorded tensors.
        """
        if not changes:
            return changes
        start = 0
        if self.exact:
            start = min(change.access.layer or 0 for change in changes)
        repeated = []
        for change in self._permanent_changes:
            if (change.access.layer or 0) >= start:
                repeated.append(change)
        return (*changes, *repeated)

    def _run_chunk(
        self, sets: Sequence[Set], kind: PassKind, record: ReplayRecord, part: slice
    ) -> Tensor:
        """Return the logits of some images under some sets of changes of one kind."""
        with self._computing():
            if self.exact:
                return replay_pass(
                    self.model,
                    self._method,
                    record,
                    kind=kind,
                    sets=sets,
                    part=part,
                    images=len(self.images),
                )
            # a full forward pass of one set and all images, as `_chunks` divides them
            with in_force(self.model, *sets):
                logits: Tensor = self.model(self.images)
                return logits

    def tensor(self, place: str) -> Tensor:
        """Return the clean pass's tensor (batch, *shape) at a block's input or at its heads.

        place: for example "blocks.3.heads".
        """
        (access,) = resolve_places(self.model, place)
        record = self._record(access.layer or 0)
        if access.part == "joined":
            raw = record.heads
        else:
            raw = record.arguments[access.argument]  # type: ignore[index]
        assert raw is not None
        return access.read(raw)

    def close(self) -> None:
        """Release the kept tensors."""
        self._records.clear()

    def _chunks(self, members: list[int], *, whole: bool) -> Iterator[tuple[list[int], slice]]:
        """Yield the sets and the images of each forward pass.

        A pass has at most `chunk` images, counting the copies for each set.

        members: the numbers of the sets, as positions in the list of all sets.
        whole: whether all images must be in one pass.
        """
        count = len(self.images)
        if whole or not self.exact or count <= self._chunk:
            # all images in each pass, and several sets if they fit
            copies = max(1, self._chunk // count) if self.exact else 1
            all_images = slice(0, count)
            for start in range(0, len(members), copies):
                yield members[start : start + copies], all_images
            return
        # one set in each pass, and some of the images; the numbers of images differ by one at most
        parts = math.ceil(count / self._chunk)
        for member in members:
            for part in range(parts):
                yield [member], slice(part * count // parts, (part + 1) * count // parts)

    def _record(self, index: int) -> ReplayRecord:
        """Return the record of a layer in the clean pass: kept, or computed again."""
        if index in self._records and self._records[index].arguments:
            return self._records[index]
        with (
            suppress(StopForward),
            self._computing(),
            in_force(self.model, self._permanent_changes),
            recording(self.model, [index], stop=True) as records,
        ):
            self.model(self.images)
        if records[index].arguments:
            return records[index]
        raise LensError(f"expected layer {index} to run again, found that it did not")

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Evaluate the model without gradients, and count its linear layers."""
        with evaluating(self.model), torch.no_grad(), self._spent:
            yield


class LinearCount(TorchFunctionMode):
    """Counts the multiply-adds of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count linear layers; pass every call through."""
        kwargs = kwargs or {}
        if func is F.linear:
            (tokens, weight, *_), _ = positional(func, args, kwargs)
            self.total += tokens.numel() * len(weight)
        elif func is F.multi_head_attention_forward:
            query, key, value = args[:3]
            # the projections of query, key and value, and the output projection, which has as many
            # inputs as that of the query
            inputs = 2 * query.numel() + key.numel() + value.numel()
            width = query.shape[-1]
            self.total += inputs * width
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
    """Run a clean pass of images on the model's device, as `replay` does.

    Under autocast, everything runs in that precision. Interventions that are already applied stay
    applied, unless they hold a tensor per image: a replay splits the batch differently.

    given: changes that are in force in all passes, the clean one included.
    budget, chunk: as in `replay`.
    """
    replay = Replay(model, images, given, budget=budget, chunk=chunk)
    try:
        yield replay
    finally:
        replay.close()


@takes_images
@contextmanager
def replay(
    model: Model, images: AnyImages, *, budget: int = DEFAULT_BUDGET, chunk: int | None = None
) -> Iterator[Replay]:
    """Run a clean pass of the images and keep it inside the context, to run many changes from it.

    `replay.run([{place: change}, ...])` returns the logits (sets, batch, classes) under each set of
    changes, as `intervene` does. The model runs again only from the first layer that a set changes,
    with several sets in one batch. `replay.logits` are the logits of the clean pass.
    `replay.exact` is True if the model can be started in the middle with equal logits (to 1e-4,
    tested once for its weights). Otherwise, every set is a full forward pass, and `replay.note`
    says why. There are no gradients. Contexts of `intervene` around it stay applied. Raises
    UnsupportedError for a model without attention.

    budget: the bytes of activations to keep; the rest is computed again.
    chunk: the most images in one forward pass, counting copies; None chooses it by their size.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)
    >>> with vitlens.replay(model, images) as replay:
    ...     without_head = [{f"blocks.5.head.{head}": "zero"} for head in range(4)]
    ...     logits = replay.run([*without_head, {"blocks.0": "remove"}])
    >>> logits.shape, replay.exact
    (torch.Size([5, 2, 10]), True)
    """
    with replaying(model, as_images(images).to(model.device), budget=budget, chunk=chunk) as replay:
        yield replay


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity: == of tensors is elementwise
class Patched(Summary):
    """The logits of one run with activations of another run put in.

    places: the names that were patched together, for each element of `logits`.
    logits: the logits (places, batch, classes) of the patched runs.
    clean: the logits (batch, classes) of the run without patches.
    other: the logits (batch, classes) of the run that provides the activations.
    exact: whether replay computed `logits`, rather than full forward passes. Up to rounding, the
        numbers are the same.
    """

    places: tuple[tuple[str, ...], ...]
    logits: Float[Tensor, "places batch classes"]
    clean: Logits
    other: Logits
    exact: bool

    def __getitem__(self, name: str) -> Logits:
        """Return the logits (batch, classes) of a place that was patched without others.

        Raises InputError for a place that was not.
        """
        if (name,) not in self.places:
            raise InputError(
                f"expected a place that was patched by itself, found {name!r}; see .places"
            )
        return self.logits[self.places.index((name,))]


@takes_images
def patch(
    model: Model,
    images: AnyImages,
    other: AnyImages | Captured,
    places: str | Sequence[str | tuple[str, ...]],
) -> Patched:
    """Return the logits of `images` with activations of another run put in (activation patching).

    If the model can be replayed, each run starts at the first layer that it changes, with many runs
    in one batch. Raises InputError for runs of different numbers of images, UnknownNameError for an
    unknown place.

    other: images in any form, as many as `images`, or what was captured at these places.
    places: names or patterns. Every place that they mean is patched separately; the places of a
        tuple are patched together. "blocks.*.input[*]" is every token of every block.

    >>> import torch, vitlens
    >>> model, images = vitlens.load("vit-digits"), torch.rand(4, 3, 32, 32)
    >>> places = ["blocks.*.head.*", ("blocks.0.attention", "blocks.0.mlp")]
    >>> patched = vitlens.patch(model, images[:2], images[2:], places)
    >>> patched.logits.shape  # 24 heads, and attention and MLP of block 0 together
    torch.Size([25, 2, 10])
    >>> effect = patched["blocks.5.head.0"] - patched.clean
    """
    images = as_images(images).to(model.device)
    labels = _patched_together(model, places)
    if isinstance(other, Captured):
        captured = other
    else:
        captured = capture(model, other, list(chain.from_iterable(labels)))
    if len(captured.logits) != len(images):
        raise InputError(
            f"expected two runs of as many images, found {len(images)} and {len(captured.logits)}"
        )
    sets: list[dict[str, Change]] = []
    for names in labels:
        sets.append({name: captured[name].detach() for name in names})
    # only `replaying` itself raises this error here
    with suppress(UnsupportedError), replaying(model, images) as replay:
        logits = replay.run(sets)
        return Patched(
            tuple(labels),
            logits,
            clean=replay.logits,
            other=captured.logits.detach(),
            exact=replay.exact,
        )
    # without attention, `replaying` raises: run a full forward pass for each set
    with evaluating(model), torch.no_grad():
        clean: Tensor = model(images)
        logits = clean.new_empty(len(sets), *clean.shape)
        for number, changes in enumerate(sets):
            with intervene(model, changes):
                logits[number] = model(images)
    return Patched(tuple(labels), logits, clean=clean, other=captured.logits.detach(), exact=False)


def _patched_together(
    model: Model, places: str | Sequence[str | tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the names that are patched together, for each patched run.

    Each place of a pattern has a separate run; all places of a tuple share one.
    """
    if isinstance(places, str):
        places = (places,)
    labels: list[tuple[str, ...]] = []
    for pattern in places:
        names = tuple(access.name for access in resolve_places(model, pattern))
        if isinstance(pattern, str):
            labels += [(name,) for name in names]
        else:
            labels.append(names)
    return labels
