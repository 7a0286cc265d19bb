"""Prediction of failures by a number: the area under the ROC curve, its interval and its test.

The area is the probability that a random failure has a larger value than a random success. Ties
count half, and 0.5 is chance.

Intervals are those of DeLong 1988, with sums over groups (Obuchowski 1997) if images share a
source. They are on the logit scale, so they lie between 0 and 1. A number with two values has the
interval of Newcombe 1998.

Tests use the variance under the null hypothesis, which is above 0 even if no failure has the
property. The test is Mann and Whitney's with its correction for ties, or Fisher's exact test for
two values. If images share a source, it permutes groups.
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
FEWEST: Final = 10  # an interval and a test need so many failures, and as many successes
PERMUTATIONS: Final = 4000
_AT_ONCE: Final = 4_000_000  # numbers that are permuted at a time: bounds memory
_Z: Final = float(stats.norm.ppf(0.975))  # normal quantile of a two-sided 95 % interval
_ROUNDING: Final = (
    1e-9  # permutations with a statistic that differs less, as a part of it, are ties
)


def separation(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None, seed: int = 0
) -> tuple[Estimate, float | None]:
    """Return the area of a finite number (n,) for failures, and the two-sided p of an area of 0.5.

    With few failures or successes there is no interval and no test. If the number does not vary
    among the failures or the successes, there is an interval only for a number with two values.

    wrong: True for failures. There must be both failures and successes.
    groups: the source of each image, None if images are independent.
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
    varies = np.ptp(numbers[wrong]) > 0 and np.ptp(numbers[~wrong]) > 0
    if not varies or area in (0.0, 1.0):
        return None, None
    if groups is not None:
        error = standard_error(parts, groups)
    else:  # DeLong's: failures and successes are drawn separately
        error = float(np.sqrt(_variance_of_sum(parts[wrong]) + _variance_of_sum(parts[~wrong])))
    # on the logit scale, where the error is error / (area (1 - area)) by the delta method
    centre = math.log(area / (1 - area))
    half = _Z * error / (area * (1 - area))
    low = 1 / (1 + math.exp(half - centre))
    high = 1 / (1 + math.exp(-half - centre))
    return low, high


def _variance_of_sum(parts: Array) -> float:
    """Return the variance of the sum of deviations of mean 0."""
    return float((parts**2).sum() * len(parts) / (len(parts) - 1))


def _interval_of_two_values(
    has: NDArray[np.bool_], wrong: NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    """Return the interval of the area of a number with two values.

    Such an area is 0.5 plus half the difference of the fractions of failures and successes that
    have the larger value.
    """
    failures = wilson(int(has[wrong].sum()), int(wrong.sum()))
    successes = wilson(int(has[~wrong].sum()), int((~wrong).sum()))
    difference = difference_of(failures, successes)
    assert difference.low is not None
    assert difference.high is not None
    return 0.5 + difference.low / 200, 0.5 + difference.high / 200  # it is in points


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
        of_failures = [int((has & wrong).sum()), int((~has & wrong).sum())]
        of_successes = [int((has & ~wrong).sum()), int((~has & ~wrong).sum())]
        counts = [of_failures, of_successes]
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
    """Yield permutations of values (n,), several at a time (some of the draws, n).

    Groups are exchanged with other groups of the same size.
    """
    generator = np.random.default_rng(seed)
    members = _members_by_size(len(values), groups)
    step = max(1, _AT_ONCE // len(values))
    for start in range(0, draws, step):
        count = min(step, draws - start)
        permuted = np.empty((count, len(values)))
        for images in members:  # (groups, size)
            # (draws, groups): the group that each group receives its values from
            orders = generator.permuted(np.tile(np.arange(len(images)), (count, 1)), axis=1)
            permuted[:, images] = values[images[orders]]
        yield permuted


def _members_by_size(count: int, groups: Tensor | None) -> list[NDArray[np.intp]]:
    """Return the indices (groups, size) of the images in all groups of a size, for each size."""
    if groups is None:
        return [np.arange(count)[:, None]]
    number = np.unique(groups.numpy(), return_inverse=True)[1].ravel()
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(number))[:-1])
    groups_by_size: dict[int, list[NDArray[np.intp]]] = {}
    for part in parts:
        groups_by_size.setdefault(len(part), []).append(part)
    return [np.stack(of_size) for of_size in groups_by_size.values()]


def area_difference(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None
) -> tuple[Estimate, float]:
    """Return the area for one model minus that for another, with its paired interval and p-value.

    numbers, wrong (2, n): the numbers and the failures of both models.
    """
    first_area, first_parts = area_and_parts(numbers[0], wrong[0])
    second_area, second_parts = area_and_parts(numbers[1], wrong[1])
    gap = first_area - second_area
    error = standard_error(first_parts - second_parts, groups)
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    low = max(gap - _Z * error, -1.0)
    high = min(gap + _Z * error, 1.0)
    return Estimate(gap, low, high, numbers.shape[1], ""), p


def area_and_parts(numbers: Array, wrong: NDArray[np.bool_]) -> tuple[float, Array]:
    """Return the area, and how far each image moves it (n,).

    A failure moves it by the share of successes below it, a success by the share of failures above
    it.
    """
    failures = numbers[wrong]
    successes = numbers[~wrong]
    successes_below = _share_below(failures, successes)
    failures_below = _share_below(successes, failures)
    area = float(successes_below.mean())
    parts = np.empty(len(wrong))
    parts[wrong] = (successes_below - area) / len(failures)
    parts[~wrong] = (1 - failures_below - area) / len(successes)
    return area, parts


def _share_below(numbers: Array, references: Array) -> Array:
    """Return the share of the references below each number; ties count half."""
    ordered = np.sort(references)
    below = np.searchsorted(ordered, numbers, "left")
    not_above = np.searchsorted(ordered, numbers, "right")
    share: Array = (below + not_above) / 2 / len(references)
    return share


def standard_error(parts: Array, groups: Tensor | None) -> float:
    """Return the standard error, from the sums of the deviations over groups."""
    sums = by_group(parts, groups)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))


def by_group(values: Array, groups: Tensor | None) -> Array:
    """Return the sum of the values in each group; without groups, the values."""
    if groups is None:
        return values
    member = torch.unique(groups, return_inverse=True)[1].numpy()
    return np.bincount(member, weights=values).astype(np.float64)
