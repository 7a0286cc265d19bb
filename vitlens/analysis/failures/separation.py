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
# permutations with a statistic that differs less, as a part of it, are ties
_ROUNDING: Final = 1e-9


def separation(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None, seed: int = 0
) -> tuple[Estimate, float | None]:
    """Return the area of a finite number (n,) for failures, and the two-sided p of an area of 0.5.

    With few failures or successes there is no interval and no test. If the number does not vary
    among the failures or the successes, there is an interval only for a number with two values.

    wrong: True for failures. There must be both failures and successes.
    groups: the source of each image, None if images are independent.
    """
    area, influences = area_and_influences(numbers, wrong)
    if min(int(wrong.sum()), int((~wrong).sum())) < FEWEST:
        return Estimate(area, n=len(numbers), unit=""), None
    if groups is not None and len(groups.unique()) == len(groups):
        groups = None  # no images share a source
    low, high = _interval(numbers, wrong, area, influences, groups)
    return Estimate(area, low, high, len(numbers), ""), _p_of_chance(numbers, wrong, groups, seed)


def _interval(
    numbers: Array, wrong: NDArray[np.bool_], area: float, influences: Array, groups: Tensor | None
) -> tuple[float | None, float | None]:
    """Return the ends of the interval of the area; see the top of the module."""
    values = np.unique(numbers)
    if len(values) == 2 and groups is None:
        return _interval_of_two_values(numbers == values[1], wrong)
    varies = np.ptp(numbers[wrong]) > 0 and np.ptp(numbers[~wrong]) > 0
    if not varies or area in (0.0, 1.0):
        return None, None
    if groups is not None:
        error = standard_error(influences, groups)
    else:  # DeLong's: failures and successes are drawn separately
        variance_of_failures = _variance_of_sum(influences[wrong])
        variance_of_successes = _variance_of_sum(influences[~wrong])
        error = float(np.sqrt(variance_of_failures + variance_of_successes))
    # on the logit scale, where the error is error / (area (1 - area)) by the delta method
    centre = math.log(area / (1 - area))
    half = _Z * error / (area * (1 - area))
    low = 1 / (1 + math.exp(half - centre))
    high = 1 / (1 + math.exp(-half - centre))
    return low, high


def _variance_of_sum(deviations: Array) -> float:
    """Return the variance of the sum of deviations of mean 0."""
    return float((deviations**2).sum() * len(deviations) / (len(deviations) - 1))


