"""Bench: labelled images on which units of a model are removed, and every image's loss and
prediction without them.

A head's output before the output projection is replaced by its mean over the data at each token, by
zero, or by another image's. Everything else in this folder is a function of the `Outcomes` that
`Bench.without` gives. Each set of units takes one replay from its first layer on.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.attention.chain import check_targets
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.log_odds import log_odds, loss_of
from vitlens.devices import evaluating
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError, argument
from vitlens.lens.capture import Means, capture
from vitlens.lens.change import PlaceChange, Set, reading
from vitlens.lens.intervene import another_image
from vitlens.lens.place_patterns import resolve_places
from vitlens.lens.places import Access, accesses
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.lens.trace import blocks, layers
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.names import FEWEST_FOR_MEAN, REPLACEMENTS, UNIT_KINDS, Replacement, UnitKind
from vitlens.pixels import Parts
from vitlens.processes import Processes
from vitlens.shapes import Images, Labels

ALONE = Processes(0, 1, torch.device("cpu"))

ByImage = Float[Tensor, "sets images"]
Some = Int[Tensor, " some"]  # indices of images


@dataclass(frozen=True)
class Unit:
    """A head, an MLP or a whole block. layer, head: from 0; head: None unless it is one."""

    kind: UnitKind
    layer: int
    head: int | None = None

    @property
    def name(self) -> str:
        """Return its name in metrics: "head/3/7", "mlp/3", "block/3"; from 0."""
        return "/".join(
            str(part) for part in (self.kind, self.layer, self.head) if part is not None
        )

    @property
    def place(self) -> str:
        """Return its place: "blocks.3.head.7", "blocks.3.mlp", "blocks.3"."""
        return (
            f"blocks.{self.layer}"
            + {"head": f".head.{self.head}", "mlp": ".mlp", "block": ""}[self.kind]
        )


Removal: TypeAlias = tuple[Unit, ...]  # units that are removed at once; () is the unchanged model


def units_of(model: Model, *, kinds: Sequence[UnitKind] = UNIT_KINDS) -> Removal:
    """Return all heads, MLPs and blocks that can be removed, by kind, then by layer.

    Heads of a layer without an output projection that reads their concatenation are left out.
    Raises UnsupportedError for a model without attention (a CNN) or without such units.
    """
    for kind in kinds:
        if kind not in UNIT_KINDS:
            raise UnknownNameError("kind of unit", kind, UNIT_KINDS)
    known = blocks(model)
    places = accesses(model)
    own = {
        layer.unit: layer.index for layer in reversed(known)
    }  # a block with two attentions is one block
    whole = [layer for layer in known if own[layer.unit] == layer.index]
    every = [
        *(Unit("head", layer.index, head) for layer in known for head in range(layer.heads)),
        *(Unit("mlp", layer.index) for layer in whole),
        *(
            Unit("block", layer.index)
            for layer in whole
            if layer.removable and layer.unit != layer.attention
        ),
    ]
    listed = [unit for unit in every if unit.place in places or f"{unit.place}.residual" in places]
    units = tuple(unit for kind in kinds for unit in listed if unit.kind == kind)
    if not units:
        raise UnsupportedError(
            f"expected {' or '.join(kinds)} to remove from {model.alias}, found none that can be "
            "replaced separately"
        )
    return units


@requirement("heads")
def require_heads(model: Model) -> None:
    """Raise UnsupportedError for a model without a head whose output can be replaced separately."""
    if not any(layer.head_dim for layer in layers(model)):
        reasons = (part.unread for part in model.anatomy.attention or () if part.unread)
        raise UnsupportedError(
            "expected heads whose outputs are concatenated before an output projection in "
            f"{model.alias}, found none: {next(reasons, 'no head can be replaced separately')}"
        )


@dataclass(frozen=True)
class Outcomes:
    """Every image's loss and prediction without sets of units.

    sets: what was removed; replace: what replaced its output; labels (n,): the true classes, as
    columns of the logits; clean_log_odds (n,): of the label in the unchanged model, nats;
    clean_correct (n,): whether its prediction is the label; log_odds, correct (sets, n): the same
    without each; forward_equivalents: full forward passes spent an image, a mean; note: a remark
    for a report, or "". All on the CPU, log-odds in float64: the losses follow from them.
    """

    sets: tuple[Removal, ...]
    replace: Replacement
    labels: Labels
    clean_log_odds: Float[Tensor, " images"]
    clean_correct: Bool[Tensor, " images"]
    log_odds: ByImage
    correct: Bool[Tensor, "sets images"]
    forward_equivalents: float
    note: str = ""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    @property
    def units(self) -> Removal:
        """Return the units of sets of one."""
        return tuple(unit for (unit,) in self.sets)

    @property
    def clean_loss(self) -> Float[Tensor, " images"]:
        """Cross-entropy of each image in the unchanged model, nats."""
        return loss_of(self.clean_log_odds)

    @property
    def loss(self) -> ByImage:
        """Cross-entropy of each image without each set, nats."""
        return loss_of(self.log_odds)

    @property
    def delta_loss(self) -> ByImage:
        """Change of each image's cross-entropy, nats; positive: the units help."""
        return self.loss - self.clean_loss

    @property
    def delta_log_odds(self) -> ByImage:
        """Return the fall of the log-odds of each image's label, nats; positive: the units help."""
        fall = self.clean_log_odds - self.log_odds
        return torch.where(
            self.clean_log_odds == self.log_odds, 0.0, fall
        )  # of a single class both are infinite

    @property
    def delta_accuracy(self) -> ByImage:
        """Accuracy lost on each image, points: 100 where removal makes the prediction wrong, -100
        where right.
        """
        return 100 * (self.clean_correct.double() - self.correct.double())

    def rows(self, index: list[int]) -> "Outcomes":
        """Return the outcomes of some of the sets."""
        sets = tuple(self.sets[row] for row in index)
        return replace(self, sets=sets, log_odds=self.log_odds[index], correct=self.correct[index])

    @classmethod
    def join(cls, parts: "Sequence[Outcomes]", processes: Processes) -> "Outcomes":
        """Return the outcomes of the same sets on all batches of all processes, in the order of the
        images; a collective.
        """

        def whole(name: str) -> Any:
            own = torch.cat([getattr(part, name).movedim(-1, 0) for part in parts])  # images first
            return processes.gathered(own).movedim(0, -1)

        names = ("labels", "clean_log_odds", "clean_correct", "log_odds", "correct")
        spent = [sum(part.forward_equivalents * len(part) for part in parts), sum(map(len, parts))]
        passes, images = processes.total(torch.tensor(spent, dtype=torch.float64)).tolist()
        return replace(
            parts[0],
            **{name: whole(name) for name in names},
            forward_equivalents=passes / images,
            note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        )


