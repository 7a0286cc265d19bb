"""Bench: a model and labelled images, and the loss and prediction of each image without units.

A unit is a head, an MLP, a block, or a latent that is a place of the model. The output of a removed
unit is replaced: by its mean over the data at each token, by zero, or by its output for another
image. For a head this is the output before the output projection. Everything else in this folder is
a function of the `Outcomes` that `Bench.without` returns. Each set of units takes one replay from
its first layer on.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.ablation.outcomes import ByImage, Memory, Outcomes, Stored
from vitlens.analysis.ablation.units import Removal, Unit
from vitlens.analysis.attention.chain import check_targets
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.log_odds import log_odds, loss_of
from vitlens.devices import evaluating
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, argument
from vitlens.lens.access import Access
from vitlens.lens.capture import Means, capture
from vitlens.lens.change import PlaceChange, Set, reading
from vitlens.lens.intervene import another_image
from vitlens.lens.place_patterns import resolve_places
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, Replacement
from vitlens.pixels import Parts
from vitlens.processes import Processes
from vitlens.shapes import Images, Labels

ALONE = Processes(0, 1, torch.device("cpu"))

ImageIndices = Int[Tensor, " some"]  # indices of some images


def replacement_for(images: int, requested: Replacement | None) -> Replacement:
    """Return the replacement for this many images.

    The mean over few images is close to the output on each of them, so removing a unit would seem
    to have no effect.

    requested: the replacement that the user asks for. None stands for the mean; with fewer than
        FEWEST_FOR_MEAN images it stands for resampling, with a single image for zero.

    Raises InputError for "mean" or "resample" on too few images.
    """
    fallback: Replacement = "resample" if images > 1 else "zero"
    if requested is None:
        return "mean" if images >= FEWEST_FOR_MEAN else fallback
    if requested not in REPLACEMENTS:
        raise UnknownNameError("replacement", requested, REPLACEMENTS)
    if requested == "mean" and images < FEWEST_FOR_MEAN:
        raise InputError(
            f"expected at least {FEWEST_FOR_MEAN} images to replace by their mean, found {images}; "
            f"give more, or {argument('replace', fallback)}"
        )
    if requested == "resample" and images < 2:
        raise InputError(
            f"expected at least 2 images to resample from, found {images}; try "
            f"{argument('replace', 'zero')}"
        )
    return requested


def replacement_note(images: int, by: Replacement) -> str:
    """Return the remark for a report whose default replacement is not the mean."""
    replacement = "zero, which overstates what they do"
    if by == "resample":
        replacement = "another image's output"
    count = f"{images} images are" if images != 1 else "1 image is"
    return (
        f"{count} too few for a mean over the data (at least {FEWEST_FOR_MEAN}), so units are "
        f"replaced by {replacement}"
    )


def silent(*_: object) -> AbstractContextManager[Callable[[int], object]]:
    """Return the progress of a loop that is not displayed."""
    return nullcontext(lambda _done: None)


@dataclass(frozen=True)
class Bench:
    """A model, labelled images, and the replacement of the outputs of removed units.

    model: the model.
    images: the images of all processes. Each process measures its share of them.
    labels (n,): the classes of the images, as columns of the logits.
    by: the replacement: "mean" for the mean over the images, "zero", or "resample" for the output
        for another image. None chooses by the number of images, see `replacement_for`; the note of
        the outcomes says so if it is not the mean.
    groups (n,): the source of each image.
    seed: the seed of resampling.
    batch_size: the number of images at a time; None chooses one that fits.
    processes: the processes that share the images.
    budget: the number of bytes that a replay may store.
    means: the mean outputs of units; None measures them when they are needed.
    progress: returns the progress display of a loop from its title, length and unit.
    memory: returns the memory of a batch from its name, images and labels.

    Raises InputError for too few images.
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

    @cached_property
    def replacement(self) -> Replacement:
        """Return the replacement of a unit's output."""
        return replacement_for(len(self.images), self.by)

    @property
    def size(self) -> int:
        """Return the number of images at a time."""
        return self.batch_size or fitting_batch_size(self.model)

    @property
    def one_batch(self) -> bool:
        """Return True if one batch holds all images.

        Its clean pass then gives the mean outputs, without a pass of their own.
        """
        return self.processes.count == 1 and len(self.images) <= self.size

    def share(self, images: ImageIndices | None = None) -> ImageIndices:
        """Return the part of these images that this process measures; None stands for all."""
        if images is None:
            images = torch.arange(len(self.images))
        return images[self.processes.index :: self.processes.count]

    def with_means(self, units: Iterable[Unit]) -> "Bench":
        """Return a bench with the mean outputs of units over the images of all processes.

        The bench itself is returned if it has means already, or needs none.
        """
        if self.means is not None or self.replacement != "mean":
            return self
        means = Means()
        with (
            self.progress("Mean outputs", len(self.images)) as advance,
            evaluating(self.model),
            torch.no_grad(),
            reading(self.model, self._outputs(units), means.add),
        ):
            for rows in self.share().split(self.size):
                self.model(self.images[rows].to(self.model.device))
                advance(len(rows) * self.processes.count)
        total = self.processes.total
        means.images = len(self.images)
        means.sums = {place: total(means.sums[place]) for place in sorted(means.sums)}
        return replace(self, means=means)

    def _outputs(self, units: Iterable[Unit]) -> tuple[Access, ...]:
        """Return the places of the outputs of MLPs, and of all heads or latents of a layer.

        Several units of a layer have one place.
        """
        names = [unit.output for unit in units if unit.kind != "block"]
        return resolve_places(self.model, names)

    def changes(self, rows: ImageIndices, units: Collection[Unit]) -> dict[Unit, PlaceChange]:
        """Return the replacement of each unit's output on some images.

        If outputs are replaced by their means, the bench must have the means.
        """
        outputs: dict[str, Tensor] = {}  # by place: the outputs that replace others
        if self.replacement == "resample":
            # the other image is one of all images, so that it does not depend on the batches
            other_images = self.images[another_image(len(self.images), self.seed)[rows]]
            places = [access.name for access in self._outputs(units)]
            outputs = dict(capture(self.model, other_images, places))
        elif self.replacement == "mean" and self.means is not None:
            for access in self._outputs(units):
                outputs[access.name] = self.means.of(access.name)
        changes = {}
        # units are different, so there is one access for each, in their order
        for unit, access in zip(units, resolve_places(self.model, [unit.place for unit in units])):
            if unit.kind == "block":  # is skipped, whatever the replacement
                changes[unit] = PlaceChange(access)
            elif self.replacement == "zero":
                changes[unit] = PlaceChange(access, torch.zeros(()))
            else:
                changes[unit] = PlaceChange(access, unit.of_output(outputs[unit.output]))
        return changes

    def without(
        self,
        sets: Sequence[Removal],
        images: ImageIndices | None = None,
        *,
        removed: Removal = (),
        what: str = "Removing units",
    ) -> Outcomes:
        """Return the outcomes of every image without each of the sets.

        sets: the sets of units. An empty set is the unchanged model.
        images: the indices of some images; None for all. Only outcomes of all images are stored in
            `memory`.
        removed: units that are removed in addition to each set. They are also removed for the clean
            outcomes.
        what: the title of the progress display.

        Raises NonFiniteError with the units and the image if a loss is not finite.
        """
        is_of_all_images = images is None and not removed
        means_come_from_clean_pass = is_of_all_images and self.one_batch  # see `_replay`
        bench = self
        if not means_come_from_clean_pass:
            bench = self.with_means(_different_units((*sets, removed)))
        took_pass_for_means = bench is not self
        share = self.share(images)
        parts = []
        with self.progress(what, len(sets) * len(share), "removals") as advance:
            for offset in range(0, len(share), self.size):
                name = ""
                if is_of_all_images:
                    name = f"{self.replacement}-{offset}"
                part = bench._batch(
                    share[offset : offset + self.size],
                    tuple(sets),
                    removed=removed,
                    name=name,
                    advance=advance,
                )
                parts.append(part)
        outcomes = Outcomes.join(parts, self.processes)
        passes = outcomes.forward_equivalents
        if took_pass_for_means:
            passes += 1
        notes = [outcomes.note]
        if self.by is None and self.replacement != "mean":
            notes.append(replacement_note(len(self.images), self.replacement))
        return replace(outcomes, forward_equivalents=passes, note="; ".join(filter(None, notes)))

    def _batch(
        self,
        rows: ImageIndices,
        sets: tuple[Removal, ...],
        *,
        removed: Removal,
        name: str,
        advance: Callable[[int], object],
    ) -> Outcomes:
        """Return the outcomes of some images.

        rows: the indices of the images.
        sets, removed: as in `without`.
        name: the name under which outcomes are stored, "" if they are not stored.
        advance: called with the number of sets times images that were measured.
        """
        model = self.model
        images = self.images[rows].to(model.device)
        units = _different_units((*sets, removed))
        with self._replay(rows, images, units, removed) as (replay, changes):
            labels = check_targets(self.labels[rows], replay.logits)
            memory = None
            if self.memory is not None and name:
                memory = self.memory(name, images, labels)
            clean_odds, clean_correct = odds_and_correct(replay.logits[None], labels)
            _require_finite([()], model.alias, rows, loss_of(clean_odds))
            odds = clean_odds.new_zeros(len(sets), len(rows))
            correct = clean_correct.new_zeros(odds.shape)
            cost = replay.cost
            for numbers in _by_first_layer(sets):
                replayed_sets = [sets[number] for number in numbers]
                measure = partial(
                    _measure_sets,
                    replayed_sets,
                    replay=replay,
                    changes=changes,
                    labels=labels,
                    alias=model.alias,
                    rows=rows,
                )
                if memory is None:
                    stored = measure()
                else:
                    stored = memory(replayed_sets, measure)
                odds[numbers] = stored.log_odds
                correct[numbers] = stored.correct
                cost += stored.cost
                advance(len(numbers) * len(rows))
            passes = cost / replay.forward_cost
            if self.replacement == "resample":  # the outputs of other images took a pass
                passes += 1
            return Outcomes(
                sets=sets,
                replace=self.replacement,
                labels=self.labels[rows].cpu(),
                clean_log_odds=clean_odds[0],
                clean_correct=clean_correct[0],
                log_odds=odds,
                correct=correct,
                forward_equivalents=passes,
                note=replay.note,
            )

    @contextmanager
    def _replay(
        self, rows: ImageIndices, images: Images, units: Sequence[Unit], removed: Removal
    ) -> Iterator[tuple[Replay, dict[Unit, PlaceChange]]]:
        """Yield the replay of a clean pass of these images, and the replacement of each unit.

        removed: units that are removed also for the clean pass.
        """
        if self.replacement != "mean" or self.means is not None:
            changes = self.changes(rows, units)
            removed_changes = [changes[unit] for unit in removed]
            with replaying(self.model, images, budget=self.budget, given=removed_changes) as replay:
                yield replay, changes
            return
        # These are all images (see `without`), so their clean pass gives the means. The means are
        # read in the clean pass only, which `replaying` makes when it is entered, and not in the
        # replayed passes. So the reading ends before the replay does.
        means = Means()
        with ExitStack() as stack:
            with reading(self.model, self._outputs(units), means.add):
                replay = stack.enter_context(
                    replaying(self.model, images, budget=self.budget, given=())
                )
            means.images = len(rows)
            yield replay, replace(self, means=means).changes(rows, units)


