"""The record of `vitlens attack`: its tables and arrays from what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.analysis.failures.operations import Corrupted
from vitlens.attacks.registry import ATTACKS, Attack, NormName
from vitlens.attacks.robustness import transfers
from vitlens.commands.attack.epsilon import epsilon_words, scale_of, typed_epsilon
from vitlens.commands.attack.inside import ChangesInside
from vitlens.commands.attack.record import (
    JUDGED,
    WORST_CASE,
    WORST_TITLE,
    AdversarialArrays,
    AttackCurveRow,
    AttackedArrays,
    AttackedModelRow,
    AttackExampleArrays,
    AttackRecord,
    AttackRow,
    BlockDistanceRow,
    CorruptionPairRow,
    CorruptionRow,
    MapAgreementRow,
    RobustPairRow,
    TransferRow,
    strongest,
)
from vitlens.commands.attack.sample import AttackSample
from vitlens.commands.attack.survivors import Survivors, survivors_rows
from vitlens.commands.attack.sweep import Victim
from vitlens.commands.shared.comparison import PairRow, comparison_rows
from vitlens.uncertainty import Estimate

# the aliases of two models, then which images each of them classifies correctly, (images,);
# `comparison_rows` takes these
Comparison = tuple[str, str, NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class Measurements:
    """All measurements of a run, by model.

    inside: None for a model without images that fool it.
    corrupted: empty without --corruptions.
    survivors: empty if no attack looks weak.
    baseline: the model that corruption errors are relative to.
    """

    victims: Sequence[Victim]
    sample: AttackSample
    inside: Sequence[ChangesInside | None]
    corrupted: Sequence[Corrupted]
    survivors: Sequence[Survivors]
    baseline: str


def record_of(measurements: Measurements) -> AttackRecord:
    """Return the record of a run, before the self-checks."""
    victims = measurements.victims
    sample = measurements.sample
    survivors = measurements.survivors
    seed = victims[0].run.run_options.seed
    curves = _curve_rows(victims, survivors)
    agreements: list[MapAgreementRow] = []
    blocks: list[BlockDistanceRow] = []
    examples: dict[str, AttackExampleArrays] = {}
    for victim, changes in zip(victims, measurements.inside):
        if changes is not None:
            agreements += changes.agreements
            blocks += changes.blocks
            examples[victim.model.alias] = changes.examples
    adversarial: dict[str, AdversarialArrays] = {}
    if victims[0].run.options.save_images:
        adversarial = _adversarial_arrays(victims, sample)
    return AttackRecord(
        overall=tuple(_model_rows(measurements, curves)),
        curves=curves,
        attacks=tuple(_attack_rows(victims)),
        pairs=tuple(_pair_rows(victims, survivors)),
        survivors=survivors_rows(victims, survivors),
        corruption_pairs=tuple(_corruption_pair_rows(measurements.corrupted, seed)),
        transfer=tuple(_transfer_rows(victims, sample)),
        agreements=tuple(agreements),
        blocks=tuple(blocks),
        corruptions=tuple(_corruption_rows(measurements.corrupted)),
        attacked={victim.model.alias: _outcome_arrays(victim) for victim in victims},
        adversarial=adversarial,
        examples=examples,
    )


def title_of(entry: Attack) -> str:
    """Return an attack with its norm, in a few words: "PGD L∞", "C&W L2"."""
    name = entry.title.partition(" (")[0]
    norm = {"linf": " L∞", "l2": " L2"}.get(entry.norm, "")
    return name + norm


def _model_rows(
    measurements: Measurements, curves: Sequence[AttackCurveRow]
) -> Iterator[AttackedModelRow]:
    """Yield the row of each model over all attacks."""
    sample = measurements.sample
    norm = sample.attack.norm
    epsilon = epsilon_words(typed_epsilon(sample.epsilon, norm), norm)
    for index, victim in enumerate(measurements.victims):
        alias = victim.model.alias
        worst = strongest((row for row in curves if row.model == alias), JUDGED)
        robust = None
        if worst is not None:
            robust = worst.accuracy
        changes = measurements.inside[index]
        halfway = None
        if changes is not None:
            halfway = changes.halfway
        row = AttackedModelRow(
            model=alias,
            clean=accuracy(victim.clean, groups=victim.run.split.groups),
            robust=robust,
            failed=None,
            sample=f"{title_of(sample.attack)} at {epsilon}",
            fooled=int(sample.fooled[index].sum()),
            halfway=halfway,
        )
        yield _with_corruptions(row, victim, measurements)


def _with_corruptions(
    row: AttackedModelRow, victim: Victim, measurements: Measurements
) -> AttackedModelRow:
    """Return the row of a model with its errors under corruptions, if these were measured."""
    by_model = {corrupted.alias: corrupted for corrupted in measurements.corrupted}
    corrupted = by_model.get(row.model)
    if corrupted is None:
        return row
    seed = victim.run.run_options.seed
    relative = None
    if len(by_model) > 1:
        relative = corrupted.relative_error(by_model[measurements.baseline], seed=seed)
    return replace(
        row,
        mean_error=corrupted.mean_error(seed=seed),
        lost=corrupted.lost(victim.clean, seed=seed),
        baseline=measurements.baseline,
        relative_error=relative,
    )


def _curve_rows(
    victims: Sequence[Victim], survivors: Sequence[Survivors]
) -> tuple[AttackCurveRow, ...]:
    """Return accuracy by attack and epsilon, then under all L∞ attacks together if survivors were
    attacked again.
    """
    rows: list[AttackCurveRow] = []
    for victim in victims:
        rows += _attack_curves(victim)
    for victim, result in zip(victims, survivors):
        row = AttackCurveRow(
            model=victim.model.alias,
            attack=WORST_CASE,
            title=WORST_TITLE,
            norm="linf",
            epsilon=typed_epsilon(result.epsilon, "linf"),
            accuracy=accuracy(result.after, groups=victim.run.split.groups),
        )
        rows.append(row)
    return tuple(rows)


def _attack_curves(victim: Victim) -> Iterator[AttackCurveRow]:
    """Yield clean accuracy and the accuracy at each epsilon of each attack on a model."""
    for name, outcome in victim.outcomes.items():
        entry = ATTACKS[name]
        clean = accuracy(outcome.clean, groups=outcome.groups)
        epsilons = (0.0, *outcome.epsilons)
        accuracies = (clean, *outcome.accuracies())
        for epsilon, estimate in zip(epsilons, accuracies):
            yield AttackCurveRow(
                model=victim.model.alias,
                attack=outcome.name,
                title=title_of(entry),
                norm=entry.norm,
                epsilon=typed_epsilon(epsilon, entry.norm),
                accuracy=estimate,
            )


def _attack_rows(victims: Sequence[Victim]) -> Iterator[AttackRow]:
    """Yield settings, results and cost of each attack on each model."""
    for victim in victims:
        options = victim.run.options
        for name, outcome in victim.outcomes.items():
            entry = ATTACKS[name]
            broken = outcome.clean & outcome.broken_at.isfinite()
            restarts = options.restarts if entry.random_start else 1
            yield AttackRow(
                model=victim.model.alias,
                attack=outcome.name,
                name=name,
                title=title_of(entry),
                norm=entry.norm,
                kind=entry.kind,
                source=entry.paper,
                steps=victim.steps_of(entry),
                restarts=restarts,
                right=int(outcome.clean.sum()),
                broken=int(broken.sum()),
                # the unit of typed epsilons, in pixel units
                median=outcome.median_distance(unit=1 / scale_of(entry.norm)),
                forwards=outcome.forwards,
                backwards=outcome.backwards,
                seconds=round(outcome.seconds, 3),
            )


def _pair_rows(
    victims: Sequence[Victim], survivors: Sequence[Survivors]
) -> Iterator[RobustPairRow]:
    """Yield the paired tests of all models, on clean images and under attack, corrected
    together."""
    tests: list[_PairTest] = []
    comparisons: list[Comparison] = []
    for first, second in combinations(range(len(victims)), 2):  # indices
        aliases = (victims[first].model.alias, victims[second].model.alias)
        for test in _pair_tests(victims, survivors, first, second):
            tests.append(test)
            correct = (test.first_correct.numpy(), test.second_correct.numpy())
            comparisons.append((*aliases, *correct))
    run = victims[0].run
    groups = _as_array(run.split.groups)
    for test, row in zip(
        tests, comparison_rows(comparisons, groups=groups, seed=run.run_options.seed)
    ):
        yield RobustPairRow(
            attack=test.attack,
            title=test.title,
            norm=test.norm,
            epsilon=test.epsilon,
            first=row.first,
            second=row.second,
            only_first=row.only_first_right,
            only_second=row.only_second_right,
            difference=_difference(row),
            p=row.p,
            p_holm=row.p_holm,
        )


class _PairTest(NamedTuple):
    """Two models under one attack at one epsilon, or on clean images.

    attack, title, norm, epsilon: as in RobustPairRow.
    first_correct, second_correct: which images each model classifies correctly, (n,).
    """

    attack: str
    title: str
    norm: NormName
    epsilon: float
    first_correct: Tensor
    second_correct: Tensor


def _pair_tests(
    victims: Sequence[Victim],
    survivors: Sequence[Survivors],
    first_index: int,
    second_index: int,
) -> Iterator[_PairTest]:
    """Yield each test of two models: on clean images, under each attack, and under all L∞ attacks
    together.

    first_index, second_index: the indices of the models in `victims` and `survivors`.
    """
    first = victims[first_index]
    second = victims[second_index]
    yield _PairTest("clean", "none", "linf", 0.0, first.clean, second.clean)
    for name, outcome in first.outcomes.items():
        entry = ATTACKS[name]
        for epsilon in outcome.epsilons:
            yield _PairTest(
                attack=outcome.name,
                title=title_of(entry),
                norm=entry.norm,
                epsilon=typed_epsilon(epsilon, entry.norm),
                first_correct=outcome.robust(epsilon),
                second_correct=second.outcomes[name].robust(epsilon),
            )
    if survivors:
        yield _PairTest(
            attack=WORST_CASE,
            title=WORST_TITLE,
            norm="linf",
            epsilon=typed_epsilon(survivors[first_index].epsilon, "linf"),
            first_correct=survivors[first_index].after,
            second_correct=survivors[second_index].after,
        )


def _transfer_rows(victims: Sequence[Victim], sample: AttackSample) -> Iterator[TransferRow]:
    """Yield every model on the adversarial images of every model; no rows for a single model."""
    run = victims[0].run
    if len(victims) < 2 or not run.options.transfer:
        return
    groups = run.split.groups
    if groups is not None:
        groups = groups[sample.indices]
    results = transfers(
        _correct(victims, sample, sample.clean),
        [_correct(victims, sample, images) for images in sample.adversarial],
        torch.stack(sample.fooled),
        groups=groups,
    )
    for result in results:
        yield TransferRow(
            made_for=run.aliases[result.source],
            shown_to=run.aliases[result.target],
            rate=result.rate,
            accuracy=result.accuracy,
            clean=result.clean,
        )


def _correct(victims: Sequence[Victim], sample: AttackSample, images: Tensor) -> Tensor:
    """Return which versions of the sampled images each model classifies correctly, (models, m)."""
    rows = []
    for victim in victims:
        labels = victim.labels[sample.indices]
        rows.append(victim.logits(images).argmax(-1) == labels)
    return torch.stack(rows)


def _corruption_rows(models: Sequence[Corrupted]) -> Iterator[CorruptionRow]:
    """Yield the accuracy of each model under each corruption at each severity."""
    for corrupted in models:
        for (kind, corruption), severity in product(CORRUPTIONS.items(), SEVERITIES):
            yield CorruptionRow(
                model=corrupted.alias,
                kind=kind,
                title=corruption.title,
                operation=corruption.description,
                severity=severity,
                strength=corruption.levels[severity - 1],  # severities count from 1
                accuracy=corrupted.accuracy(kind, severity),
            )


def _corruption_pair_rows(models: Sequence[Corrupted], seed: int) -> Iterator[CorruptionPairRow]:
    """Yield the paired tests of all models under each corruption at each severity, corrected
    together.
    """
    tests: list[tuple[str, int]] = []
    comparisons: list[Comparison] = []
    for first, second in combinations(models, 2):
        for kind_index, kind in enumerate(CORRUPTIONS):
            for severity_index, severity in enumerate(SEVERITIES):
                first_correct = first.correct[kind_index, severity_index].numpy()
                second_correct = second.correct[kind_index, severity_index].numpy()
                tests.append((kind, severity))
                comparisons.append((first.alias, second.alias, first_correct, second_correct))
    if not comparisons:
        return
    groups = _as_array(models[0].groups)
    for (kind, severity), row in zip(tests, comparison_rows(comparisons, groups=groups, seed=seed)):
        yield CorruptionPairRow(
            kind=kind,
            title=CORRUPTIONS[kind].title,
            severity=severity,
            first=row.first,
            second=row.second,
            difference=_difference(row),
            p=row.p,
            p_holm=row.p_holm,
        )


def _difference(row: PairRow) -> Estimate:
    # None only in commands that record the difference elsewhere
    return row.difference or Estimate(0.0, unit="points")


def _as_array(groups: Tensor | None) -> NDArray[Any] | None:
    if groups is None:
        return None
    return groups.numpy()


def _outcome_arrays(victim: Victim) -> AttackedArrays:
    """Return the outcome of all attacks on a model, image by image."""
    broken_at = {}
    distance = {}
    for outcome in victim.outcomes.values():
        broken_at[outcome.name] = outcome.broken_at.numpy()
        distance[outcome.name] = outcome.distance.numpy()
    return AttackedArrays(victim.clean.numpy(), broken_at, distance)


def _adversarial_arrays(
    victims: Sequence[Victim], sample: AttackSample
) -> dict[str, AdversarialArrays]:
    """Return the exact images of the sample, by model."""
    arrays = {}
    for victim, images, fooled in zip(victims, sample.adversarial, sample.fooled):
        arrays[victim.model.alias] = AdversarialArrays(
            images=images.numpy(),
            fooled=fooled.numpy(),
            image=sample.indices.numpy(),
        )
    return arrays