class Stored(NamedTuple):
    """The outcomes of sets of units on one batch; cost: the multiply-adds of linear layers for
    measuring them.
    """

    log_odds: ByImage
    correct: Bool[Tensor, "sets images"]
    cost: int


# gives the stored outcomes of sets on one batch, or measures and stores them, so that an
# interrupted run resumes
Memory: TypeAlias = Callable[[Sequence[Removal], Callable[[], Stored]], Stored]


def replacement_for(images: int, requested: Replacement | None) -> Replacement:
    """Return the replacement for this many images; requested: None is the mean, or for few images
    resampling or zero.

    The mean over few images is close to each image's own output, so removing a unit would seem to
    have no effect: with fewer than FEWEST_FOR_MEAN images the default is resampling, with a single
    image zero. Raises InputError for "mean" or "resample" on too few images.
    """
    fallback: Replacement = "resample" if images > 1 else "zero"
    if requested is None:
        return "mean" if images >= FEWEST_FOR_MEAN else fallback
    if requested not in REPLACEMENTS:
        raise UnknownNameError("replacement", requested, REPLACEMENTS)
    if requested == "mean" and images < FEWEST_FOR_MEAN:
        raise InputError(
            f"expected at least {FEWEST_FOR_MEAN} images to replace by their mean, found {images}; "
            "give more, or "
            f"{argument('replace', fallback)}"
        )
    if requested == "resample" and images < 2:
        raise InputError(
            f"expected at least 2 images to resample from, found {images}; try "
            f"{argument('replace', 'zero')}"
        )
    return requested


def replacement_note(images: int, by: Replacement) -> str:
    """Return the remark for a report where the default replacement was not the mean."""
    instead = (
        "another image's output" if by == "resample" else "zero, which overstates what they do"
    )
    many = f"{images} images are" if images != 1 else "1 image is"
    return (
        f"{many} too few for a mean over the data (at least {FEWEST_FOR_MEAN}), so units are "
        f"replaced by {instead}"
    )


