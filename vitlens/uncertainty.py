"""Uncertainty: confidence intervals, paired tests, and the correction for multiple tests."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist
from typing import SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError

Numbers = NDArray[np.float64]
DRAWS = 10_000  # of bootstrap and sign flips
LEVEL = 0.05  # significance level, after the correction for multiple tests
POWER = 0.8  # probability with which a test finds the smallest effect that counts as detectable
_ROUNDING = 1e-9  # of a mean: values that spread less are the same
_AT_ONCE = 4_000_000  # numbers drawn at once: bounds memory to tens of megabytes
_KEPT = 20_000_000  # numbers kept for the next interval, mostly of a byte each: 2,000 images
_EXACT = 5000  # predictions up to which calibration is tested exactly
_Z = NormalDist().inv_cdf(0.975)  # normal quantile of a two-sided 95 % interval
_FEWEST_TO_DRAW = 6  # groups of equal size: of 5 even an expanded bootstrap interval covers 91 %


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    low, high: None where no interval is defined; n: number of images (or other units); unit:
    "fraction", "points", "nats", "px", "" for a plain number.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = "fraction"


class Side(Enum):
    """Whether a number is significantly below or above another; UNDECIDED: intervals overlap, or
    there is none.
    """

    BELOW = -1
    UNDECIDED = 0
    ABOVE = 1


def beyond(estimate: Estimate, value: float) -> Side:
    """Return whether an interval is entirely above or below a value; UNDECIDED for a number without
    an interval (n = 1).
    """
    if estimate.low is None or estimate.high is None or estimate.low <= value <= estimate.high:
        return Side.UNDECIDED
    return Side.ABOVE if estimate.low > value else Side.BELOW


def apart(first: Estimate, second: Estimate) -> Side:
    """Return whether the first interval is entirely above or below the second; UNDECIDED for
    numbers without intervals.
    """
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Side.UNDECIDED
    return (
        Side.ABOVE
        if first.low > second.high
        else Side.BELOW
        if first.high < second.low
        else Side.UNDECIDED
    )


def difference_of(first: Estimate, second: Estimate) -> Estimate:
    """Return the difference of two independent fractions in points, from their own intervals
    (Newcombe 1998, method 10).

    Of two on the same images the interval is too wide rather than too narrow. None where one has no
    interval.
    """
    gap = first.value - second.value
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Estimate(100 * gap, unit="points")
    down = np.hypot(first.value - first.low, second.high - second.value)
    up = np.hypot(first.high - first.value, second.value - second.low)
    return Estimate(
        100 * gap, 100 * (gap - float(down)), 100 * (gap + float(up)), second.n, "points"
    )


def in_points(difference: Estimate) -> Estimate:
    """Return a difference of fractions in percentage points; another as it is."""
    if difference.unit != "fraction":
        return difference
    low, high = (None if end is None else 100 * end for end in (difference.low, difference.high))
    return Estimate(100 * difference.value, low, high, difference.n, "points")


def widened(
    estimate: Estimate, looks: int, *, least: float = -math.inf, most: float = math.inf
) -> Estimate:
    """Return the interval of an estimate that is one of so many looks (Bonferroni, by the normal
    approximation).

    The extreme of many estimates is extreme partly by chance: at this width, all intervals hold
    with 95 %. least, most: the possible values, where the interval ends.
    """
    if estimate.low is None or estimate.high is None:
        return estimate
    factor = NormalDist().inv_cdf(1 - LEVEL / 2 / looks) / _Z
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

    independent: the number of sources where several of the n share one and only the total is known.
    The interval is that of as many observations: exact where all images of a source agree, else too
    wide. Raises InputError unless 0 <= successes <= n and n > 0.
    """
    if not 0 <= successes <= n or n == 0:
        raise InputError(f"expected 0 <= successes <= n with n > 0, found {successes} of {n}")
    low, high = _wilson_ends(successes / n, n if independent is None else independent, _Z)
    return Estimate(successes / n, low, high, n, unit)


def _wilson_ends(fraction: float, n: float, quantile: float) -> tuple[float, float]:
    squared = quantile * quantile
    centre = (fraction + squared / (2 * n)) / (1 + squared / n)
    error = math.sqrt(fraction * (1 - fraction) / n + squared / (4 * n * n))
    half = quantile / (1 + squared / n) * error
    # the formula gives exactly 0 and 1 at the ends; floating-point arithmetic does not
    low = 0.0 if fraction == 0 else max(centre - half, 0.0)
    high = 1.0 if fraction == 1 else min(centre + half, 1.0)
    return low, high


