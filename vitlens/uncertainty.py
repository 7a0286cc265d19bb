"""Uncertainty: confidence intervals, paired tests, and the correction for multiple tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.resampling import (
    DRAWS,
    ROUNDING,
    Numbers,
    by_group,
    degrees_of_freedom,
    enough_to_draw,
    jackknife_error,
    mean_interval,
    student_quantile,
)

LEVEL = 0.05  # significance level, after the correction for multiple tests
POWER = 0.8  # a test finds a detectable effect with this probability
_MOST_EXACT = 5000  # calibration is tested exactly for up to so many predictions
_Z = NormalDist().inv_cdf(0.975)  # normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    value: the number.
    low, high: the ends of the interval, None without one.
    n: the number of images (or other units) behind it.
    unit: "fraction", "points", "nats", "px" and so on, "" for a plain number.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = "fraction"


class Side(Enum):
    """The side of a number relative to another; UNDECIDED for overlapping or missing intervals."""

    BELOW = -1
    UNDECIDED = 0
    ABOVE = 1


def beyond(estimate: Estimate, value: float) -> Side:
    """Return the side of a value on which an interval lies entirely; else UNDECIDED.

    A number without an interval (n = 1) is UNDECIDED, too.
    """
    if estimate.low is None or estimate.high is None or estimate.low <= value <= estimate.high:
        return Side.UNDECIDED
    return Side.ABOVE if estimate.low > value else Side.BELOW


def apart(first: Estimate, second: Estimate) -> Side:
    """Return the side of the second interval on which the first lies entirely; else UNDECIDED.

    Numbers without intervals are UNDECIDED, too.
    """
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Side.UNDECIDED
    if first.low > second.high:
        return Side.ABOVE
    if first.high < second.low:
        return Side.BELOW
    return Side.UNDECIDED


def difference_of(first: Estimate, second: Estimate) -> Estimate:
    """Return the difference of two independent fractions in points (Newcombe 1998, method 10).

    Its interval is computed from theirs; there is none if one has none. For fractions of the same
    images it is too wide rather than too narrow.
    """
    difference = first.value - second.value
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Estimate(100 * difference, unit="points")
    # the difference is low if the first is low and the second high: their distances to these ends
    # add up like independent errors
    below = np.hypot(first.value - first.low, second.high - second.value)
    above = np.hypot(first.high - first.value, second.value - second.low)
    low = 100 * (difference - float(below))
    high = 100 * (difference + float(above))
    return Estimate(100 * difference, low, high, second.n, "points")


def in_points(difference: Estimate) -> Estimate:
    """Return a difference of fractions in percentage points; other differences are unchanged."""
    if difference.unit != "fraction":
        return difference
    low = None if difference.low is None else 100 * difference.low
    high = None if difference.high is None else 100 * difference.high
    return Estimate(100 * difference.value, low, high, difference.n, "points")


def widened(
    estimate: Estimate, estimates: int, *, least: float = -math.inf, most: float = math.inf
) -> Estimate:
    """Return the Bonferroni-corrected interval of one of several estimates.

    The largest of many estimates is large partly by chance. With this width, all intervals hold
    together with 95 %, by the normal approximation.

    estimates: the number of estimates.
    least, most: the smallest and largest possible value, which bound the interval.
    """
    if estimate.low is None or estimate.high is None:
        return estimate
    level_of_each = LEVEL / estimates
    factor = NormalDist().inv_cdf(1 - level_of_each / 2) / _Z
    low = max(estimate.value + factor * (estimate.low - estimate.value), least)
    high = min(estimate.value + factor * (estimate.high - estimate.value), most)
    return Estimate(estimate.value, low, high, estimate.n, estimate.unit)


def finite(value: SupportsFloat) -> float | None:
    """Return a number, or None for NaN and infinities, which JSON does not have."""
    return float(value) if math.isfinite(float(value)) else None


def wilson(
    successes: int, n: int, *, independent: int | None = None, unit: str = "fraction"
) -> Estimate:
    """Return a fraction with Wilson's 95 % interval (Wilson 1927).

    independent: the number of sources, if several of the n share a source and only the total is
        known. The interval is then that of so many observations. It is exact if all images of a
        source agree, else too wide.

    Raises InputError unless 0 <= successes <= n and n > 0.
    """
    if not 0 <= successes <= n or n == 0:
        raise InputError(f"expected 0 <= successes <= n with n > 0, found {successes} of {n}")
    if independent is None:
        independent = n
    low, high = _wilson_ends(successes / n, independent, _Z)
    return Estimate(successes / n, low, high, n, unit)


def _wilson_ends(fraction: float, n: float, quantile: float) -> tuple[float, float]:
    squared = quantile * quantile
    centre = (fraction + squared / (2 * n)) / (1 + squared / n)
    error = math.sqrt(fraction * (1 - fraction) / n + squared / (4 * n * n))
    half = quantile / (1 + squared / n) * error
    # at a fraction of 0 or 1 the formula gives exactly 0 or 1, but floating-point numbers do not
    low = 0.0 if fraction == 0 else max(centre - half, 0.0)
    high = 1.0 if fraction == 1 else min(centre + half, 1.0)
    return low, high


def share_of(
    successes: ArrayLike, *, groups: ArrayLike | None = None, unit: str = "fraction"
) -> Estimate:
    """Return the fraction of successes (n,), each 0 or 1, with Wilson's 95 % interval.

    With groups, Wilson's formula takes an effective n and Student's quantile (Dean & Pagano 2015).
    The effective n is the number of independent values with the same standard error, which is that
    of the delete-a-group jackknife. If all values are equal, it is the number of groups.

    groups (n,): the group of each value, if values of one group are not independent.
    """
    vector = _vector(successes)
    sums, counts = by_group(vector, groups)
    total = round(float(vector.sum()))
    if len(sums) == len(vector):
        return wilson(total, len(vector), unit=unit)
    fraction = total / len(vector)
    if total in (0, len(vector)):
        low, high = _wilson_ends(fraction, len(sums), _Z)
    elif len(sums) == 1:
        # one group says nothing about others
        low = 0.0
        high = 1.0
    else:
        error = float(jackknife_error(sums, counts))
        variance_of_one = fraction * (1 - fraction)
        independent = min(variance_of_one / max(error, ROUNDING) ** 2, len(vector))
        low, high = _wilson_ends(fraction, independent, student_quantile(counts))
    return Estimate(fraction, low, high, len(vector), unit)


def bootstrap_mean(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    unit: str = "fraction",
    least: float = -math.inf,
    most: float = math.inf,
) -> Estimate:
    """Return the mean of values (n,) with its 95 % bootstrap interval.

    There is no interval for fewer than 2 values (or groups). See `mean_interval`.

    groups (n,): the group of each value. Whole groups are drawn, because values of one group are
        not independent.
    least, most: the smallest and largest possible value, which bound the interval.
    """
    sums, counts = by_group(_vector(values), groups)
    mean = float(sums.sum() / counts.sum())
    n = int(counts.sum())
    interval = mean_interval(sums, counts, seed=seed, draws=draws)
    if interval is None:
        return Estimate(mean, n=n, unit=unit)
    low, high = interval
    return Estimate(mean, max(float(low), least), min(float(high), most), n, unit)


def student_mean(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    unit: str = "fraction",
    least: float = -math.inf,
    most: float = math.inf,
) -> Estimate:
    """Return the mean of values (n,) with Student's 95 % interval.

    There is no interval for fewer than 2 values (or groups).

    groups (n,): the group of each value. The error is then that of the delete-a-group jackknife.
    least, most: the smallest and largest possible value, which bound the interval.
    """
    sums, counts = by_group(_vector(values), groups)
    mean = float(sums.sum() / counts.sum())
    n = int(counts.sum())
    if len(sums) < 2:
        return Estimate(mean, n=n, unit=unit)
    half = student_quantile(counts) * float(jackknife_error(sums, counts))
    return Estimate(mean, max(mean - half, least), min(mean + half, most), n, unit)


def student_test(values: ArrayLike, *, groups: ArrayLike | None = None) -> float:
    """Return the two-sided p-value of Student's t test that the mean of values (n,) is 0.

    It is 1 for a single value or group.

    groups (n,): the group of each value, see `student_mean`.
    """
    from scipy.special import stdtr

    sums, counts = by_group(_vector(values), groups)
    if len(sums) < 2 or not sums.any():
        return 1.0
    mean = float(sums.sum() / counts.sum())
    error = max(float(jackknife_error(sums, counts)), np.finfo(float).tiny)
    return 2 * float(stdtr(degrees_of_freedom(counts), -abs(mean) / error))


def welch(
    first: ArrayLike, second: ArrayLike, *, unit: str, most: float = math.inf
) -> tuple[Estimate, float]:
    """Return the difference of the means of two independent samples, and its two-sided p-value.

    The interval and the p-value are Welch's (1947). There is no interval, and the p-value is 1, for
    a single value and for samples without variation. The n of the result is that of both samples.

    most: the largest possible difference, in either direction.
    """
    from scipy import stats

    samples = (_vector(first), _vector(second))
    difference = float(samples[0].mean() - samples[1].mean())
    n = len(samples[0]) + len(samples[1])
    without_interval = Estimate(difference, n=n, unit=unit), 1.0
    if min(map(len, samples)) < 2:
        return without_interval
    squared_errors = np.array([sample.var(ddof=1) / len(sample) for sample in samples])
    error = float(np.sqrt(squared_errors.sum()))
    if error <= ROUNDING * max(1.0, abs(difference)):
        return without_interval
    sample_freedom = np.array([len(sample) - 1 for sample in samples])
    freedom = error**4 / float((squared_errors**2 / sample_freedom).sum())
    half = error * float(stats.t.ppf(0.975, freedom))
    low = max(difference - half, -most)
    high = min(difference + half, most)
    p_value = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return Estimate(difference, low, high, n, unit), p_value


def bootstrap_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    seed: int = 0,
    unit: str = "fraction",
    most: float = math.inf,
) -> Estimate:
    """Return the mean of first - second with its paired 95 % bootstrap interval.

    first, second (n,): values on the same images.
    groups (n,): see `bootstrap_mean`.
    most: the largest possible difference, in either direction.
    """
    minuend = _vector(first)
    subtrahend = _vector(second)
    if len(minuend) != len(subtrahend):
        raise InputError(
            f"expected the same images twice, found {len(minuend)} and {len(subtrahend)} values"
        )
    return bootstrap_mean(
        minuend - subtrahend, groups=groups, seed=seed, unit=unit, least=-most, most=most
    )


def accuracy_difference(
    first: ArrayLike, second: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0
) -> Estimate:
    """Return the first accuracy minus the second in points, with its paired bootstrap interval.

    If the difference is the same in all images (or groups), the bootstrap interval would have the
    width 0. The interval is then that of `half_of_constant`.

    first, second (n,): True for images that the model predicts correctly, for the same images.
    groups (n,): see `bootstrap_mean`.
    """
    first_points = 100 * np.asarray(first, dtype=np.float64)
    second_points = 100 * np.asarray(second, dtype=np.float64)
    difference = bootstrap_difference(
        first_points, second_points, groups=groups, seed=seed, unit="points", most=100.0
    )
    return _unless_constant(difference, first_points - second_points, groups)


def mean_points(points: ArrayLike, *, groups: ArrayLike | None = None) -> Estimate:
    """Return the mean change of correctness (100, 0 or -100 points) with Student's 95 % interval.

    groups (n,): see `student_mean`. For a change that is the same in all groups, see
    `half_of_constant`.
    """
    mean = student_mean(points, groups=groups, unit="points", least=-100.0, most=100.0)
    return _unless_constant(mean, points, groups)


def _unless_constant(mean: Estimate, points: ArrayLike, groups: ArrayLike | None) -> Estimate:
    """Return a mean change of correctness, with another interval if all groups have the same."""
    sums, counts = by_group(_vector(points), groups)
    if mean.low is None or np.ptp(sums / counts) > ROUNDING:
        return mean
    half = half_of_constant(mean.value, len(sums))
    low = max(mean.value - half, -100.0)
    high = min(mean.value + half, 100.0)
    return Estimate(mean.value, low, high, mean.n, "points")


def half_of_constant(value: float, groups: int) -> float:
    """Return half the interval's width, in points, of a change that is the same in all groups.

    Other groups may still differ. Their share is at most the upper end of Wilson's interval for no
    success in `groups`. Their change may be up to 100 points in the other direction.
    """
    largest_share = wilson(0, groups).high
    assert largest_share is not None
    return largest_share * (100 + abs(value))


@dataclass(frozen=True)
class Power:
    """The power of a paired comparison.

    error: the standard error of the mean difference.
    detectable: the smallest true difference that a two-sided test at LEVEL finds with the
        probability POWER.
    n: the number of images.
    groups: the number of independent groups of images.
    """

    error: float
    detectable: float
    n: int
    groups: int


def power_of(differences: ArrayLike, *, groups: ArrayLike | None = None) -> Power | None:
    """Return the minimal detectable effect of paired differences (n,) (Cohen 1988).

    It is computed with Student's quantiles. The result is None for fewer than 2 values (or groups).

    groups (n,): the group of each value, if values of one group are not independent.
    """
    values = _vector(differences)
    sums, counts = by_group(values, groups)
    if len(sums) < 2:
        return None
    error = float(jackknife_error(sums, counts))
    quantiles = student_quantile(counts, 1 - LEVEL / 2) + student_quantile(counts, POWER)
    return Power(error, quantiles * error, len(values), len(sums))


def median_of(
    values: ArrayLike, *, groups: ArrayLike | None = None, unit: str = "fraction"
) -> Estimate:
    """Return the median of values (n,) with its 95 % interval.

    The ends of the interval are order statistics, so it holds for any distribution (Conover 1999,
    section 3.2). There is none for fewer than 6 values (or groups).

    With groups, the share of values up to the median has an interval with the error of the
    delete-a-group jackknife. The order statistics at the ends of that interval are the ends for the
    median (Woodruff 1952).

    groups (n,): the group of each value, if values of one group are not independent.
    """
    from scipy import stats  # imported late: it takes half a second, and few runs need it

    vector = _vector(values)
    ordered = np.sort(vector)
    n = len(ordered)
    median = float(np.median(ordered))
    sums, counts = by_group((vector <= median).astype(np.float64), groups)
    # ordered[below], the lower end, has `below` values before it; a negative number: no interval
    below = -1
    if len(sums) == n:  # every value is a group
        # The number of values below the true median is binomial. `below` is the largest k with
        # P(number <= k) <= 0.025, and ppf returns the smallest k with P(number <= k) >= 0.025.
        below = int(stats.binom.ppf(0.025, n, 0.5))
        if stats.binom.cdf(below, n, 0.5) > 0.025:
            below -= 1
    elif enough_to_draw(counts):
        error_of_independent = 0.5 / math.sqrt(n)  # of the share of values up to the median
        error = max(float(jackknife_error(sums, counts)), error_of_independent)
        half = student_quantile(counts) * error * n  # of the interval, in values
        # the median is at the position (n - 1) / 2 of the sorted values
        below = math.floor((n - 1) / 2 - half)
    if below < 0:
        return Estimate(median, n=n, unit=unit)
    low = float(ordered[below])
    high = float(ordered[n - 1 - below])  # as far from the top as `low` from the bottom
    return Estimate(median, low, high, n, unit)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple tests (Holm 1979), in the same order.

    Reject hypotheses with an adjusted p of at most 0.05.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)  # the number of tests left: the smallest p has most
    never_falling = np.maximum.accumulate(p[order] * factors)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(never_falling, 1.0)
    return [float(value) for value in adjusted]


def fewest_images(tests: int) -> int:
    """Return the smallest number of images (or groups) with which one of several tests can succeed.

    The smallest possible two-sided p-value for sign flips of n differences is 2 / 2^n. Holm's
    correction multiplies it by the number of tests.
    """
    return 1 + math.ceil(math.log2(tests / LEVEL))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of equal accuracy of two models (McNemar 1947).

    only_first, only_second: the numbers of images that only this model classifies correctly.
    """
    from scipy import stats

    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    return float(stats.binomtest(only_first, discordant, 0.5).pvalue)