def _different_units(sets: Iterable[Removal]) -> list[Unit]:
    """Return the units of all sets without duplicates, in their order."""
    return list(dict.fromkeys(chain.from_iterable(sets)))


def _measure_sets(
    sets: Sequence[Removal],
    *,
    replay: Replay,
    changes: Mapping[Unit, PlaceChange],
    labels: Labels,
    alias: str,
    rows: ImageIndices,
) -> Stored:
    """Measure the outcomes of one batch without each of these sets.

    changes: the replacement of each unit.
    alias, rows: the model and the indices of the images, for an error.

    Raises NonFiniteError for a loss that is not finite.
    """
    cost_before = replay.cost
    changes_of_sets: list[Set] = [[changes[unit] for unit in removal] for removal in sets]
    odds, correct = odds_and_correct(replay.run_prepared(changes_of_sets), labels)
    # raises before the outcomes are stored: a resumed run measures again
    _require_finite(sets, alias, rows, loss_of(odds))
    return Stored(odds, correct, cost=replay.cost - cost_before)


def odds_and_correct(
    logits: Float[Tensor, "sets batch classes"], labels: Labels
) -> tuple[Float[Tensor, "sets batch"], Bool[Tensor, "sets batch"]]:
    """Return the log-odds of the label in nats, and True for predictions that are the label.

    Both are on the CPU, log-odds in float64.
    """
    return log_odds(logits, labels).cpu(), (logits.argmax(-1) == labels).cpu()


def _by_first_layer(sets: Sequence[Removal]) -> list[list[int]]:
    """Return the indices of sets, in one list for all sets that have the same first layer.

    Sets of one list are replayed together, and then their tensors are released.
    """
    by_layer: dict[int, list[int]] = {}
    for number, units in enumerate(sets):
        first_layer = min((unit.layer for unit in units), default=-1)
        by_layer.setdefault(first_layer, []).append(number)
    return [by_layer[layer] for layer in sorted(by_layer)]


def _require_finite(sets: Sequence[Removal], alias: str, rows: ImageIndices, loss: ByImage) -> None:
    """Raise NonFiniteError with the units and the image if a loss is not finite.

    rows: the indices of the images.
    """
    broken = (~loss.isfinite()).nonzero()
    if len(broken):
        number, image = broken[0].tolist()  # of the set, and of the image in `rows`
        message = (
            f"expected a finite loss, found {float(loss[number, image])} from {alias} on image "
            f"{int(rows[image])}"
        )
        if sets[number]:
            message += f" without {' and '.join(unit.name for unit in sets[number])}"
        raise NonFiniteError(message)
