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
_LAST_QUARTER: Final = 0.75  # of the epochs, after which it begins
# images in the training step whose memory is measured: batch norm needs more than one
_STEP: Final = 2


def variant_row(setup: Setup, variant: Variant, trials: Trials) -> VariantRow:
    """Return the accuracy, size, cost and speed of a variant; speeds are medians over seeds."""
    trials_of_variant = trials[variant.label]
    first = trials_of_variant[0]
    model = setup.begin(variant, seed=0).to(setup.device)
    row = VariantRow(
        label=variant.label,
        words=variant.words,
        preset=variant.preset,
        line=variant.line,
        candidate=variant.candidate,
        accuracy=accuracy_over_seeds(
            correct_predictions(trials_of_variant), groups=image_groups(setup)
        ),
        chance=1 / len(setup.test.classes),
        train_images=setup.count_images(variant),
        parameters=int(first.parameters),
        trained=0,
        flops=int(first.flops),
        epochs=0,
        steps=int(first.steps),
        images_per_second=float(
            np.median([trial.images_per_second for trial in trials_of_variant])
        ),
        seconds=_median_seconds(trials_of_variant),
        failed=_count_failed(setup, trials_of_variant),
        training_bytes=_training_bytes(setup, model),
    )
    if variant.is_trained:
        trained, _ = trained_share(model, last=setup.trained_last(variant))
        row = replace(row, trained=trained, epochs=setup.recipe(variant).epochs)
    if variant.teacher:
        row = replace(row, before=_median_seconds(trials[variant.teacher]))
    layout = model.anatomy.layout
    if layout is not None:
        row = replace(row, tokens=layout.tokens, patch=layout.patch_size, grid=layout.grid)
    return row


def _count_failed(setup: Setup, trials: Sequence[Trial]) -> int:
    """Return how many trainings had an infinite loss or are not shown to be better than guessing.

    This is an exact one-sided binomial test of each training, over groups of images as one image
    each.
    """
    from scipy.stats import binomtest

    chance = 1 / len(setup.test.classes)
    groups = image_groups(setup)
    failed = 0
    for trial in trials:
        n = len(trial.correct) if groups is None else len(np.unique(groups))
        right = round(float(trial.correct.mean()) * n)
        p = binomtest(right, n, chance, alternative="greater").pvalue
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
    return saved_for_training(model, probe_images(model, _STEP)) // _STEP


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
            accuracies = np.stack([trial.validation for trial in followed])
            for epoch, values in zip(followed[0].epochs, accuracies.T, strict=True):
                mean = student_mean(values, least=0.0, most=1.0)
                yield ValidationRow(variant.label, variant.words, int(epoch), mean)


def level_rows(setup: Setup, trials: Trials) -> Iterator[LevelRow]:
    """Yield what the last quarter of the training added to each variant."""
    for variant in setup.variants:
        ends = []
        rises = []
        for trial in _followed(trials[variant.label]):
            before = np.searchsorted(trial.epochs, _LAST_QUARTER * trial.epochs[-1], "right") - 1
            ends.append(trial.validation[-1])
            rises.append(100 * (trial.validation[-1] - trial.validation[max(before, 0)]))
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
    """Return the planned comparison of two variants with the smallest p, first minus second."""
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
    if is_significant and expects == "equal":
        return "contradicts"
    if is_significant:
        return "agrees" if row.difference.value > 0 else "contradicts"
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

    variants, correct: by label; correct (seeds, images). groups: of the images, or None.
    """

    variants: Mapping[str, VariantRow]
    correct: Mapping[str, NDArray[np.bool_]]
    groups: NDArray[Any] | None = None

    def planned(
        self, pairs: Sequence[tuple[str, str]], steps: Sequence[tuple[str, str]]
    ) -> tuple[ComparisonRow, ...]:
        """Return the comparisons of all families; pairs of labels: without and with one factor
        between them.
        """
        candidates = [label for label, row in self.variants.items() if row.candidate]
        best = max(candidates, key=lambda label: self.variants[label].accuracy.value)
        pairs = [pair for pair in pairs if pair[0] in self.variants]
        return (
            *self.family("difference", [pair for pair in pairs if pair[0] in candidates]),
            *self.family("share", [pair for pair in pairs if pair[0] not in candidates]),
            *self.family("step", steps),
            *self.family("best", [(label, best) for label in candidates if label != best]),
        )

    def family(self, name: str, pairs: Sequence[tuple[str, str]]) -> Iterator[ComparisonRow]:
        """Yield the paired differences of these variants; p-values are corrected for their
        number."""
        differences = []
        for label, other in pairs:
            differences.append(
                difference_over_seeds(self.correct[label], self.correct[other], groups=self.groups)
            )
        corrected = holm([difference.p for difference in differences])
        for (label, other), difference, p_holm in zip(pairs, differences, corrected, strict=True):
            variant = self.variants[label]
            against = self.variants[other]
            better = variant if difference.estimate.value > 0 else against
            yield ComparisonRow(
                family=name,
                label=label,
                against=other,
                words=variant.words,
                against_words=against.words,
                difference=difference.estimate,
                p=difference.p,
                p_holm=p_holm,
                detectable=difference.detectable(LEVEL / len(pairs)),
                winner=better.words if p_holm <= LEVEL else None,
                images=variant.train_images if _on_two_lines(variant, against) else None,
            )


def _on_two_lines(variant: VariantRow, against: VariantRow) -> bool:
    """Return True if two variants with the same number of images are on different lines of the
    chart.
    """
    if not variant.line or not against.line or variant.line == against.line:
        return False
    return variant.train_images == against.train_images


def recipe_rows(setup: Setup) -> Iterator[RecipeRow]:
    """Yield each recipe with the variants that share it; variants with fewer images have those of
    all images.
    """
    shared: dict[Recipe, list[str]] = {}
    for variant in setup.variants:
        if variant.candidate and variant.is_trained:
            shared.setdefault(setup.recipe(variant), []).append(variant.words)
    for recipe, names in shared.items():
        sharing = "all variants"
        if len(shared) > 1:
            sharing = "; ".join(names)
        yield RecipeRow(
            points=sharing,
            optimiser=recipe.optimiser,
            learning_rate=recipe.learning_rate,
            batch_size=recipe.batch_size,
            epochs=recipe.epochs,
            augmentation=augmentation_words(recipe.numbers()),
            source=recipe.source,
        )
