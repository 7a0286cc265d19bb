"""Bench: labelled images on which units of a model are removed, and every image's loss and prediction without them.

A head's output before the output projection is replaced by its mean over the data at each token, by zero, or by
another image's. Everything else in this folder is a function of the `Outcomes` that `Bench.without` gives. Each set of
units takes one replay from its first layer on.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.ablation.units import Removal, Unit
from vitlens.analysis.attention.chain import check_targets
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.devices import evaluating
from vitlens.errors import InputError, NonFiniteError, UnknownNameError
from vitlens.lens.capture import Means
from vitlens.lens.change import reading
from vitlens.lens.intervene import Change, another_image
from vitlens.lens.places import Access, accesses, resolve_places
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, Replacement
from vitlens.pixels import Parts
from vitlens.processes import Processes
from vitlens.shapes import Images, Labels

ALONE = Processes(0, 1, torch.device("cpu"))

ByImage = Float[Tensor, "sets images"]
Some = Int[Tensor, " some"]  # indices of images


@dataclass(frozen=True)
class Outcomes:
    """Every image's loss and prediction without sets of units.

    sets: what was removed; replace: what replaced its output; labels (n,): the true classes, as columns of the logits;
    clean_loss (n,): cross-entropy of the unchanged model, nats; clean_correct (n,): whether its prediction is the
    label; loss, correct (sets, n): the same without each; forward_equivalents: full forward passes spent an image, a
    mean; note: a remark for a report, or "". All on the CPU, losses in float64.
    """

    sets: tuple[Removal, ...]
    replace: Replacement
    labels: Labels
    clean_loss: Float[Tensor, " images"]
    clean_correct: Bool[Tensor, " images"]
    loss: ByImage
    correct: Bool[Tensor, "sets images"]
    forward_equivalents: float
    note: str = ""

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    @property
    def units(self) -> Removal:
        """The units of sets of one."""
        return tuple(unit for (unit,) in self.sets)

    @property
    def delta_loss(self) -> ByImage:
        """Change of each image's cross-entropy, nats; positive: the units help."""
        return self.loss - self.clean_loss

    @property
    def delta_accuracy(self) -> ByImage:
        """Accuracy lost on each image, points: 100 where removal makes the prediction wrong, -100 where right."""
        return 100 * (self.clean_correct.double() - self.correct.double())

    def rows(self, index: Sequence[int]) -> "Outcomes":
        """The outcomes of some of the sets."""
        chosen = list(index)
        return replace(
            self, sets=tuple(self.sets[row] for row in chosen), loss=self.loss[chosen], correct=self.correct[chosen]
        )

    @classmethod
    def join(cls, parts: "Sequence[Outcomes]") -> "Outcomes":
        """The outcomes of the same sets on several batches, in their order."""
        images = sum(len(part) for part in parts)
        return replace(
            parts[0],
            labels=torch.cat([part.labels for part in parts]),
            clean_loss=torch.cat([part.clean_loss for part in parts]),
            clean_correct=torch.cat([part.clean_correct for part in parts]),
            loss=torch.cat([part.loss for part in parts], dim=1),
            correct=torch.cat([part.correct for part in parts], dim=1),
            forward_equivalents=sum(part.forward_equivalents * len(part) for part in parts) / images,
            note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        )

    def gathered(self, processes: Processes) -> "Outcomes":
        """The outcomes of all processes' shares of the images, in the order of the images; called by every process."""
        spent = processes.total(torch.tensor([self.forward_equivalents * len(self), len(self)], dtype=torch.float64))
        return replace(
            self,
            labels=processes.gathered(self.labels),
            clean_loss=processes.gathered(self.clean_loss),
            clean_correct=processes.gathered(self.clean_correct),
            loss=processes.gathered(self.loss.T.contiguous()).T,
            correct=processes.gathered(self.correct.T.contiguous()).T,
            forward_equivalents=float(spent[0] / spent[1]),
        )


class Stored(NamedTuple):
    """The outcomes of sets of units on one batch; cost: the multiply-adds of linear layers for measuring them."""

    loss: ByImage
    correct: Bool[Tensor, "sets images"]
    cost: int


