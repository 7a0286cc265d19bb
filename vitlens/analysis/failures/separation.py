"""How well a number predicts failures: the area under the ROC curve, its interval and its test.

The area is the probability that a random failure has a greater value than a random success (ties
count half); 0.5 is chance. Intervals follow DeLong 1988, with the sums over groups of Obuchowski
1997 where images share a source, on the logit scale, so that they lie between 0 and 1; of a number
with two values, Newcombe 1998. Tests use the variance under the null hypothesis, which does not
vanish where no failure has the property: Mann and Whitney's with its correction for ties, Fisher's
exact test for two values, and permutations of whole groups where images share a source.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from vitlens.uncertainty import Estimate, difference_of, wilson

Array = NDArray[np.float64]
FEWEST: Final = 10  # failures, and successes, for an interval and a test
PERMUTATIONS: Final = 4000
_AT_ONCE: Final = 4_000_000  # numbers that are permuted at once: bounds memory
_Z: Final = float(stats.norm.ppf(0.975))
_ROUNDING: Final = 1e-9  # of a statistic: permutations that differ less are ties


def separation(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None, seed: int = 0
) -> tuple[Estimate, float | None]:
    """Return the area of a finite number (n,) for failures (wrong), and the two-sided p of an area
    of 0.5.

    There must be both failures and successes; with few of either there is no interval and no test.
    There is no interval either where the number does not vary among the failures or the successes,
    unless it has two values.
    """
    area, parts = area_and_parts(numbers, wrong)
    if min(int(wrong.sum()), int((~wrong).sum())) < FEWEST:
        return Estimate(area, n=len(numbers), unit=""), None
    shared = groups if groups is not None and len(groups.unique()) < len(groups) else None
    low, high = _interval(numbers, wrong, area, parts, shared)
    return Estimate(area, low, high, len(numbers), ""), _p_of_chance(numbers, wrong, shared, seed)


def _interval(
    numbers: Array, wrong: NDArray[np.bool_], area: float, parts: Array, groups: Tensor | None
) -> tuple[float | None, float | None]:
    values = np.unique(numbers)
    if len(values) == 2 and groups is None:
        return _interval_of_two_values(numbers == values[1], wrong)
    varies = all(np.ptp(side) > 0 for side in (numbers[wrong], numbers[~wrong]))
    if not varies or area in (0.0, 1.0):
        return None, None
    if groups is not None:
        error = standard_error(parts, groups)
    else:  # DeLong's: failures and successes are drawn separately
        variances = (
            (side**2).sum() * len(side) / (len(side) - 1) for side in (parts[wrong], parts[~wrong])
        )
        error = float(np.sqrt(sum(variances)))
    centre = math.log(area / (1 - area))
    half = _Z * error / (area * (1 - area))
    return 1 / (1 + math.exp(half - centre)), 1 / (1 + math.exp(-half - centre))


def _interval_of_two_values(
    has: NDArray[np.bool_], wrong: NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    """Return the interval of half the difference of two fractions, from the middle of the range of
    areas.
    """
    failures, successes = (
        wilson(int(has[side].sum()), int(side.sum())) for side in (wrong, ~wrong)
    )
    difference = difference_of(failures, successes)
    assert difference.low is not None
    assert difference.high is not None
    return 0.5 + difference.low / 200, 0.5 + difference.high / 200


def _p_of_chance(
    numbers: Array, wrong: NDArray[np.bool_], groups: Tensor | None, seed: int
) -> float:
    values = np.unique(numbers)
    if len(values) == 1:
        return 1.0
    if groups is not None:
        return _p_by_permutation(numbers, wrong, groups, seed)
    if len(values) == 2:
        has = numbers == values[1]
        counts = [[int((has & side).sum()), int((~has & side).sum())] for side in (wrong, ~wrong)]
        return float(stats.fisher_exact(counts).pvalue)
    return float(stats.mannwhitneyu(numbers[wrong], numbers[~wrong], method="asymptotic").pvalue)


def _p_by_permutation(numbers: Array, wrong: NDArray[np.bool_], groups: Tensor, seed: int) -> float:
    ranks = stats.rankdata(numbers)
    ranks -= ranks.mean()
    observed = abs(float(ranks[wrong].sum()))
    reached = 0
    for permuted in permutations(wrong.astype(np.float64), groups, draws=PERMUTATIONS, seed=seed):
        sums = np.abs(permuted @ ranks)
        reached += int((sums >= observed * (1 - _ROUNDING)).sum())
    return (1 + reached) / (1 + PERMUTATIONS)


def permutations(values: Array, groups: Tensor | None, *, draws: int, seed: int) -> Iterator[Array]:
    """Yield permutations (some of the draws, n) of values (n,).

    Whole groups change places with others of their size.
    """
    generator = np.random.default_rng(seed)
    members = _members_by_size(len(values), groups)
    step = max(1, _AT_ONCE // len(values))
    for start in range(0, draws, step):
        count = min(step, draws - start)
        permuted = np.empty((count, len(values)))
        for images in members:
            orders = generator.permuted(np.tile(np.arange(len(images)), (count, 1)), axis=1)
            permuted[:, images] = values[images[orders]]
        yield permuted


def _members_by_size(count: int, groups: Tensor | None) -> list[NDArray[np.intp]]:
    """Return for each size of a group the images (groups, size) of all groups of this size."""
    if groups is None:
        return [np.arange(count)[:, None]]
    number = np.unique(groups.numpy(), return_inverse=True)[1].ravel()
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(number))[:-1])
    by_size: dict[int, list[NDArray[np.intp]]] = {}
    for part in parts:
        by_size.setdefault(len(part), []).append(part)
    return [np.stack(same) for same in by_size.values()]


def area_difference(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None
) -> tuple[Estimate, float]:
    """Return the area of a number for one model minus that for another, with its paired interval
    and p: both (2, n).
    """
    (area, parts), (other, others) = (area_and_parts(*each) for each in zip(numbers, wrong))
    gap = area - other
    error = standard_error(parts - others, groups)
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    low = max(gap - _Z * error, -1.0)
    high = min(gap + _Z * error, 1.0)
    return Estimate(gap, low, high, numbers.shape[1], ""), p


def area_and_parts(numbers: Array, wrong: NDArray[np.bool_]) -> tuple[float, Array]:
    """Return the area, and what each image contributes to its deviation from its mean (n,).

    A failure contributes by the share of successes below it, a success by the share of failures
    above it.
    """
    high = np.sort(numbers[wrong])
    low = np.sort(numbers[~wrong])
    below, not_above = (
        (np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right"))
        / 2
        / len(others)
        for others, own in ((low, numbers[wrong]), (high, numbers[~wrong]))
    )
    area = float(below.mean())
    parts = np.empty(len(wrong))
    parts[wrong], parts[~wrong] = (below - area) / len(high), (1 - not_above - area) / len(low)
    return area, parts


def standard_error(parts: Array, groups: Tensor | None) -> float:
    """Return the standard error from sums of the images' deviations over groups."""
    sums = by_group(parts, groups)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))


def by_group(values: Array, groups: Tensor | None) -> Array:
    """Return the sum of the values in each group; without groups each value is its own."""
    if groups is None:
        return values
    member = torch.unique(groups, return_inverse=True)[1].numpy()
    return np.bincount(member, weights=values).astype(np.float64)