def share_of(
    successes: ArrayLike, *, groups: ArrayLike | None = None, unit: str = "fraction"
) -> Estimate:
    """Return the fraction of successes (n,), each 0 or 1, with Wilson's 95 % interval.

    groups (n,): of values that are not independent. n is then the number of independent values that
    have the standard error of the delete-a-group jackknife, and the quantile Student's (Dean &
    Pagano 2015). Without variation, or of a single group, it is the number of groups.
    """
    vector = _vector(successes)
    sums, counts = by_group(vector, groups)
    right = round(float(vector.sum()))
    if len(sums) == len(vector):
        return wilson(right, len(vector), unit=unit)
    fraction = right / len(vector)
    if right in (0, len(vector)):
        low, high = _wilson_ends(fraction, len(sums), _Z)
    elif len(sums) == 1:
        # nothing is known about other groups
        low = 0.0
        high = 1.0
    else:
        error = float(jackknife_error(sums, counts))
        independent = min(fraction * (1 - fraction) / max(error, _ROUNDING) ** 2, len(vector))
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
    """Return the mean of values (n,) with its 95 % bootstrap interval; none for fewer than 2 values
    (or groups).

    groups (n,): the group of each value; whole groups are drawn, as values of one group are not
    independent. least, most: the possible values, where the interval ends. See `mean_interval`.
    """
    sums, counts = by_group(_vector(values), groups)
    mean = float(sums.sum() / counts.sum())
    n = int(counts.sum())
    ends = mean_interval(sums, counts, seed=seed, draws=draws)
    if ends is None:
        return Estimate(mean, n=n, unit=unit)
    low, high = ends
    return Estimate(mean, max(float(low), least), min(float(high), most), n, unit)


def mean_interval(
    sums: Numbers, counts: Numbers, *, seed: int, draws: int = DRAWS
) -> tuple[Numbers, Numbers] | None:
    """Return the 95 % interval of the mean of values, from sums (groups, ...) and sizes (groups,)
    of their groups.

    Bootstrap quantiles over groups, expanded for their number (`drawn_interval`). Of fewer than 6
    groups of equal size, or unequal groups that are worth as few, Student's interval with the error
    of the delete-a-group jackknife. None for fewer than 2 groups.
    """
    if len(sums) < 2:  # all draws would be equal, and the interval of width 0 misleading
        return None
    if not enough_to_draw(counts):
        half = student_quantile(counts) * jackknife_error(sums, counts)
        mean = sums.sum(0) / counts.sum()
        return mean - half, mean + half
    return drawn_interval(resampled_means(sums, counts, seed=seed, draws=draws), counts)


def enough_to_draw(counts: Numbers) -> bool:
    """Return whether groups of these sizes are worth enough for a bootstrap interval."""
    return _worth(counts) >= _FEWEST_TO_DRAW * (1 - _ROUNDING)


