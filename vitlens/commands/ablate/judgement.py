"""Which effects of removing a head are worth reporting, and which heads are shown to have none; free of torch."""

from collections.abc import Sequence
from math import ceil, log2
from statistics import median
from typing import Final, Literal

from vitlens.commands.ablate.record.rows import UnitRow
from vitlens.uncertainty import LEVEL, Estimate, widened

Judged = Literal["effect", "no effect", "undecided"]

LOSS: Final = 0.01  # nats: the probability of the label falls by 1 %, in the geometric mean over images
OF_CLEAN: Final = 0.01  # of the clean loss: for models with a high one
POINTS: Final = 0.5  # of accuracy


def smallest_effect(clean_loss: Estimate) -> Estimate:
    """The smallest change of the mean loss that is worth reporting, nats: LOSS or OF_CLEAN, whichever is larger."""
    return Estimate(max(LOSS, OF_CLEAN * clean_loss.value), unit="nats")


def judged(row: UnitRow, smallest: Estimate, looks: int) -> Judged:
    """Whether removing a unit changes the loss by more than the smallest effect, by less, or neither is shown.

    looks: units among which it is chosen, for which the interval is widened.
    """
    loss = widened(row.loss, looks)
    if loss.low is None or loss.high is None:
        return "undecided"
    if -smallest.value <= loss.low and loss.high <= smallest.value:
        return "no effect"
    outside = loss.low > smallest.value or loss.high < -smallest.value
    return "effect" if outside and row.matters else "undecided"


def of_judgement(rows: Sequence[UnitRow], smallest: Estimate, which: Judged) -> list[UnitRow]:
    """Those units of one kind of which this is shown."""
    return [row for row in rows if judged(row, smallest, len(rows)) == which]


def images_needed(rows: Sequence[UnitRow], smallest: Estimate, images: int) -> Estimate | None:
    """About how many images would shrink the intervals of these units to the smallest effect on either side (their
    median); None without intervals."""
    halves = [
        (high - low) / 2 for row in rows for low, high in [(row.delta_loss_low, row.delta_loss_high)]
        if low is not None and high is not None
    ]  # fmt: skip
    if not halves:
        return None
    needed = images * (median(halves) / smallest.value) ** 2
    return Estimate(float(max(images, _rounded(needed))), unit="images")


def fewest_images(units: int) -> int:
    """The smallest number of images (or groups) for which the effect of one of these units can be significant.

    Of n differences the smallest two-sided p by sign flips is 2 / 2^n; Holm's correction multiplies it by the units.
    """
    return 1 + ceil(log2(units / LEVEL))


def _rounded(count: float) -> int:
    """Two significant digits: it is a forecast."""
    return int(float(f"{count:.1e}"))