class Memory(Protocol):
    """A store of the outcomes of a batch, from which an interrupted run resumes."""

    def recall(self, sets: Sequence[Removal]) -> Stored | None:
        """The stored outcomes of these sets, or None."""
        ...

    def remember(self, sets: Sequence[Removal], outcomes: Stored) -> None:
        """Store the outcomes of these sets."""
        ...


def other_images(count: int, *, seed: int) -> Some:
    """For each of `count` images the index of another one, each used once: a seeded cycle through all of them.

    Raises InputError for fewer than two.
    """
    if count < 2:
        raise InputError(f"expected at least 2 images to resample from, found {count}; try --replace zero")
    return another_image(count, seed)


def replacement_for(images: int, requested: Replacement | None) -> Replacement:
    """The replacement for this many images; requested: None is the mean, or for few images resampling or zero.

    The mean over few images is close to each image's own output, so removing a unit would seem to have no effect: with
    fewer than FEWEST_FOR_MEAN images the default is resampling, with a single image zero. Raises InputError for "mean"
    or "resample" on too few images.
    """
    fallback: Replacement = "resample" if images > 1 else "zero"
    if requested is None:
        return "mean" if images >= FEWEST_FOR_MEAN else fallback
    if requested not in REPLACEMENTS:
        raise UnknownNameError("replacement", requested, REPLACEMENTS)
    if requested == "mean" and images < FEWEST_FOR_MEAN:
        raise InputError(
            f"expected at least {FEWEST_FOR_MEAN} images to replace by their mean, found {images}; give more, or "
            f"--replace {fallback}"
        )
    if requested == "resample":
        other_images(images, seed=0)  # raises for a single image
    return requested


def replacement_note(images: int, by: Replacement) -> str:
    """The remark for a report where the default replacement was not the mean."""
    instead = "another image's output" if by == "resample" else "zero, which overstates what they do"
    many = f"{images} images are" if images != 1 else "1 image is"
    return f"{many} too few for a mean over the data (at least {FEWEST_FOR_MEAN}), so units are replaced by {instead}"


@contextmanager
def silent(_what: str, _total: int, _unit: str = "") -> Iterator[Callable[[int], object]]:
    """The progress of a loop, shown nowhere."""
    yield lambda _done: None


@dataclass(frozen=True)
class Source:
    """What replaces units' outputs on one batch; read: the tensor of a place; donor: the other images' clean pass."""

    by: Replacement
    read: Callable[[str], Tensor]
    donor: Replay | None = None

    def changes(self, sets: Sequence[Removal]) -> list[dict[str, Change]]:
        """The changes, by place, that remove each of the sets."""
        known: dict[str, Tensor] = {}

        def change(unit: Unit) -> Change:
            if unit.kind == "block":
                return "remove"
            if self.by == "zero":
                return "zero"
            place = unit.place if unit.head is None else f"blocks.{unit.layer}.heads"
            if place not in known:
                known[place] = self.read(place)
            return known[place] if unit.head is None else known[place].select(-3, unit.head)  # (.., heads, tokens, dim)

        return [{unit.place: change(unit) for unit in each} for each in sets]


