"""Which rows of an attack's record can be compared: tests at which one of the models had something to lose."""

from collections.abc import Sequence

from vitlens.commands.attack.record.rows import AttackCurveRow, RobustPairRow


def strongest(rows: Sequence[AttackCurveRow]) -> AttackCurveRow | None:
    """The row of the lowest accuracy."""
    return min(rows, key=lambda row: row.accuracy, default=None)


def at_floor(row: RobustPairRow, curves: Sequence[AttackCurveRow]) -> bool:
    """Whether neither model classifies an image correctly under this attack at this epsilon."""
    accuracies = _accuracies(row, curves)
    return bool(accuracies) and max(accuracies) == 0


def at_clean(row: RobustPairRow, curves: Sequence[AttackCurveRow]) -> bool:
    """Whether neither model has lost accuracy to this attack at this epsilon."""
    pairs = zip(_accuracies(row, curves), _accuracies(row, curves, clean=True))
    return all(robust == clean for robust, clean in pairs)


def informative(rows: Sequence[RobustPairRow], curves: Sequence[AttackCurveRow]) -> list[RobustPairRow]:
    """The tests under attack in which the models are neither both at 0 % nor both at their clean accuracy."""
    return [row for row in rows if row.attack != "clean" and not at_floor(row, curves) and not at_clean(row, curves)]


def _accuracies(row: RobustPairRow, curves: Sequence[AttackCurveRow], *, clean: bool = False) -> list[float]:
    epsilon = 0.0 if clean else row.epsilon
    return [
        curve.accuracy
        for alias in (row.first, row.second)
        for curve in curves
        if (curve.model, curve.attack, curve.epsilon) == (alias, row.attack, epsilon)
    ]