def paired_test(first: ArrayLike, second: ArrayLike, *, groups: ArrayLike | None = None) -> float:
    """Return the two-sided p-value of equal accuracy of two models on the same images.

    It is McNemar's exact test. With groups, it is the exact sign test over groups: a group counts
    once, for the model that is correct on more of its images.

    first, second (n,): True for images that the model predicts correctly.
    groups (n,): the group of each image, if images of one group are not independent.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    # per group, on how many more images the first model is correct
    net, _ = by_group(_vector(differences), groups)
    return mcnemar(only_first=int((net > 0).sum()), only_second=int((net < 0).sum()))


def calibration_test(confidences: ArrayLike, correct: int) -> float:
    """Return the two-sided p-value of calibration: predictions are correct with their confidence.

    It is exact for up to 5,000 predictions (the Poisson binomial distribution, Wang 1993). For more
    it is the normal approximation with continuity correction.

    confidences (n,): the confidence of each prediction, from 0 to 1.
    correct: the number of correct predictions.
    """
    vector = _vector(confidences)
    expected = float(vector.sum())
    distance = abs(correct - expected)
    if len(vector) > _MOST_EXACT:
        deviation = float(np.sqrt((vector * (1 - vector)).sum()))
        if deviation == 0:  # all confidences are 0 or 1: only one number of correct is possible
            return 1.0 if distance < 0.5 else 0.0
        corrected = max(0.0, distance - 0.5)
        return min(1.0, 2 * NormalDist().cdf(-corrected / deviation))
    probabilities = np.ones(1)  # of each number of correct predictions
    for confidence in vector:
        probabilities = np.convolve(probabilities, [1 - confidence, confidence])
    possible_counts = np.arange(len(probabilities))
    is_as_far = np.abs(possible_counts - expected) >= distance - ROUNDING
    return min(1.0, float(probabilities[is_as_far].sum()))


def _vector(values: ArrayLike) -> Numbers:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) == 0:
        raise InputError(f"expected values of shape (n,) with n > 0, found {vector.shape}")
    if not np.isfinite(vector).all():
        raise InputError("expected finite values, found NaN or infinity")
    return vector