@dataclass(frozen=True)
class Bench:
    """A model and labelled images, and how the outputs of removed units are replaced.

    labels (n,): columns of the model's logits; by: "mean" over the images, "zero", or "resample", the output for
    another of the images (None: the mean, with 2 to 7 images resampling, with one zero; the outcomes' note says so);
    groups (n,): of images that share a source; budget: bytes that a replay may store; images and labels are those of
    all processes, of which each measures its share; means: of other images (None: of these); progress: of a loop
    (words, total, unit); memory: that of a batch, from its name, images and labels. Raises InputError for too few
    images.
    """

    model: Model
    images: Parts
    labels: Labels
    by: Replacement | None = None
    groups: Tensor | None = None
    seed: int = 0
    batch_size: int | None = None
    processes: Processes = ALONE
    budget: int = DEFAULT_BUDGET
    means: Means | None = None
    progress: Callable[..., AbstractContextManager[Callable[[int], object]]] = silent
    memory: Callable[[str, Images, Labels], Memory] | None = None
    _found: list[Means] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def replacement(self) -> Replacement:
        """What replaces a unit's output."""
        if self.by == "mean" and self.means is not None:
            return self.by
        return replacement_for(len(self.images), self.by)

    @cached_property
    def size(self) -> int:
        """Images at a time."""
        return self.batch_size or fitting_batch_size(self.model)

    @property
    def one_batch(self) -> bool:
        """Whether one batch holds all images, so that its clean pass gives their means."""
        return self.processes.count == 1 and len(self.images) <= self.size

    def share(self, images: Some | None = None) -> Some:
        """The part of these images (None: of all) that this process measures."""
        every = torch.arange(len(self.images)) if images is None else images
        return every[self.processes.index :: self.processes.count]

    @property  # no cached_property: in Python 3.11 its lock is that of all instances, and processes wait for each other
    def known_means(self) -> Means:
        """The means over the images of all processes, from clean passes that store nothing else."""
        if self.means is not None:
            return self.means
        if self._found:
            return self._found[0]
        found, own, total = Means(), self.share(), self.processes.total
        with (
            self.progress("Mean outputs", len(self.images)) as advance,
            evaluating(self.model),
            torch.no_grad(),
            reading(self.model, _replaced_places(self.model), found.add),
        ):
            for rows in own.split(self.size):
                self.model(self.images[rows].to(self.model.device))
                advance(len(rows) * self.processes.count)
        found.images = round(float(total(torch.tensor([len(own)], dtype=torch.float64))))
        found.sums = {place: total(found.sums[place]) for place in sorted(found.sums)}
        self._found.append(found)
        return found

    @cached_property
    def donors(self) -> Some:
        """For each image the one whose outputs replace its own; drawn from all, whatever the batches."""
        return other_images(len(self.images), seed=self.seed)

    def on(self, images: Some) -> "Bench":
        """A bench of these images alone, of one process, with the means of all."""
        means = self.known_means if self.replacement == "mean" else None
        groups = None if self.groups is None else self.groups[images]
        return replace(
            self, images=self.images[images], labels=self.labels[images], groups=groups, by=self.replacement,
            processes=ALONE, means=means, progress=silent, memory=None,
        )  # fmt: skip

    def without(
        self,
        sets: Sequence[Removal],
        images: Some | None = None,
        *,
        given: Removal = (),
        what: str = "Removing units",
    ) -> Outcomes:
        """The outcomes of every image (or of some) without each of the sets; an empty set is the unchanged model.

        Of all images they are stored in `memory`. given: units that are removed from the model before, also for its
        clean pass; what: the title of the progress. Raises NonFiniteError naming units and image.
        """
        if self.replacement == "mean" and not self.one_batch:
            _ = self.known_means  # before the progress of the removals
        own, parts = self.share(images), []
        with self.progress(what, len(sets) * len(own), "removals") as advance:
            for offset in range(0, len(own), self.size):
                rows = own[offset : offset + self.size]
                name = f"{self.replacement}-{offset}" if images is None else ""
                parts.append(self._batch(rows, tuple(sets), given, name, advance))
        found = Outcomes.join(parts).gathered(self.processes)
        if self.by is None and self.replacement != "mean":
            note = "; ".join(filter(None, (found.note, replacement_note(len(self.images), self.replacement))))
            found = replace(found, note=note)
        return found

    @contextmanager
    def source(self, rows: Some, units: Collection[Unit]) -> Iterator[Source]:
        """What replaces these units' outputs on some images, but for the means of a batch that holds all images."""
        if self.replacement != "resample":
            yield Source(self.replacement, self.known_means.of if self.replacement == "mean" else _nothing)
            return
        mlps: dict[str, Tensor] = {}
        watched = resolve_places(self.model, [unit.place for unit in units if unit.kind == "mlp"])
        others = self.images[self.donors[rows]].to(self.model.device)
        with ExitStack() as stack:
            with reading(self.model, watched, mlps.__setitem__):
                donor = stack.enter_context(replaying(self.model, others, budget=self.budget))

            def read(place: str) -> Tensor:
                return mlps[place] if place in mlps else donor.tensor(place)

            yield Source(self.replacement, read, donor)

    def _batch(
        self, rows: Some, sets: tuple[Removal, ...], given: Removal, name: str, advance: Callable[..., Any]
    ) -> Outcomes:
        images, by = self.images[rows].to(self.model.device), self.replacement
        units = tuple(dict.fromkeys(unit for each in (*sets, given) for unit in each))
        own_means = by == "mean" and self.means is None and not given and len(rows) == len(self.images)
        averaged = Means()
        with ExitStack() as stack:
            source = Source(by, averaged.of) if own_means else stack.enter_context(self.source(rows, units))
            with reading(self.model, _replaced_places(self.model) if own_means else (), averaged.add):
                before = source.changes([given])[0]
                replay = stack.enter_context(replaying(self.model, images, given=before, budget=self.budget))
                averaged.images = len(rows)

            def spent() -> int:
                return replay.cost + (0 if source.donor is None else source.donor.cost)

            truth = check_targets(self.labels[rows], replay.logits)
            memory = self.memory(name, images, truth) if self.memory is not None and name else None
            clean_loss, clean_correct = loss_and_correct(replay.logits[None], truth)
            _require_finite(clean_loss, [()], self.model.alias, rows)
            loss = clean_loss.new_zeros(len(sets), len(rows))
            correct = clean_correct.new_zeros(loss.shape)
            recalled = 0  # the cost of the recalled outcomes in an earlier run
            for index in _by_first_layer(sets):
                chosen = [sets[row] for row in index]
                known, already = None if memory is None else memory.recall(chosen), spent()
                outcomes = known or Stored(
                    *loss_and_correct(replay.run(source.changes(chosen)), truth), spent() - already
                )
                loss[index], correct[index] = outcomes.loss, outcomes.correct
                _require_finite(outcomes.loss, chosen, self.model.alias, rows)
                if known is not None:
                    recalled += known.cost
                elif memory is not None:
                    memory.remember(chosen, outcomes)
                advance(len(index) * len(rows))
            passes = (spent() + recalled) / replay.forward_cost
            return Outcomes(
                sets, by, self.labels[rows].cpu(), clean_loss[0], clean_correct[0], loss, correct, passes, replay.note
            )