def silent(*_: object) -> AbstractContextManager[Callable[[int], object]]:
    """Return the progress of a loop, shown nowhere."""
    return nullcontext(lambda _done: None)


@dataclass(frozen=True)
class Bench:
    """A model and labelled images, and how the outputs of removed units are replaced.

    labels (n,): columns of the model's logits; by: "mean" over the images, "zero", or "resample",
    the output for another of the images (None: the mean, with 2 to 7 images resampling, with one
    zero; the outcomes' note says so); groups (n,): of images that share a source; images and labels
    are those of all processes, of which each measures its share; budget: bytes that a replay may
    store; means: known mean outputs (None: measured where they are needed); progress: of a loop
    (words, total, unit); memory: that of a batch, from its name, images and labels. Raises
    InputError for too few images.
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
        """Return what replaces a unit's output."""
        return replacement_for(len(self.images), self.by)

    @property
    def size(self) -> int:
        """Images at a time."""
        return self.batch_size or fitting_batch_size(self.model)

    @property
    def one_batch(self) -> bool:
        """Return True if one batch holds all images, so that its clean pass gives their means."""
        return self.processes.count == 1 and len(self.images) <= self.size

    def share(self, images: Some | None = None) -> Some:
        """Return the part of these images (None: of all) that this process measures."""
        every = torch.arange(len(self.images)) if images is None else images
        return every[self.processes.index :: self.processes.count]

    def with_means(self, units: Iterable[Unit]) -> "Bench":
        """Return this bench with the mean outputs of units over the images of all processes.

        The passes store nothing else. The bench itself is returned where means are known, or
        replace nothing.
        """
        if self.means is not None or self.replacement != "mean":
            return self
        found = Means()
        total = self.processes.total
        with (
            self.progress("Mean outputs", len(self.images)) as advance,
            evaluating(self.model),
            torch.no_grad(),
            reading(self.model, self._outputs(units), found.add),
        ):
            for rows in self.share().split(self.size):
                self.model(self.images[rows].to(self.model.device))
                advance(len(rows) * self.processes.count)
        found.images, found.sums = (
            len(self.images),
            {place: total(found.sums[place]) for place in sorted(found.sums)},
        )
        return replace(self, means=found)

    def _outputs(self, units: Iterable[Unit]) -> tuple[Access, ...]:
        """Return the places of the outputs of heads and MLPs, those of all heads of a layer
        together.
        """
        inner = (unit for unit in units if unit.kind != "block")
        return resolve_places(
            self.model,
            [f"blocks.{unit.layer}.{'mlp' if unit.head is None else 'heads'}" for unit in inner],
        )

    def changes(self, rows: Some, units: Collection[Unit]) -> dict[Unit, PlaceChange]:
        """Return what is put in the place of each unit on some images; means are known where they
        are needed.
        """
        tensors: dict[str, Tensor] = {}
        if self.replacement == "resample":  # by another of all images, whatever the batches
            others = self.images[another_image(len(self.images), self.seed)[rows]]
            tensors = dict(
                capture(self.model, others, [each.name for each in self._outputs(units)])
            )
        elif self.replacement == "mean" and self.means is not None:
            tensors = {each.name: self.means.of(each.name) for each in self._outputs(units)}
        found = {}
        for unit, access in zip(units, resolve_places(self.model, [unit.place for unit in units])):
            if unit.kind == "block":
                found[unit] = PlaceChange(access)
            elif self.replacement == "zero":
                found[unit] = PlaceChange(access, torch.zeros(()))
            elif unit.head is None:
                found[unit] = PlaceChange(access, tensors[unit.place])
            else:
                found[unit] = PlaceChange(
                    access, tensors[f"blocks.{unit.layer}.heads"].select(-3, unit.head)
                )
        return found

    def without(
        self,
        sets: Sequence[Removal],
        images: Some | None = None,
        *,
        given: Removal = (),
        what: str = "Removing units",
    ) -> Outcomes:
        """Return the outcomes of every image (or of some) without each of the sets; an empty set is
        the unchanged model.

        Of all images they are stored in `memory`. given: units that are removed from the model
        before, also for its clean pass; what: the title of the progress. Raises NonFiniteError
        naming units and image.
        """
        own_means = self.one_batch and images is None and not given
        every = dict.fromkeys(unit for each in (*sets, given) for unit in each)
        bench = self if own_means else self.with_means(every)
        own = self.share(images)
        parts = []
        with self.progress(what, len(sets) * len(own), "removals") as advance:
            for offset in range(0, len(own), self.size):
                rows = own[offset : offset + self.size]
                name = "" if given or images is not None else f"{self.replacement}-{offset}"
                parts.append(bench._batch(rows, tuple(sets), given, name, advance))
        found = Outcomes.join(parts, self.processes)
        passes = found.forward_equivalents + (bench is not self)  # a pass for the means
        default = self.by is None and self.replacement != "mean"
        note = replacement_note(len(self.images), self.replacement) if default else ""
        return replace(
            found, forward_equivalents=passes, note="; ".join(filter(None, (found.note, note)))
        )

    def _batch(
        self,
        rows: Some,
        sets: tuple[Removal, ...],
        given: Removal,
        name: str,
        advance: Callable[[int], object],
    ) -> Outcomes:
        images = self.images[rows].to(self.model.device)
        model = self.model
        units = list(dict.fromkeys(unit for each in (*sets, given) for unit in each))
        averaged = Means()
        own_means = self.replacement == "mean" and self.means is None
        changes = {} if own_means else self.changes(rows, units)
        with ExitStack() as stack:
            with reading(model, self._outputs(units) if own_means else (), averaged.add):
                before = [changes[unit] for unit in given]
                replay = stack.enter_context(
                    replaying(model, images, given=before, budget=self.budget)
                )
            if own_means:
                averaged.images = len(rows)
                changes = replace(self, means=averaged).changes(rows, units)
            truth = check_targets(self.labels[rows], replay.logits)
            memory = self.memory(name, images, truth) if self.memory is not None and name else None
            clean_odds, clean_correct = odds_and_correct(replay.logits[None], truth)
            _require_finite([()], model.alias, rows, loss_of(clean_odds))
            odds = clean_odds.new_zeros(len(sets), len(rows))
            correct = clean_correct.new_zeros(odds.shape)
            spent = replay.cost
            for index in _by_first_layer(sets):
                chosen = [sets[row] for row in index]
                found = [[changes[unit] for unit in each] for each in chosen]
                measure = partial(
                    _measured,
                    replay,
                    found,
                    truth,
                    partial(_require_finite, chosen, model.alias, rows),
                )
                outcomes = measure() if memory is None else memory(chosen, measure)
                odds[index] = outcomes.log_odds
                correct[index] = outcomes.correct
                spent += outcomes.cost
                advance(len(index) * len(rows))
            passes = spent / replay.forward_cost + (
                self.replacement == "resample"
            )  # the other images' pass
            labels = self.labels[rows].cpu()
            note = replay.note
        return Outcomes(
            sets,
            self.replacement,
            labels,
            clean_odds[0],
            clean_correct[0],
            odds,
            correct,
            passes,
            note,
        )