def drawn_interval(drawn: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Return the 95 % interval of a statistic from its values (draws, ...) over bootstrap samples
    of groups.

    A bootstrap interval of few groups is too narrow: the error that it draws is that of n values
    where n - 1 are free, and its quantiles are normal. Hesterberg (2015) takes the quantiles at the
    normal probability of -sqrt(n / (n - 1)) times Student's quantile, and at its complement.
    """
    groups = len(counts)
    below = NormalDist().cdf(-math.sqrt(groups / (groups - 1)) * student_quantile(counts))
    low, high = np.quantile(drawn, [below, 1 - below], axis=0)
    return low, high


def _worth(counts: Numbers) -> float:
    """Return the number of groups of equal size that tell as much as groups of these sizes (Kish
    1965).
    """
    return float(counts.sum() ** 2 / (counts**2).sum())


def _freedom(counts: Numbers) -> float:
    return max(_worth(counts) - 1, 1.0)


def student_quantile(counts: Numbers, probability: float = 0.975) -> float:
    """Return the quantile of Student's t for a mean over groups of these sizes."""
    from scipy.special import stdtrit

    return float(stdtrit(_freedom(counts), probability))


def jackknife_error(sums: Numbers, counts: Numbers) -> Numbers:
    """Return the standard error of the mean over values, by leaving out each group: of groups of 1
    the usual one.

    sums (groups, ...), counts (groups,): of at least 2 groups. It weighs images alike, as the mean
    does.
    """
    groups = len(counts)
    sizes = counts.reshape(-1, *[1] * (sums.ndim - 1))
    without = (sums.sum(0) - sums) / (counts.sum() - sizes)
    squares = ((without - without.mean(0)) ** 2).sum(0)
    error: Numbers = np.sqrt(squares * (groups - 1) / groups)
    return error


def resampled_means(sums: Numbers, counts: Numbers, *, seed: int, draws: int) -> Numbers:
    """Return the means (draws, ...) over bootstrap samples of groups, of their sums (groups, ...)
    and sizes (groups,).
    """
    size = len(sums)
    means = np.empty((draws, *sums.shape[1:]))
    for start, drawn in _drawn_parts(seed, size, draws):
        times = drawn.astype(np.float64)
        means[start : start + len(times)] = ((times @ sums).T / (times @ counts)).T
    return means


def resampled_deviations(
    residuals: Numbers, counts: Numbers, *, seed: int, draws: int
) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield how far means over the samples of `resampled_means` are from the mean, and the standard
    errors of these.

    residuals (groups, cases): each group's sum minus its size times the mean; counts (groups,):
    their sizes. Yields (some of the draws, cases) each. The error is that of a ratio: the spread of
    a sample's residuals from its mean.
    """
    groups = len(counts)
    alike = bool(np.ptp(counts) == 0)
    squares = residuals**2
    products = residuals * counts[:, None]
    for _, drawn in _drawn_parts(seed, groups, draws):
        times = drawn.astype(np.float64)
        size = (times @ counts)[:, None]
        deviations = (times @ residuals) / size
        if alike:
            spread = times @ squares - deviations**2 * size * counts[0]
        else:
            of_sizes = (times @ counts**2)[:, None]
            spread = (
                times @ squares - 2 * deviations * (times @ products) + deviations**2 * of_sizes
            )
        errors = np.sqrt(np.maximum(spread, 0) * groups / (groups - 1)) / size
        yield deviations, errors


def _drawn_parts(seed: int, size: int, draws: int) -> Iterable[tuple[int, NDArray[np.integer]]]:
    return _kept_parts(seed, size, draws) if draws * size <= _KEPT else _parts(seed, size, draws)


def _parts(seed: int, size: int, draws: int) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield how often each of so many groups was drawn, (some of the draws, size), and the first of
    these draws.
    """
    generator = np.random.default_rng(seed)
    for start, count in steps(draws, size):
        drawn = generator.integers(0, size, size=(count, size))
        times = np.bincount(
            (drawn + size * np.arange(count)[:, None]).ravel(), minlength=count * size
        )
        yield start, times.reshape(count, size)


@lru_cache(maxsize=3)  # 60 MB at most; a run has several numbers of the same images
def _kept_parts(seed: int, size: int, draws: int) -> tuple[tuple[int, NDArray[np.integer]], ...]:
    return tuple(
        (start, times.astype(np.min_scalar_type(times.max())))
        for start, times in _parts(seed, size, draws)
    )


def steps(draws: int, size: int) -> Iterator[tuple[int, int]]:
    """Return where a part of the draws of so many numbers begins, and how many it has: the parts
    determine the draws.
    """
    step = max(1, _AT_ONCE // size)
    return ((start, min(step, draws - start)) for start in range(0, draws, step))


def student_mean(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    unit: str = "fraction",
    least: float = -math.inf,
    most: float = math.inf,
) -> Estimate:
    """Return the mean of values (n,) with Student's 95 % interval; none for fewer than 2 values (or
    groups).

    groups (n,): the group of each value; the error is that of the delete-a-group jackknife. least,
    most: the possible values, where the interval ends.
    """
    sums, counts = by_group(_vector(values), groups)
    mean = float(sums.sum() / counts.sum())
    n = int(counts.sum())
    if len(sums) < 2:
        return Estimate(mean, n=n, unit=unit)
    half = student_quantile(counts) * float(jackknife_error(sums, counts))
    return Estimate(mean, max(mean - half, least), min(mean + half, most), n, unit)


def student_test(values: ArrayLike, *, groups: ArrayLike | None = None) -> float:
    """Return the two-sided p of Student's t test that the mean of values (n,) is 0; 1 for a single
    value or group.

    groups (n,): the group of each value, see `student_mean`.
    """
    from scipy.special import stdtr

    sums, counts = by_group(_vector(values), groups)
    if len(sums) < 2 or not sums.any():
        return 1.0
    mean = float(sums.sum() / counts.sum())
    error = max(float(jackknife_error(sums, counts)), np.finfo(float).tiny)
    return 2 * float(stdtr(_freedom(counts), -abs(mean) / error))


def welch(
    first: ArrayLike, second: ArrayLike, *, unit: str, most: float = math.inf
) -> tuple[Estimate, float]:
    """Return the difference of the means of two independent samples with its 95 % interval, and its
    two-sided p-value.

    By Welch's t (1947); no interval and 1 where one has a single value or neither varies. most: the
    largest possible difference, on either side. n: of both together.
    """
    from scipy import stats

    one = _vector(first)
    other = _vector(second)
    gap = float(one.mean() - other.mean())
    n = len(one) + len(other)
    if min(len(one), len(other)) < 2:
        return Estimate(gap, n=n, unit=unit), 1.0
    parts = np.array([each.var(ddof=1) / len(each) for each in (one, other)])
    error = float(np.sqrt(parts.sum()))
    if error <= _ROUNDING * max(1.0, abs(gap)):
        return Estimate(gap, n=n, unit=unit), 1.0
    freedom = error**4 / float((parts**2 / np.array([len(one) - 1, len(other) - 1])).sum())
    half = error * float(stats.t.ppf(0.975, freedom))
    low = max(gap - half, -most)
    high = min(gap + half, most)
    return Estimate(gap, low, high, n, unit), 2 * float(stats.t.sf(abs(gap) / error, freedom))


def bootstrap_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    seed: int = 0,
    unit: str = "fraction",
    most: float = math.inf,
) -> Estimate:
    """Return the mean of first - second, both (n,) over the same images, with its paired 95 %
    bootstrap interval.

    groups (n,): see `bootstrap_mean`; most: the largest possible difference, on either side.
    """
    one = _vector(first)
    other = _vector(second)
    if len(one) != len(other):
        raise InputError(
            f"expected the same images twice, found {len(one)} and {len(other)} values"
        )
    return bootstrap_mean(one - other, groups=groups, seed=seed, unit=unit, least=-most, most=most)


def accuracy_difference(
    first: ArrayLike, second: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0
) -> Estimate:
    """Return the accuracy of the first minus the second's in points, with its paired 95 % bootstrap
    interval.

    first, second (n,): whether each of the same images is correct; groups (n,): see
    `bootstrap_mean`. Where the difference is the same in all images (or groups), the interval's
    width would be 0: it is then that where a share of them differs, the upper end of Wilson's
    interval.
    """
    one, other = (100 * np.asarray(correct, dtype=np.float64) for correct in (first, second))
    difference = bootstrap_difference(
        one, other, groups=groups, seed=seed, unit="points", most=100.0
    )
    return _unless_constant(difference, one - other, groups)


def mean_points(points: ArrayLike, *, groups: ArrayLike | None = None) -> Estimate:
    """Return the mean change of correctness, each of 100, 0 or -100 points, with Student's 95 %
    interval.

    groups (n,): see `student_mean`. Where it is the same in all groups, see `half_of_constant`.
    """
    mean = student_mean(points, groups=groups, unit="points", least=-100.0, most=100.0)
    return _unless_constant(mean, points, groups)


def _unless_constant(mean: Estimate, points: ArrayLike, groups: ArrayLike | None) -> Estimate:
    """Return a mean change of correctness, with another interval where all groups have the same."""
    sums, counts = by_group(_vector(points), groups)
    if mean.low is None or np.ptp(sums / counts) > _ROUNDING:
        return mean
    half = half_of_constant(mean.value, len(sums))
    return Estimate(
        mean.value, max(mean.value - half, -100.0), min(mean.value + half, 100.0), mean.n, "points"
    )


def half_of_constant(value: float, groups: int) -> float:
    """Return half the width of the interval of a change of correctness that is the same in all
    groups, in points.

    Of such groups a share may differ that is as large as the upper end of Wilson's interval of none
    of them.
    """
    bound = wilson(0, groups).high
    assert bound is not None
    return bound * (100 + abs(value))


@dataclass(frozen=True)
class Power:
    """What a paired comparison can see: error: the standard error of the mean difference;
    detectable: the smallest true difference that a two-sided test at LEVEL finds with a probability
    of POWER; n: images, groups: independent ones.
    """

    error: float
    detectable: float
    n: int
    groups: int


def power_of(differences: ArrayLike, *, groups: ArrayLike | None = None) -> Power | None:
    """Return the minimal detectable effect of paired differences (n,), by Student's quantiles
    (Cohen 1988).

    groups (n,): of images that are not independent. None for fewer than 2 values (or groups).
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
    """Return the median of values (n,) with its 95 % interval, which fewer than 6 values (or
    groups) do not have.

    The interval is the distribution-free one of order statistics (Conover 1999, section 3.2).
    groups (n,): of values that are not independent; the order statistics are then those at the ends
    of the interval of the share of values up to the median (Woodruff 1952), with the error of the
    delete-a-group jackknife.
    """
    from scipy import stats  # imported late: it takes half a second, and few runs need it

    vector = _vector(values)
    ordered = np.sort(vector)
    n = len(ordered)
    middle = float(np.median(ordered))
    sums, counts = by_group((vector <= middle).astype(np.float64), groups)
    if len(sums) < n:
        if not enough_to_draw(counts):
            return Estimate(middle, n=n, unit=unit)
        error = max(float(jackknife_error(sums, counts)), 0.5 / math.sqrt(n))
        beyond_middle = student_quantile(counts) * error * n
        down = math.floor((n - 1) / 2 - beyond_middle)
        if down < 0:
            return Estimate(middle, n=n, unit=unit)
        return Estimate(middle, float(ordered[down]), float(ordered[n - 1 - down]), n, unit)
    below = int(stats.binom.ppf(0.025, n, 0.5))  # largest number of values below the lower end
    if stats.binom.cdf(below, n, 0.5) > 0.025:
        below -= 1
    if below < 0:
        return Estimate(middle, n=n, unit=unit)
    return Estimate(middle, float(ordered[below]), float(ordered[n - 1 - below]), n, unit)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple tests (Holm 1979), in the given order: reject those of at most
    0.05.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return [float(value) for value in adjusted]


def fewest_images(tests: int) -> int:
    """Return the smallest number of images (or groups) with which one of these tests can be
    significant.

    Of n differences the smallest two-sided p by sign flips is 2 / 2^n; Holm's correction multiplies
    it by the tests.
    """
    return 1 + math.ceil(math.log2(tests / LEVEL))


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of the hypothesis that two models have equal accuracy (McNemar 1947),
    from the numbers of images that only the first, and only the second, classifies correctly.
    """
    from scipy import stats

    discordant = only_first + only_second
    return 1.0 if discordant == 0 else float(stats.binomtest(only_first, discordant, 0.5).pvalue)


def paired_test(first: ArrayLike, second: ArrayLike, *, groups: ArrayLike | None = None) -> float:
    """Return the two-sided p-value of the hypothesis that two models are correct equally often on
    the same images.

    first, second (n,): whether each is correct. McNemar's exact test; with groups (n,) of images
    that are not independent, the exact sign test of the groups: each counts once, for the model
    that is correct on more of it.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    net, _ = by_group(_vector(differences), groups)
    return mcnemar(int((net > 0).sum()), int((net < 0).sum()))


def calibration_test(confidences: ArrayLike, correct: int) -> float:
    """Two-sided p-value of the hypothesis that each of n predictions is correct with the
    probability of its confidence.

    confidences: (n,), fractions; correct: how many predictions are. Exact (the Poisson binomial
    distribution, Wang 1993) up to 5,000 predictions, beyond that by the normal approximation with
    continuity correction.
    """
    each = _vector(confidences)
    mean = float(each.sum())
    far = abs(correct - float(each.sum()))
    if len(each) > _EXACT:
        spread = float(np.sqrt((each * (1 - each)).sum()))
        return 1.0 if spread == 0 else min(1.0, 2 * NormalDist().cdf(-max(0.0, far - 0.5) / spread))
    chances = np.ones(1)
    for confidence in each:
        chances = np.convolve(chances, [1 - confidence, confidence])
    return min(1.0, float(chances[np.abs(np.arange(len(chances)) - mean) >= far - 1e-9].sum()))


def _vector(values: ArrayLike) -> Numbers:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) == 0:
        raise InputError(f"expected values of shape (n,) with n > 0, found {vector.shape}")
    if not np.isfinite(vector).all():
        raise InputError("expected finite values, found NaN or infinity")
    return vector


def by_group(values: Numbers, groups: ArrayLike | None) -> tuple[Numbers, Numbers]:
    """Return the sums (groups, ...) of values (n, ...), and their number in each group; without
    groups each is its own.
    """
    if groups is None:
        return values, np.ones(len(values))
    names = np.asarray(groups)
    if names.shape != (len(values),):
        raise InputError(
            f"expected one group an image ({len(values)}), found groups of shape {names.shape}"
        )
    member = np.unique(names, return_inverse=True)[1].ravel()
    counts = np.bincount(member).astype(np.float64)
    sums = np.zeros((len(counts), *values.shape[1:]))
    np.add.at(sums, member, values)
    return sums, counts