def _interval_of_two_values(
    is_larger: NDArray[np.bool_], wrong: NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    """Return the interval of the area of a number with two values.

    Such an area is 0.5 plus half the difference of the fractions of failures and successes that
    have the larger value.
    """
    failures = wilson(int(is_larger[wrong].sum()), int(wrong.sum()))
    successes = wilson(int(is_larger[~wrong].sum()), int((~wrong).sum()))
    difference = difference_of(failures, successes)  # in points, hundredths of a fraction
    assert difference.low is not None
    assert difference.high is not None
    return 0.5 + difference.low / 200, 0.5 + difference.high / 200


def _p_of_chance(
    numbers: Array, wrong: NDArray[np.bool_], groups: Tensor | None, seed: int
) -> float:
    """Return the two-sided p-value of an area of 0.5; see the top of the module."""
    values = np.unique(numbers)
    if len(values) == 1:
        return 1.0
    if groups is not None:
        return _p_by_permutation(numbers, wrong, groups, seed)
    if len(values) == 2:
        is_larger = numbers == values[1]
        failures = [int((is_larger & wrong).sum()), int((~is_larger & wrong).sum())]
        successes = [int((is_larger & ~wrong).sum()), int((~is_larger & ~wrong).sum())]
        return float(stats.fisher_exact([failures, successes]).pvalue)
    return float(stats.mannwhitneyu(numbers[wrong], numbers[~wrong], method="asymptotic").pvalue)


def _p_by_permutation(numbers: Array, wrong: NDArray[np.bool_], groups: Tensor, seed: int) -> float:
    # the sum of the ranks of the failures is the statistic of Mann and Whitney, up to a constant
    ranks = stats.rankdata(numbers)
    ranks -= ranks.mean()
    observed = abs(float(ranks[wrong].sum()))
    at_least_observed = 0
    for permuted in permutations(wrong.astype(np.float64), groups, draws=PERMUTATIONS, seed=seed):
        sums = np.abs(permuted @ ranks)
        at_least_observed += int((sums >= observed * (1 - _ROUNDING)).sum())
    return (1 + at_least_observed) / (1 + PERMUTATIONS)


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
    _, group_of_image = np.unique(groups.numpy(), return_inverse=True)
    group_of_image = group_of_image.ravel()
    # the indices of each group's images, one group after the other
    images_by_group = np.argsort(group_of_image, kind="stable")
    group_ends = np.cumsum(np.bincount(group_of_image))
    groups_by_size: dict[int, list[NDArray[np.intp]]] = {}
    for members in np.split(images_by_group, group_ends[:-1]):
        groups_by_size.setdefault(len(members), []).append(members)
    return [np.stack(same_size) for same_size in groups_by_size.values()]


def area_difference(
    numbers: Array, wrong: NDArray[np.bool_], *, groups: Tensor | None = None, seed: int = 0
) -> tuple[Estimate, float]:
    """Return the area for one model minus that for another, with its paired interval and p-value.

    If the gap has no standard error, as if both models are separated perfectly, it has no interval.
    The test then exchanges the two models on random images or groups.

    numbers, wrong (2, n): the numbers and the failures of both models.
    """
    first_area, first_influences = area_and_influences(numbers[0], wrong[0])
    second_area, second_influences = area_and_influences(numbers[1], wrong[1])
    gap = first_area - second_area
    error = standard_error(first_influences - second_influences, groups)
    if error == 0 and gap != 0:
        p = _p_by_exchange(numbers, wrong, groups, abs(gap), seed)
        return Estimate(gap, n=numbers.shape[1], unit=""), p
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    low = max(gap - _Z * error, -1.0)
    high = min(gap + _Z * error, 1.0)
    return Estimate(gap, low, high, numbers.shape[1], ""), p


def _p_by_exchange(
    numbers: Array,
    wrong: NDArray[np.bool_],
    groups: Tensor | None,
    observed: float,
    seed: int,
) -> float:
    """Return the p-value of a gap, from gaps with the models exchanged on random groups.

    An exchange that leaves a model without failures or successes counts against the gap.
    """
    generator = np.random.default_rng(seed)
    group_of_image = np.arange(numbers.shape[1])
    if groups is not None:
        _, group_of_image = np.unique(groups.numpy(), return_inverse=True)
    at_least_observed = 0
    for _ in range(PERMUTATIONS):
        is_group_exchanged = generator.random(group_of_image.max() + 1) < 0.5
        is_exchanged = is_group_exchanged[group_of_image.ravel()]
        drawn_numbers = np.where(is_exchanged, numbers[::-1], numbers)
        drawn_wrong = np.where(is_exchanged, wrong[::-1], wrong)
        failures = drawn_wrong.sum(1)
        if failures.min() == 0 or failures.max() == drawn_wrong.shape[1]:
            at_least_observed += 1
            continue
        first, _ = area_and_influences(drawn_numbers[0], drawn_wrong[0])
        second, _ = area_and_influences(drawn_numbers[1], drawn_wrong[1])
        at_least_observed += int(abs(first - second) >= observed * (1 - _ROUNDING))
    return (1 + at_least_observed) / (1 + PERMUTATIONS)


def area_and_influences(numbers: Array, wrong: NDArray[np.bool_]) -> tuple[float, Array]:
    """Return the area, and the influence of each image on it (n,).

    The influence of a failure is the share of successes below it, that of a success the share of
    failures above it, minus the area and divided by the number of failures or successes.
    """
    failures = numbers[wrong]
    successes = numbers[~wrong]
    successes_below = _share_below(failures, successes)
    failures_below = _share_below(successes, failures)
    area = float(successes_below.mean())
    influences = np.empty(len(wrong))
    influences[wrong] = (successes_below - area) / len(failures)
    influences[~wrong] = (1 - failures_below - area) / len(successes)
    return area, influences


def _share_below(numbers: Array, references: Array) -> Array:
    """Return the share of the references below each number; ties count half."""
    ordered = np.sort(references)
    below = np.searchsorted(ordered, numbers, "left")
    not_above = np.searchsorted(ordered, numbers, "right")
    share: Array = (below + not_above) / 2 / len(references)
    return share


def standard_error(influences: Array, groups: Tensor | None) -> float:
    """Return the standard error of an area, from the sums of the influences over groups."""
    sums = _sums_by_group(influences, groups)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))


def _sums_by_group(values: Array, groups: Tensor | None) -> Array:
    """Return the sum of the values in each group; without groups, the values."""
    if groups is None:
        return values
    _, group_of_image = torch.unique(groups, return_inverse=True)
    return np.bincount(group_of_image.numpy(), weights=values).astype(np.float64)
