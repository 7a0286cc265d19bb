"""Rows of the record that all kinds share: variants, trainings, comparisons and recipes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.cost.passes import saved_for_training
from vitlens.analysis.evaluation.intervals import accuracy_over_seeds, difference_over_seeds
from vitlens.commands.shared.trainings import augmentation_words
from vitlens.commands.study.kinds.choose import DETECTED
from vitlens.commands.study.kinds.kinds import Finding, Variant
from vitlens.commands.study.kinds.record import (
    RISE,
    Agreement,
    ComparisonRow,
    FindingRow,
    LevelRow,
    RecipeRow,
    TrialRow,
    ValidationRow,
    VariantRow,
    negated,
)
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.kinds.trials import Trial
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.training.finetune import trained_share
from vitlens.training.recipe import Recipe
from vitlens.uncertainty import LEVEL, holm, student_mean

Trials = Mapping[str, Sequence[Trial]]  # of each variant by its label, one for each seed
_LAST_QUARTER: Final = 0.75  # the share of the epochs after which the last quarter begins
# images in the training step whose memory is measured: batch norm needs more than one
_STEP_IMAGES: Final = 2


def variant_row(setup: Setup, variant: Variant, trials: Trials) -> VariantRow:
    """Return the accuracy, size, cost and speed of a variant; speeds are medians over seeds."""
    trials_of_variant = trials[variant.label]
    first_trial = trials_of_variant[0]
    # a training whose loss became infinite has no speed and no steps; else seeds have equal steps
    speeds = [trial.images_per_second for trial in trials_of_variant if trial.finite]
    correct = correct_predictions(trials_of_variant)
    model = setup.initial_model(variant, seed=0).to(setup.device)
    row = VariantRow(
        label=variant.label,
        words=variant.words,
        preset=variant.preset,
        line=variant.line,
        candidate=variant.candidate,
        accuracy=accuracy_over_seeds(correct, groups=image_groups(setup)),
        chance=1 / len(setup.test.classes),
        train_images=setup.count_images(variant),
        parameters=int(first_trial.parameters),
        trained=0,  # as the epochs, those of a variant that is not trained: see below
        flops=int(first_trial.flops),
        epochs=0,
        steps=max(int(trial.steps) for trial in trials_of_variant),
        images_per_second=float(np.median(speeds)) if speeds else 0.0,
        seconds=_median_seconds(trials_of_variant),
        failed=_count_failed(setup, trials_of_variant),
        training_bytes=_training_bytes(setup, model),
    )
    if variant.is_trained:
        trained, _share = trained_share(model, last=setup.count_trained_blocks(variant))
        row = replace(row, trained=trained, epochs=setup.recipe(variant).epochs)
    if variant.teacher:
        row = replace(row, before=_median_seconds(trials[variant.teacher]))
    layout = model.anatomy.layout
    if layout is not None:
        row = replace(row, tokens=layout.tokens, patch=layout.patch_size, grid=layout.grid)
    return row


def _count_failed(setup: Setup, trials: Sequence[Trial]) -> int:
    """Return how many trainings had an infinite loss or are not shown to be better than guessing.

    This is an exact one-sided binomial test of each training. A group of images counts as one
    image, because images of one group are not independent.
    """
    from scipy.stats import binomtest

    chance = 1 / len(setup.test.classes)
    groups = image_groups(setup)
    n = len(setup.test) if groups is None else len(np.unique(groups))
    failed = 0
    for trial in trials:
        correct = round(float(trial.correct.mean()) * n)
        p = binomtest(correct, n, chance, alternative="greater").pvalue
        if not trial.finite or p > LEVEL:
            failed += 1
    return failed


def _median_seconds(trials: Sequence[Trial]) -> float:
    return float(np.median([trial.seconds for trial in trials]))


def _training_bytes(setup: Setup, model: Model) -> int | None:
    """Return the memory that autograd keeps per image; None where variants do not train the same
    parts.
    """
    if setup.model is not None or setup.kind.extra == "pretraining":
        return None
    return saved_for_training(model, probe_images(model, _STEP_IMAGES)) // _STEP_IMAGES


def correct_predictions(trials: Sequence[Trial]) -> NDArray[np.bool_]:
    """Return which predictions are correct (seeds, images)."""
    return np.stack([trial.correct for trial in trials])


def image_groups(setup: Setup) -> NDArray[Any] | None:
    """Return the groups of the test images (n,), such as scenes of one digit; None if they are
    independent.
    """
    return None if setup.test.groups is None else setup.test.groups.cpu().numpy()


def validation_rows(setup: Setup, trials: Trials) -> Iterator[ValidationRow]:
    """Yield the validation accuracy of every variant after each epoch."""
    for variant in setup.variants:
        followed = _followed(trials[variant.label])
        if followed:
            epochs = followed[0].epochs  # the same for all seeds
            by_epoch = np.stack([trial.validation for trial in followed], axis=1)  # (epochs, seeds)
            for epoch, accuracies in zip(epochs, by_epoch, strict=True):
                mean = student_mean(accuracies, least=0.0, most=1.0)
                yield ValidationRow(variant.label, variant.words, int(epoch), mean)


def level_rows(setup: Setup, trials: Trials) -> Iterator[LevelRow]:
    """Yield what the last quarter of the training added to each variant."""
    for variant in setup.variants:
        ends = []
        rises = []
        for trial in _followed(trials[variant.label]):
            # the last evaluation before the last quarter, or the first of all
            before = np.flatnonzero(trial.epochs <= _LAST_QUARTER * trial.epochs[-1])
            index = before[-1] if len(before) else 0
            end = trial.validation[-1]
            ends.append(end)
            rises.append(100 * (end - trial.validation[index]))
        if rises:
            rise = student_mean(rises, unit="points", least=-100.0, most=100.0)
            accuracy = student_mean(ends, least=0.0, most=1.0)
            levelled = rise.value <= RISE
            yield LevelRow(variant.label, variant.words, accuracy, rise, levelled)


def _followed(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trainings that were followed to their end on validation images."""
    return [trial for trial in trials if len(trial.epochs) > 1]