def loss_and_correct(
    logits: Float[Tensor, "sets batch classes"], labels: Labels
) -> tuple[Float[Tensor, "sets batch"], Bool[Tensor, "sets batch"]]:
    """Cross-entropy (sets, batch) in nats, float64, and whether the prediction is the label; on the CPU."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return loss.view(logits.shape[:2]).cpu().double(), (logits.argmax(-1) == labels).cpu()


def _replaced_places(model: Model) -> list[Access]:
    """The places of all heads' and MLPs' outputs."""
    return [access for access in accesses(model).values() if access.place.kind in ("heads", "mlp")]


def _nothing(place: str) -> Tensor:
    raise AssertionError(place)  # zero reads no tensor


def _by_first_layer(sets: Sequence[Removal]) -> list[list[int]]:
    """Rows of sets by the layer of their first unit: these are replayed together, then their tensors are released."""
    rows: dict[int, list[int]] = {}
    for row, each in enumerate(sets):
        rows.setdefault(min((unit.layer for unit in each), default=-1), []).append(row)
    return [rows[layer] for layer in sorted(rows)]


def _require_finite(loss: ByImage, sets: Sequence[Removal], alias: str, rows: Some) -> None:
    broken = (~loss.isfinite()).nonzero()
    if len(broken):
        row, image = broken[0].tolist()
        without = " and ".join(unit.name for unit in sets[row])
        raise NonFiniteError(
            f"expected a finite loss, found {float(loss[row, image])} from {alias} on image {int(rows[image])}"
            + (f" without {without}" if without else "")
        )
