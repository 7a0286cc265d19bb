"""How sure a number is: intervals, paired tests, and the correction for many of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError

DRAWS = 10_000  # numerics: bootstrap and sign flips
LEVEL = 0.05  # of tests, after a correction where there are several
_AT_ONCE = 4_000_000  # numbers drawn at once: bounds memory to tens of megabytes
_Z = NormalDist().inv_cdf(0.975)  # normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    low, high: None where no interval is defined; n: images (or other units) it rests on; unit: "fraction",
    "points", "nats", "px", "" for a plain number.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = "fraction"


class Side(Enum):
    """On which side of something a number is shown to lie; UNDECIDED: intervals overlap, or there is none."""

    BELOW = -1
    UNDECIDED = 0
    ABOVE = 1


def beyond(estimate: Estimate, value: float) -> Side:
    """Whether an interval lies wholly above or below a value; a number without an interval (n = 1) shows neither."""
    if estimate.low is None or estimate.high is None or estimate.low <= value <= estimate.high:
        return Side.UNDECIDED
    return Side.ABOVE if estimate.low > value else Side.BELOW


def apart(one: Estimate, other: Estimate) -> Side:
    """Whether one interval lies wholly above or below another; numbers without intervals show neither."""
    if None in (one.low, one.high) or other.low is None or other.high is None:
        return Side.UNDECIDED
    above, below = beyond(one, other.high), beyond(one, other.low)
    return above if above is Side.ABOVE else below if below is Side.BELOW else Side.UNDECIDED


def values_and_ends(estimates: Iterable[Estimate]) -> list[list[float]]:
    """Values, lower and upper ends (3, estimates), as figures take them; the value for an end that is not defined."""
    known = list(estimates)
    return [
        [estimate.value for estimate in known],
        [estimate.value if estimate.low is None else estimate.low for estimate in known],
        [estimate.value if estimate.high is None else estimate.high for estimate in known],
    ]


def wilson(successes: int, n: int, *, unit: str = "fraction") -> Estimate:
    """A fraction with Wilson's 95 % interval (Wilson 1927). Raises InputError unless 0 <= successes <= n and n > 0."""
    if not 0 <= successes <= n or n == 0:
        raise InputError(f"expected 0 <= successes <= n with n > 0, found {successes} of {n}")
    z = _Z
    fraction = successes / n
    centre = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * float(np.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n)))
    # at the ends the formula gives 0 and 1 exactly, float arithmetic almost
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Estimate(fraction, low, high, n, unit)


def bootstrap_mean(
    values: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0, draws: int = DRAWS, unit: str = "fraction"
) -> Estimate:
    """The mean of values (n,) with its 95 % percentile bootstrap interval; none for fewer than 2 values (or groups).

    groups (n,): what values share; whole groups are drawn, so that images of one source do not count as many.
    """
    sums, counts = _by_group(_vector(values), groups)
    if len(sums) < 2:  # every draw is the same: an interval without width would call any number sure
        return Estimate(float(sums.sum() / counts.sum()), n=int(counts.sum()), unit=unit)
    generator = np.random.default_rng(seed)
    means = np.empty(draws)
    step = max(1, _AT_ONCE // len(sums))
    for start in range(0, draws, step):
        drawn = generator.integers(0, len(sums), size=(min(step, draws - start), len(sums)))
        means[start : start + step] = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()), unit)


def bootstrap_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    unit: str = "fraction",
) -> Estimate:
    """The mean of first - second, both (n,) over the same images, with its paired 95 % bootstrap interval."""
    one, two = _vector(first), _vector(second)
    if len(one) != len(two):
        raise InputError(f"expected the same images twice, found {len(one)} and {len(two)} values")
    return bootstrap_mean(one - two, groups=groups, seed=seed, draws=draws, unit=unit)


def median_of(values: ArrayLike, *, unit: str = "fraction") -> Estimate:
    """The median of values (n,) with the 95 % interval of its order statistics (Conover 1999, section 3.2).

    Nothing is assumed of their distribution; fewer than 6 values have no such interval.
    """
    from scipy import stats  # half a second, and most runs draw no such interval

    ordered = np.sort(_vector(values))
    n, middle = len(ordered), float(np.median(ordered))
    below = int(stats.binom.ppf(0.025, n, 0.5))  # values below the lower end, at most
    if stats.binom.cdf(below, n, 0.5) > 0.025:
        below -= 1
    if below < 0:
        return Estimate(middle, n=n, unit=unit)
    return Estimate(middle, float(ordered[below]), float(ordered[n - 1 - below]), n, unit)


def sign_flip_test(
    differences: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0, draws: int = DRAWS
) -> float:
    """Two-sided p-value that paired differences (n,) are centred on zero, by random flips of their signs.

    groups (n,): differences of one group flip together. The smallest p-value is 1 / (draws + 1).
    """
    sums, _ = _by_group(_vector(differences), groups)
    observed = abs(sums.sum()) * (1 - 1e-12)  # the same sum in another order counts as reached
    generator = np.random.default_rng(seed)
    reached = 0
    step = max(1, _AT_ONCE // len(sums))
    for start in range(0, draws, step):
        signs = generator.integers(0, 2, size=(min(step, draws - start), len(sums)), dtype=np.int8) * 2 - 1
        reached += int((np.abs(signs @ sums) >= observed).sum())
    return (reached + 1) / (draws + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): reject those at most 0.05. The order is kept."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return [float(value) for value in adjusted]


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value that two models are right equally often.

    only_first, only_second: images that only this model has right; the images on which they agree say nothing.
    """
    if only_first < 0 or only_second < 0:
        raise InputError(f"expected counts, found {only_first} and {only_second}")
    from scipy import stats

    discordant = only_first + only_second
    return 1.0 if discordant == 0 else float(stats.binomtest(only_first, discordant, 0.5).pvalue)


def _vector(values: ArrayLike) -> NDArray[np.float64]:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) == 0:
        raise InputError(f"expected values of shape (n,) with n > 0, found {vector.shape}")
    if not np.isfinite(vector).all():
        raise InputError("expected finite values, found NaN or infinity")
    return vector


def _by_group(values: NDArray[np.float64], groups: ArrayLike | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The sum of the values and their number in each group; without groups each value is its own."""
    if groups is None:
        return values, np.ones_like(values)
    names = np.asarray(groups)
    if names.shape != values.shape:
        raise InputError(f"expected one group a value ({len(values)}), found groups of shape {names.shape}")
    member = np.unique(names, return_inverse=True)[1].astype(np.intp)
    sums, counts = np.bincount(member, weights=values), np.bincount(member)
    return sums.astype(np.float64), counts.astype(np.float64)
