"""Measure reliance by the predictions on all images after each intervention and its control."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.operations import distance
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.reliance.cues import Cue, Intervention
from vitlens.analysis.reliance.edits import disturb
from vitlens.analysis.reliance.outcomes import (
    Effect,
    Outcome,
    OutcomeName,
    correct_p_values,
    join_batches,
)
from vitlens.analysis.reliance.rows import FEWEST, LeftOutCueRow, ReliancePairRow, RelianceRow
from vitlens.analysis.reliance.views import View
from vitlens.classes import reading
from vitlens.data.draws import keys as keys_of
from vitlens.data.identity import image_numbers
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.references import resolved
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import (
    accuracy_difference,
    bootstrap_difference,
    paired_test,
    share_of,
)

Level = tuple[str, float]  # a disturbance and its level
_VISIBLE: Final = 0.5 / 255  # an image counts as changed if a pixel changes by more
_AT_ONCE: Final = 64  # images at a time: more do not fit into a processor's cache
_SEARCHED: Final = 200  # most images among which a partner of another class is sought
_WORD: Final = 0xFFFFFFFF  # keys of random draws are made from 32-bit words


@dataclass(frozen=True)
class Viewer:
    """A model with its images.

    split: the images, prepared for the model.
    labels: the labels, as indices into the classes of the data.
    precision: the precision of its passes.
    """

    model: Model
    split: Split
    labels: Labels
    precision: str = "fp32"

    def predict(self, images: Images) -> Int[Tensor, " batch"]:
        """Return the predicted classes, as indices into the classes of the data."""
        read = reading(self.model.classes, self.split.classes).read
        with torch.inference_mode(), autocast(self.model.device, self.precision):
            return read(self.model(images.to(self.model.device)).float()).argmax(-1).cpu()


@dataclass(frozen=True)
class Plan:
    """The changes of images that are measured.

    interventions: the cues with their interventions, each with a control.
    levels: levels of disturbances, without a control.
    """

    interventions: tuple[tuple[Cue, Intervention], ...]
    levels: tuple[Level, ...] = ()

    @property
    def further_levels(self) -> tuple[Level, ...]:
        """Return the levels that no intervention measures and that change something."""
        measured = set[Level]()
        for _, intervention in self.interventions:
            if intervention.disturbance:
                measured.add((intervention.disturbance, intervention.level))
        return tuple(
            level for level in self.levels if level not in measured and not _is_neutral(level)
        )

    @cached_property
    def name_of_level(self) -> dict[Level, OutcomeName]:
        """Return the name of the outcome of each level that changes something.

        A level that is also an intervention is measured once, under the intervention's name.
        """
        names: dict[Level, OutcomeName] = {}
        for cue, intervention in self.interventions:
            if intervention.disturbance:
                names[intervention.disturbance, intervention.level] = (cue.name, intervention.name)
        for kind, level in self.further_levels:
            names[kind, level] = _level_name(kind, level)
        return names

    @property
    def passes(self) -> int:
        """Return the number of forward passes for each image and model."""
        return 1 + 2 * len(self.interventions) + len(self.further_levels)


def _is_neutral(level: Level) -> bool:
    """Return True for the first level of a disturbance, which changes nothing."""
    kind, value = level
    levels = DISTURBANCES[kind].levels
    if not levels:  # the levels of tiles depend on the size; one tile changes nothing
        return value == 1.0
    return value == levels[0]


@dataclass(frozen=True)
class Measured:
    """The reliance of several models on the same images.

    Arrays are in the canonical order of the images, which depends only on their content.

    rows: the effect of each intervention on each model.
    pairs: the differences between two models.
    left_out: the cues that could not be tested.
    correct (models, n): for each level of a disturbance, True for correct predictions.
    clean (models, n): True for correct predictions without a change.
    groups (n,): the group of each image, None if images are independent.
    """

    rows: tuple[RelianceRow, ...]
    pairs: tuple[ReliancePairRow, ...]
    left_out: tuple[LeftOutCueRow, ...]
    correct: Mapping[Level, NDArray[np.bool_]]
    clean: NDArray[np.bool_]
    groups: NDArray[Any] | None


def measure_reliance(
    viewers: Sequence[Viewer],
    plan: Plan,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> Measured:
    """Measure the reliance of models on the same images.

    The content of an image decides its random numbers and its place in the canonical order. So the
    order of the images in the argument has no effect.

    advance: called with the number of finished passes over an image.
    """
    if not batch_size:
        fitting = [fitting_batch_size(viewer.model) for viewer in viewers]
        batch_size = min(_AT_ONCE, *fitting)
    run = _Run(viewers, plan, seed=seed, batch_size=batch_size)
    outcomes, clean = run.measure(advance)
    rows = list[RelianceRow]()
    left_out = list[LeftOutCueRow]()
    for cue, intervention in plan.interventions:
        if not intervention.suits(has_masks=run.has_masks):
            continue
        outcome = outcomes[cue.name, intervention.name]
        count = int(outcome.visible.sum())
        if count < FEWEST:
            left_out.append(LeftOutCueRow(cue.name, _too_few(intervention, count, run.count)))
            continue
        for index in range(len(viewers)):
            rows.append(run.row(cue, intervention, outcome, clean, index))
    rows = list(correct_p_values(rows))
    pairs = list(run.pair_rows(rows, outcomes, clean))
    return Measured(
        rows=tuple(rows),
        pairs=tuple(correct_p_values(pairs)),
        left_out=(*run.without_masks(), *left_out),
        correct={level: run.correct_at(level, outcomes, clean) for level in plan.levels},
        clean=run.is_correct(clean),
        groups=run.groups,
    )


def _too_few(intervention: Intervention, count: int, total: int) -> str:
    if total < FEWEST:
        return f"{total} images are too few: at least {FEWEST} are needed"
    return (
        f"images {intervention.change}: {count} of {total} change, and at least {FEWEST} are needed"
    )


class _Run:
    """The measurement of several models on the same images, in canonical order.

    `measure` computes the predictions; `row` and `pair_rows` make rows of them.

    viewers: the models, with their images in canonical order.
    keys (n,): the seed of each image's random numbers.
    count: the number of images.
    groups (n,): the group of each image, None if images are independent.
    """

    def __init__(
        self, viewers: Sequence[Viewer], plan: Plan, *, seed: int, batch_size: int
    ) -> None:
        first = viewers[0].split
        # the content of an image decides its number, which decides its order and its random numbers
        hashes = image_numbers(first)
        numbers = torch.from_numpy((hashes & np.uint64(_WORD)).astype(np.int64))
        order = _canonical_order(numbers, viewers[0].labels, first.groups)
        self.plan = plan
        self.seed = seed
        self.batch_size = batch_size
        self.viewers = [
            replace(viewer, split=viewer.split.pick(order), labels=viewer.labels[order])
            for viewer in viewers
        ]
        self.keys = keys_of(seed, numbers[order])
        self.count = len(order)
        self.has_masks = first.masks is not None
        groups = self.viewers[0].split.groups
        self.groups = None if groups is None else groups.cpu().numpy()

    @cached_property
    def partners(self) -> Int[Tensor, " batch"]:
        """Return the index of another image for each image.

        In a random order of the images, drawn by their keys, it is the next image of another class
        and group. If there is none, it is the next one of another group, else the next image.
        """
        labels = self.viewers[0].labels.tolist()
        groups = list(range(self.count)) if self.groups is None else self.groups.tolist()
        random_order = self.keys.argsort(stable=True).tolist()
        steps = range(1, min(self.count, _SEARCHED + 1))
        partners = torch.empty(self.count, dtype=torch.long)
        for place, image in enumerate(random_order):
            # after the last image follows the first
            following = [random_order[(place + step) % self.count] for step in steps]
            other_group = [other for other in following if groups[other] != groups[image]]
            other_class = [other for other in other_group if labels[other] != labels[image]]
            best_first = [*other_class, *other_group, *following, image]  # itself if it is the only
            partners[image] = best_first[0]
        return partners

    def measure(
        self, advance: Callable[[int], object]
    ) -> tuple[dict[OutcomeName, Outcome], Tensor]:
        """Return every outcome by name, and the predictions (models, n) without a change."""
        parts: dict[OutcomeName, list[Outcome]] = {}
        clean = list[Tensor]()
        with ExitStack() as stack:
            for viewer in self.viewers:
                stack.enter_context(evaluating(viewer.model))
                stack.enter_context(quick_passes(viewer.model))
            for indices in torch.arange(self.count).split(self.batch_size):
                views = self.views(indices)
                predictions = [
                    viewer.predict(view.images) for viewer, view in zip(self.viewers, views)
                ]
                clean.append(torch.stack(predictions))
                for name, outcome in self._outcomes(views):
                    parts.setdefault(name, []).append(outcome)
                advance(self.plan.passes * len(self.viewers) * len(indices))
        outcomes = {name: join_batches(batches) for name, batches in parts.items()}
        return outcomes, torch.cat(clean, -1)

    def views(self, indices: Tensor) -> list[View]:
        """Return the view of each model. Models with the same pixels share a view."""
        views = list[View]()
        for viewer in self.viewers:
            view = self._view(viewer.split, indices)
            for earlier in views:
                if torch.equal(earlier.images, view.images):
                    view = earlier
                    break
            views.append(view)
        return views

    def _view(self, split: Split, indices: Tensor) -> View:
        (batch,) = split.pick(indices).batches(len(indices))
        return View(
            images=batch.images,
            masks=None if split.masks is None else split.masks[indices],
            keys=self.keys[indices],
            patch=self._patch(split),
            read_partner=lambda: self._view(split, self.partners[indices]),
        )

    def _patch(self, split: Split) -> tuple[int, int]:
        """Return the height and width of a patch in pixels.

        It is that of the first model with patches, else that of a ViT of its size.
        """
        models = [viewer.model for viewer in self.viewers]
        with_patches = [model for model in models if model.anatomy.layout is not None]
        reference = with_patches[0] if with_patches else models[0]
        rows, columns = removal_grid(reference)
        return max(1, split.size[0] // rows), max(1, split.size[1] // columns)

    def _outcomes(self, views: Sequence[View]) -> Iterator[tuple[OutcomeName, Outcome]]:
        """Yield the outcomes of a batch, by name."""
        for cue, intervention in self.plan.interventions:
            if not intervention.suits(has_masks=self.has_masks):
                continue
            edit = partial(_apply_intervention, intervention=intervention)
            yield (cue.name, intervention.name), self._outcome(views, edit)
        for kind, level in self.plan.further_levels:
            edit_level = partial(_apply_disturbance, kind=kind, level=level)
            yield _level_name(kind, level), self._outcome(views, edit_level)

    def _outcome(
        self, views: Sequence[View], edit: Callable[[View], tuple[Images, ...]]
    ) -> Outcome:
        """Return the outcome of an edit of a batch.

        views: the view of each model.
        edit: returns the changed images, and for interventions their control.
        """
        edited: dict[int, tuple[Images, ...]] = {}  # by view, so that a shared one is edited once
        predictions = list[Tensor]()
        for viewer, view in zip(self.viewers, views):
            if id(view) not in edited:
                edited[id(view)] = edit(view)
            results = [viewer.predict(images) for images in edited[id(view)]]
            predictions.append(torch.stack(results))
        # the size and the visibility of the change on the pixels of the first model stand for all
        before = views[0].images
        changed_and_control = edited[id(views[0])]
        size = torch.stack([distance(before, images) for images in changed_and_control])
        changed = changed_and_control[0]
        visible = (changed - before).abs().flatten(1).amax(1) > _VISIBLE
        return Outcome(torch.stack(predictions), size=size.cpu(), visible=visible.cpu())

    def is_correct(self, predictions: Tensor) -> NDArray[np.bool_]:
        """Return True for predictions (models, n) that are equal to the labels of the model."""
        labels = torch.stack([viewer.labels for viewer in self.viewers])
        correct: NDArray[np.bool_] = (predictions == labels).numpy()
        return correct

    def correct_at(
        self, level: Level, outcomes: Mapping[OutcomeName, Outcome], clean: Tensor
    ) -> NDArray[np.bool_]:
        """Return True for images that each model predicts correctly at a level, (models, n)."""
        if _is_neutral(level):
            return self.is_correct(clean)
        name = self.plan.name_of_level[level]
        after_change = outcomes[name].predictions[:, 0]  # index 1 is after the control
        return self.is_correct(after_change)

    def row(
        self, cue: Cue, intervention: Intervention, outcome: Outcome, clean: Tensor, index: int
    ) -> RelianceRow:
        """Return the row of one model, over the images that the intervention changes."""
        effect = self._effect(outcome, clean, index)
        size, control_size = outcome.size[:, outcome.visible].double().mean(1).tolist()
        groups = effect.groups
        return RelianceRow(
            model=self.viewers[index].model.alias,
            cue=cue.name,
            intervention=intervention.name,
            n=len(effect.correct_before),
            unchanged=self.count - len(effect.correct_before),
            size=size,
            control_size=control_size,
            changed_by=share_of(effect.moved, groups=groups),
            changed_by_control=share_of(effect.moved_by_control, groups=groups),
            changed=accuracy_difference(
                effect.moved, effect.moved_by_control, groups=groups, seed=self.seed
            ),
            lost=accuracy_difference(
                effect.correct_after_control, effect.correct_after, groups=groups, seed=self.seed
            ),
            gained=accuracy_difference(
                effect.correct_after, effect.correct_before, groups=groups, seed=self.seed
            ),
            errors=int((~effect.correct_before).sum()),
            fixed=int((effect.correct_after & ~effect.correct_before).sum()),
            broken=int((effect.correct_before & ~effect.correct_after).sum()),
            control_fixed=int((effect.correct_after_control & ~effect.correct_before).sum()),
            control_broken=int((effect.correct_before & ~effect.correct_after_control).sum()),
            p=paired_test(effect.moved, effect.moved_by_control, groups=groups),
            p_lost=paired_test(effect.correct_after_control, effect.correct_after, groups=groups),
            p_gained=paired_test(effect.correct_after, effect.correct_before, groups=groups),
        )

    def _effect(self, outcome: Outcome, clean: Tensor, index: int) -> Effect:
        """Return the effect of an intervention on the predictions of one model."""
        return Effect(
            outcome.predictions[index],
            clean[index],
            self.viewers[index].labels,
            visible=outcome.visible,
            groups=self.groups,
        )

    def pair_rows(
        self,
        rows: Sequence[RelianceRow],
        outcomes: Mapping[OutcomeName, Outcome],
        clean: Tensor,
    ) -> Iterator[ReliancePairRow]:
        """Yield the differences of all pairs of models under every judged intervention."""
        aliases = [viewer.model.alias for viewer in self.viewers]
        rows_by_name: dict[OutcomeName, list[RelianceRow]] = {}
        for row in rows:
            rows_by_name.setdefault((row.cue, row.intervention), []).append(row)
        for (cue, intervention), judged in rows_by_name.items():
            relying = [row.model for row in judged if row.is_relied_on]
            is_matched = judged[0].is_matched  # the same for all models
            outcome = outcomes[cue, intervention]
            effects = {}
            for index, alias in enumerate(aliases):
                effects[alias] = self._effect(outcome, clean, index)
            for first, second in combinations(aliases, 2):
                a = effects[first]
                b = effects[second]
                groups = a.groups  # the same for both models
                yield ReliancePairRow(
                    cue=cue,
                    intervention=intervention,
                    first=first,
                    second=second,
                    changed=self._difference(a.beyond, b.beyond, groups),
                    lost=self._difference(a.accuracy_lost, b.accuracy_lost, groups),
                    p=paired_test(a.beyond, b.beyond, groups=groups),
                    p_lost=paired_test(a.accuracy_lost, b.accuracy_lost, groups=groups),
                    is_matched=is_matched,
                    changed_by=100 * float(a.moved.mean() - b.moved.mean()),
                    relying=tuple(model for model in relying if model in (first, second)),
                    accuracy=accuracy_difference(
                        a.correct_after, b.correct_after, groups=groups, seed=self.seed
                    ),
                )

    def _difference(
        self, first: NDArray[Any], second: NDArray[Any], groups: NDArray[Any] | None
    ) -> Any:
        """Return the mean difference in points; values are from -1 to 1."""
        return bootstrap_difference(
            100.0 * first, 100.0 * second, groups=groups, seed=self.seed, unit="points", most=200.0
        )

    def without_masks(self) -> Iterator[LeftOutCueRow]:
        """Yield the cues with interventions that all need masks, if there are no masks."""
        if self.has_masks:
            return
        names = dict.fromkeys(cue.name for cue, _ in self.plan.interventions)  # each once
        possible = set[str]()
        for cue, intervention in self.plan.interventions:
            if intervention.suits(has_masks=False):
                possible.add(cue.name)
        for name in names:
            if name not in possible:
                yield LeftOutCueRow(name, "the objects' masks are not known")


@dataclass(frozen=True)
class ChangedImages:
    """Images before and after an intervention and its control, on the CPU.

    model, cue, intervention: the alias of the model, and the names of the cue and the intervention.
    images, changed, control: the images before, after the intervention, and after the control.
    region: True for pixels that the intervention may change.
    labels: the labels of the images.
    groups (n,): the group of each image, None if images are independent.
    """

    model: str
    cue: str
    intervention: str
    images: Images
    changed: Images
    control: Images
    region: Bool[Tensor, "n height width"]
    labels: Labels
    groups: Tensor | None = None

    def first(self, count: int) -> "ChangedImages":
        """Return the first images."""
        return replace(
            self,
            images=self.images[:count],
            changed=self.changed[:count],
            control=self.control[:count],
            region=self.region[:count],
            labels=self.labels[:count],
            groups=None if self.groups is None else self.groups[:count],
        )


def changed_images(viewer: Viewer, row: RelianceRow, *, limit: int, seed: int = 0) -> ChangedImages:
    """Return at most `limit` images as `measure_reliance` changed them for a row."""
    intervention = row.of_intervention
    no_plan = Plan(interventions=())  # only the views of the run are used
    run = _Run([viewer], no_plan, seed=seed, batch_size=_AT_ONCE)
    images = list[Tensor]()
    after_intervention = list[Tensor]()
    after_control = list[Tensor]()
    regions = list[Tensor]()
    chosen = torch.arange(min(run.count, limit))
    for indices in chosen.split(_AT_ONCE):
        (view,) = run.views(indices)
        changed, control = _apply_intervention(view, intervention)
        images.append(view.images)
        after_intervention.append(changed)
        after_control.append(control)
        regions.append(view.region(intervention.region)[:, 0] > 0)
    groups = run.viewers[0].split.groups
    return ChangedImages(
        model=row.model,
        cue=row.cue,
        intervention=row.intervention,
        images=torch.cat(images).cpu(),
        changed=torch.cat(after_intervention).cpu(),
        control=torch.cat(after_control).cpu(),
        region=torch.cat(regions).cpu(),
        labels=run.viewers[0].labels[chosen],
        groups=None if groups is None else groups.cpu()[chosen],
    )


def _canonical_order(
    hashes: Tensor, labels: Labels, groups: Tensor | None
) -> Int[Tensor, " batch"]:
    """Return the order of images by the hash of their content, then by label and group."""
    sources = np.zeros(len(hashes)) if groups is None else groups.cpu().numpy()
    # lexsort takes the key that decides first as the last one
    return torch.from_numpy(np.lexsort((sources, labels.numpy(), hashes.numpy())))


def _level_name(kind: str, level: float) -> OutcomeName:
    return kind, f"{level:g}"


def _apply_disturbance(view: View, kind: str, level: float) -> tuple[Images]:
    return (disturb(view, kind, level),)


def _apply_intervention(view: View, intervention: Intervention) -> tuple[Images, Images]:
    """Return the images after an intervention, and after its control."""
    if intervention.disturbance:
        changed = disturb(view, intervention.disturbance, intervention.level)
    else:
        changed = resolved(intervention.edit)(view, intervention.region, intervention.level)
    control = resolved(intervention.match)(view, changed, intervention.region, intervention.level)
    return changed, control
