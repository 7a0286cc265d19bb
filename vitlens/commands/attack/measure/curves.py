"""Clean and robust accuracies, distances, paired tests of models, and accuracies by class."""

from collections.abc import Sequence
from itertools import combinations

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.robustness.curve import paired, robust_by_class
from vitlens.attacks.registry import ATTACKS, Attack, NormName
from vitlens.commands.attack.epsilons import scale_of, typed_epsilon
from vitlens.commands.attack.measure.sweep import ModelAttack, SweptAttack
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import (
    ACCURACY,
    ATTACKED,
    BY_CLASS,
    CURVES,
    IMAGES,
    MEDIAN_DISTANCE,
    ROBUST_ACCURACY,
    ROBUST_DIFFERENCE,
    ROBUST_PAIRS,
)
from vitlens.commands.attack.record.arrays import AttackedArrays
from vitlens.commands.attack.record.rows import AttackCurveRow, AttackRow, RobustClassRow, RobustPairRow
from vitlens.commands.scaffold.folder import RunFolder


def title_of(attack: Attack) -> str:
    """An attack with its norm, in a few words: "PGD L∞", "C&W L2"."""
    norm = {"linf": " L∞", "l2": " L2"}.get(attack.norm, "")
    return attack.title.partition(" (")[0] + norm


def steps_of(attack: Attack, options: AttackOptions) -> int:
    """The number of steps of an attack; 1 for a single-step attack."""
    return (options.steps_for(attack.name) or attack.steps) if attack.steps else 1


def write_curves(folder: RunFolder, works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]]) -> None:
    """Write clean and robust accuracies, median distances, the cost of each attack; arrays of every image."""
    curves: list[AttackCurveRow] = []
    attacked: list[AttackRow] = []
    for work, of_model in zip(works, swept):
        alias, seed = work.model.alias, work.run.seed
        clean = accuracy(of_model[0].outcome.clean, groups=work.split.groups, seed=seed)
        folder.metric(ACCURACY(model=alias), clean)
        for result in of_model:
            entry, outcome = ATTACKS[result.attack], result.outcome
            for pixels, estimate in zip((0.0, *outcome.epsilons), (clean, *outcome.accuracies(seed=seed))):
                epsilon = typed_epsilon(pixels, entry.norm)
                folder.metric(ROBUST_ACCURACY(model=alias, attack=outcome.name, epsilon=epsilon), estimate)
                curves.append(
                    AttackCurveRow(
                        alias, outcome.name, title_of(entry), entry.norm, float(epsilon), estimate.value, estimate.low,
                        estimate.high, int(outcome.clean.numel()),
                    )
                )  # fmt: skip
            attacked.append(_attack_row(folder, work, result, entry))
        _save_images(folder, work, of_model)
    folder.write(CURVES, curves)
    folder.write(ATTACKED, attacked)


def _attack_row(folder: RunFolder, work: ModelAttack, swept: SweptAttack, entry: Attack) -> AttackRow:
    outcome, alias = swept.outcome, work.model.alias
    median = outcome.median_distance(unit=1 / scale_of(entry.norm))
    if median is not None:
        folder.metric(MEDIAN_DISTANCE(model=alias, attack=outcome.name), median)
    right = int(outcome.clean.sum())
    survived = int(outcome.robust(outcome.epsilons[-1]).sum())
    broken = int((outcome.clean & outcome.broken_at.isfinite()).sum())
    restarts = work.options.restarts if entry.random_start else 1
    return AttackRow(
        alias, outcome.name, swept.attack, title_of(entry), entry.norm, entry.kind, entry.paper, entry.gradients,
        steps_of(entry, work.options), restarts, right, survived, broken, None if median is None else median.value,
        swept.forwards, swept.backwards, round(swept.seconds, 3),
    )  # fmt: skip


def _save_images(folder: RunFolder, work: ModelAttack, swept: Sequence[SweptAttack]) -> None:
    arrays = AttackedArrays(
        swept[0].outcome.clean.numpy(),
        work.labels.numpy(),
        {result.outcome.name: result.outcome.broken_at.numpy() for result in swept},
        {result.outcome.name: result.distance.numpy() for result in swept},
    )
    folder.save(IMAGES, arrays, model=work.model.alias)


def write_pairs(folder: RunFolder, swept: Sequence[Sequence[SweptAttack]], *, seed: int) -> None:
    """Paired tests of the models under every attack at every epsilon, all corrected together."""
    matched = [
        (result.outcome, other.outcome)
        for first, second in combinations(swept, 2)
        for result, other in zip(first, second)
    ]  # fmt: skip
    entries = {result.outcome.name: ATTACKS[result.attack] for result in swept[0]}
    rows = []
    for test in paired(matched, seed=seed) if matched else ():
        entry = entries.get(test.name)
        norm: NormName = "linf" if entry is None else entry.norm
        title = "none" if entry is None else title_of(entry)
        epsilon, gap = typed_epsilon(test.epsilon, norm), test.difference
        if test.name != "clean":
            name = ROBUST_DIFFERENCE(first=test.first, second=test.second, attack=test.name, epsilon=epsilon)
            folder.metric(name, gap)
        rows.append(
            RobustPairRow(
                test.name, title, norm, float(epsilon), test.first, test.second, test.only_first, test.only_second,
                gap.value, gap.low, gap.high, test.p, test.p_holm,
            )
        )  # fmt: skip
    folder.write(ROBUST_PAIRS, rows)


def write_classes(
    folder: RunFolder,
    works: Sequence[ModelAttack],
    swept: Sequence[Sequence[SweptAttack]],
    *,
    attack: str,
    epsilon: float,
) -> None:
    """Write clean and robust accuracy of every class under one attack at one epsilon (pixel units); no rows where
    images have no labels."""
    rows: list[RobustClassRow] = []
    for work, of_model in zip(works, swept):
        if not work.options.predicted and work.split.labels is not None:
            (result,) = (result for result in of_model if result.attack == attack)
            rows += _class_rows(work, result, epsilon)
    folder.write(BY_CLASS, rows)


def _class_rows(work: ModelAttack, swept: SweptAttack, epsilon: float) -> list[RobustClassRow]:
    assert work.split.labels is not None
    labels, classes = work.split.labels.cpu().long(), work.split.classes
    before, after = (
        robust_by_class(swept.outcome, labels, classes, epsilon=size, seed=work.run.seed) for size in (0.0, epsilon)
    )
    written = float(typed_epsilon(epsilon, ATTACKS[swept.attack].norm))
    return [
        RobustClassRow(
            work.model.alias, clean.name, clean.n, swept.outcome.name, written, clean.accuracy.value,
            clean.accuracy.low, clean.accuracy.high, robust.accuracy.value, robust.accuracy.low, robust.accuracy.high,
        )
        for clean, robust in zip(before, after)
        if clean.accuracy is not None and robust.accuracy is not None
    ]  # fmt: skip