def _measured(
    replay: Replay, removed: Sequence[Set], labels: Labels, require: Callable[[ByImage], None]
) -> Stored:
    before = replay.cost
    odds, correct = odds_and_correct(replay.run_prepared(removed), labels)
    require(loss_of(odds))  # before it is stored: a resumed run measures again
    return Stored(odds, correct, replay.cost - before)


def odds_and_correct(
    logits: Float[Tensor, "sets batch classes"], labels: Labels
) -> tuple[Float[Tensor, "sets batch"], Bool[Tensor, "sets batch"]]:
    """Return the log-odds of the label in nats, float64, and whether it is the prediction; both on
    the CPU.
    """
    return log_odds(logits, labels).cpu(), (logits.argmax(-1) == labels).cpu()


def _by_first_layer(sets: Sequence[Removal]) -> list[list[int]]:
    """Rows of sets by the layer of their first unit: these are replayed together, then their
    tensors are released.
    """
    rows: dict[int, list[int]] = {}
    for row, each in enumerate(sets):
        rows.setdefault(min((unit.layer for unit in each), default=-1), []).append(row)
    return [rows[layer] for layer in sorted(rows)]


def _require_finite(sets: Sequence[Removal], alias: str, rows: Some, loss: ByImage) -> None:
    broken = (~loss.isfinite()).nonzero()
    if len(broken):
        row, image = broken[0].tolist()
        without = " and ".join(unit.name for unit in sets[row])
        raise NonFiniteError(
            f"expected a finite loss, found {float(loss[row, image])} from {alias} on image "
            f"{int(rows[image])}" + (f" without {without}" if without else "")
        )