def finding_rows(
    findings: Sequence[Finding], comparisons: Sequence[ComparisonRow]
) -> Iterator[FindingRow]:
    """Yield each result of the literature next to the comparison that tests it."""
    for finding in findings:
        row = _comparison_of_pair(comparisons, finding.label, finding.against)
        yield FindingRow(
            words=row.words,
            against_words=row.against_words,
            expects=finding.expects,
            statement=finding.statement,
            source=finding.source,
            difference=row.difference,
            p_holm=row.p_holm,
            agreement=_agreement(finding.expects, row),
            reason=finding.caveat,
        )


def _comparison_of_pair(
    comparisons: Sequence[ComparisonRow], label: str, against: str
) -> ComparisonRow:
    """Return the planned comparison of two variants, `label` minus `against`.

    If several families compare them, it is the one with the smallest p.
    """
    rows = []
    for row in comparisons:
        if row.family != "best" and {row.label, row.against} == {label, against}:
            rows.append(row if row.label == label else reversed_comparison(row))
    return min(rows, key=lambda row: 1.0 if row.p_holm is None else row.p_holm)


def reversed_comparison(row: ComparisonRow) -> ComparisonRow:
    """Return the comparison of the second variant with the first."""
    return replace(
        row,
        label=row.against,
        against=row.label,
        words=row.against_words,
        against_words=row.words,
        difference=negated(row.difference),
    )


def _agreement(expects: str, row: ComparisonRow) -> Agreement:
    """Return whether a comparison agrees with the literature.

    No difference agrees with "equal" only if a difference of DETECTED points would have been found.
    """
    is_significant = row.p_holm is not None and row.p_holm <= LEVEL
    if is_significant:
        is_as_expected = expects == "higher" and row.difference.value > 0
        return "agrees" if is_as_expected else "contradicts"
    has_power = row.detectable is not None and row.detectable <= DETECTED
    return "agrees" if expects == "equal" and has_power else "undecided"


def trial_rows(setup: Setup, trials: Trials) -> Iterator[TrialRow]:
    """Yield the result of every training."""
    for label, trials_of_variant in trials.items():
        for seed, trial in zip(setup.seeds, trials_of_variant, strict=True):
            yield TrialRow(
                label,
                seed,
                accuracy=float(trial.correct.mean()),
                seconds=float(trial.seconds),
                images_per_second=float(trial.images_per_second),
            )


@dataclass(frozen=True)
class Comparisons:
    """Variants to be compared by their predictions on the same images.

    variants: by label.
    correct: which predictions are correct, by label (seeds, images).
    groups: the groups of the images (images,); None if they are independent.
    """

    variants: Mapping[str, VariantRow]
    correct: Mapping[str, NDArray[np.bool_]]
    groups: NDArray[Any] | None = None

    def planned(
        self, pairs: Sequence[tuple[str, str]], steps: Sequence[tuple[str, str]]
    ) -> tuple[ComparisonRow, ...]:
        """Return the comparisons of all families (see `ComparisonRow`).

        pairs: labels of any two variants, the first minus the second.
        steps: labels of two variants that differ in one factor.
        """
        candidates = [label for label, row in self.variants.items() if row.candidate]
        best = max(candidates, key=lambda label: self.variants[label].accuracy.value)
        of_candidates = []
        of_shares = []
        for label, against in pairs:
            if label in candidates:
                of_candidates.append((label, against))
            elif label in self.variants:  # else there were too few images for it
                of_shares.append((label, against))
        from_best = [(label, best) for label in candidates if label != best]
        return (
            *self.family("difference", of_candidates),
            *self.family("share", of_shares),
            *self.family("step", steps),
            *self.family("best", from_best),
        )

    def family(self, name: str, pairs: Sequence[tuple[str, str]]) -> Iterator[ComparisonRow]:
        """Yield the paired differences of these variants, as one family of comparisons.

        Their p-values are corrected for their number.
        """
        differences = []
        for label, against in pairs:
            difference = difference_over_seeds(
                self.correct[label], self.correct[against], groups=self.groups
            )
            differences.append(difference)
        corrected = holm([difference.p for difference in differences])
        for pair, difference, p_holm in zip(pairs, differences, corrected, strict=True):
            label, against = pair
            first = self.variants[label]
            second = self.variants[against]
            better = first if difference.estimate.value > 0 else second
            yield ComparisonRow(
                family=name,
                label=label,
                against=against,
                words=first.words,
                against_words=second.words,
                difference=difference.estimate,
                p=difference.p,
                p_holm=p_holm,
                detectable=difference.detectable(LEVEL / len(pairs)),
                winner=better.words if p_holm <= LEVEL else None,
                images=first.train_images if _on_two_lines(first, second) else None,
            )


def _on_two_lines(first: VariantRow, second: VariantRow) -> bool:
    """Return True if two variants with the same number of images are on different lines of the
    chart over that number.
    """
    if not first.line or not second.line or first.line == second.line:
        return False
    return first.train_images == second.train_images


def recipe_rows(setup: Setup) -> Iterator[RecipeRow]:
    """Yield each recipe with the variants that share it.

    Only variants that can be chosen are listed; those with fewer images have the recipe of all
    images.
    """
    names_by_recipe: dict[Recipe, list[str]] = {}
    for variant in setup.variants:
        if variant.candidate and variant.is_trained:
            names_by_recipe.setdefault(setup.recipe(variant), []).append(variant.words)
    for recipe, names in names_by_recipe.items():
        variants = "all variants"
        if len(names_by_recipe) > 1:
            variants = "; ".join(names)
        yield RecipeRow(
            points=variants,
            optimiser=recipe.optimiser,
            learning_rate=recipe.learning_rate,
            batch_size=recipe.batch_size,
            epochs=recipe.epochs,
            augmentation=augmentation_words(recipe.numbers()),
            source=recipe.source,
        )
