"""Means of groups: jackknife errors, Student's quantiles, and bootstrap samples of groups."""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError

Numbers = NDArray[np.float64]


DRAWS = 10_000  # bootstrap samples, and sign flips
ROUNDING = 1e-9  # values that differ less are equal
_AT_ONCE = 4_000_000  # numbers drawn at a time: bounds memory to tens of megabytes
# numbers that are kept for the next interval, enough for 2,000 images; most take a byte
_MOST_CACHED = 20_000_000
# groups of equal size; with 5, even an expanded bootstrap interval covers only 91 %
_FEWEST_GROUPS_TO_DRAW = 6


def mean_interval(
    sums: Numbers, counts: Numbers, *, seed: int, draws: int = DRAWS
) -> tuple[Numbers, Numbers] | None:
    """Return the 95 % interval of the mean of values; None for fewer than 2 groups.

    Its ends are bootstrap quantiles over groups, expanded for the number of groups
    (`drawn_interval`). For fewer than 6 groups it is Student's interval, with the error of the
    delete-a-group jackknife. Groups of unequal size count as fewer.

    sums (groups, ...): the sum of the values in each group.
    counts (groups,): the number of values in each group.
    """
    if len(sums) < 2:  # all draws would be equal, and the interval of width 0 misleading
        return None
    if not enough_to_draw(counts):
        half = student_quantile(counts) * jackknife_error(sums, counts)
        mean = sums.sum(0) / counts.sum()
        return mean - half, mean + half
    return drawn_interval(resampled_means(sums, counts, seed=seed, draws=draws), counts)


def enough_to_draw(counts: Numbers) -> bool:
    """Return True if groups of these sizes are enough for a bootstrap interval."""
    return _effective_groups(counts) >= _FEWEST_GROUPS_TO_DRAW * (1 - ROUNDING)


def drawn_interval(drawn: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Return the 95 % interval of a statistic from its values (draws, ...) over bootstrap samples.

    A bootstrap interval of few groups is too narrow: its error divides by n instead of n - 1, and
    its quantiles are normal. Hesterberg (2015) takes the quantiles at the normal probability of
    -sqrt(n / (n - 1)) times Student's quantile, and at its complement.
    """
    # Hesterberg's factor is of the number of groups that are drawn, also of unequal size; the
    # quantile is wider for unequal sizes
    groups = len(counts)
    below = NormalDist().cdf(-math.sqrt(groups / (groups - 1)) * student_quantile(counts))
    low, high = np.quantile(drawn, [below, 1 - below], axis=0)
    return low, high


def _effective_groups(counts: Numbers) -> float:
    """Return the number of equal groups that are worth groups of these sizes (Kish 1965)."""
    return float(counts.sum() ** 2 / (counts**2).sum())


def degrees_of_freedom(counts: Numbers) -> float:
    """Return Student's degrees of freedom of a mean over groups of these sizes."""
    return max(_effective_groups(counts) - 1, 1.0)


def student_quantile(counts: Numbers, probability: float = 0.975) -> float:
    """Return the quantile of Student's t for a mean over groups of these sizes."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom(counts), probability))


def jackknife_error(sums: Numbers, counts: Numbers) -> Numbers:
    """Return the standard error of the mean over values, by leaving out one group at a time.

    All values have the same weight, as in the mean. For groups of one value it is the usual
    standard error.

    sums (groups, ...): the sum of the values in each group, of at least 2 groups.
    counts (groups,): the number of values in each group.
    """
    groups = len(counts)
    other_axes = [1] * (sums.ndim - 1)
    sizes = counts.reshape(groups, *other_axes)
    means_without = (sums.sum(0) - sums) / (counts.sum() - sizes)
    squares = ((means_without - means_without.mean(0)) ** 2).sum(0)
    error: Numbers = np.sqrt(squares * (groups - 1) / groups)
    return error


def resampled_means(sums: Numbers, counts: Numbers, *, seed: int, draws: int) -> Numbers:
    """Return the means (draws, ...) over bootstrap samples of groups.

    sums (groups, ...): the sum of the values in each group.
    counts (groups,): the number of values in each group.
    """
    means = np.empty((draws, *sums.shape[1:]))
    for start, multiplicities in _drawn_parts(seed, len(sums), draws):
        weights = multiplicities.astype(np.float64)  # (some of the draws, groups)
        # transposed, so that the division is along the first axis
        part = ((weights @ sums).T / (weights @ counts)).T
        means[start : start + len(weights)] = part
    return means


def resampled_deviations(
    residuals: Numbers, counts: Numbers, *, seed: int, draws: int
) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the deviations from the mean of `resampled_means`, and their standard errors.

    Both yielded arrays are (some of the draws, cases). The error is that of a ratio: the spread of
    a sample's residuals around its mean.

    residuals (groups, cases): the sum of each group minus its size times the mean.
    counts (groups,): the sizes of the groups.
    """
    groups = len(counts)
    are_equal = bool(np.ptp(counts) == 0)
    squares = residuals**2
    products = residuals * counts[:, None]
    for _, multiplicities in _drawn_parts(seed, groups, draws):
        weights = multiplicities.astype(np.float64)  # (some of the draws, groups)
        size = (weights @ counts)[:, None]  # the number of values in each sample
        deviations = (weights @ residuals) / size
        # The spread is the sum over groups of w (r - d c)², with the weight w, the residual r and
        # the size c of a group, and the deviation d:
        #   sum w (r - d c)² = sum w r² - 2 d sum w r c + d² sum w c²
        # As sum w r = d · size and sum w c = size, the last two terms are -2 d² c size and
        # + d² c size for a constant c.
        if are_equal:
            spread = weights @ squares - deviations**2 * size * counts[0]
        else:
            squared_sizes = (weights @ counts**2)[:, None]
            mixed = 2 * deviations * (weights @ products)
            spread = weights @ squares - mixed + deviations**2 * squared_sizes
        errors = np.sqrt(np.maximum(spread, 0) * groups / (groups - 1)) / size
        yield deviations, errors


def _drawn_parts(seed: int, size: int, draws: int) -> Iterable[tuple[int, NDArray[np.integer]]]:
    """Return the parts of `_parts`, cached if they are small."""
    if draws * size <= _MOST_CACHED:
        return _cached_parts(seed, size, draws)
    return _parts(seed, size, draws)


def _parts(seed: int, size: int, draws: int) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield the number of the first draw in a part, and how often each group was drawn.

    size: the number of groups. The second array is (draws in the part, size).
    """
    generator = np.random.default_rng(seed)
    for start, count in steps(draws, size):
        indices = generator.integers(0, size, size=(count, size))
        # one bincount for all draws: draw d counts in the numbers from d * size on
        row_offsets = size * np.arange(count)[:, None]
        multiplicities = np.bincount((indices + row_offsets).ravel(), minlength=count * size)
        yield start, multiplicities.reshape(count, size)


@lru_cache(maxsize=3)  # at most 60 MB; most numbers of a run are over the same images
def _cached_parts(seed: int, size: int, draws: int) -> tuple[tuple[int, NDArray[np.integer]], ...]:
    parts = []
    for start, multiplicities in _parts(seed, size, draws):
        dtype = np.min_scalar_type(multiplicities.max())
        parts.append((start, multiplicities.astype(dtype)))
    return tuple(parts)


def steps(draws: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the number of draws of each part; a draw has `size` numbers.

    Random draws depend on these parts, so they must not change.
    """
    step = max(1, _AT_ONCE // size)
    for start in range(0, draws, step):
        yield start, min(step, draws - start)


def by_group(values: Numbers, groups: ArrayLike | None) -> tuple[Numbers, Numbers]:
    """Return the sums (groups, ...) of values (n, ...), and their number in each group.

    Without groups, each value is a group.
    """
    if groups is None:
        return values, np.ones(len(values))
    names = np.asarray(groups)
    if names.shape != (len(values),):
        raise InputError(
            f"expected one group an image ({len(values)}), found groups of shape {names.shape}"
        )
    _, numbers = np.unique(names, return_inverse=True)
    group_of_value = numbers.ravel()  # some versions of numpy return it with another shape
    counts = np.bincount(group_of_value).astype(np.float64)
    sums = np.zeros((len(counts), *values.shape[1:]))
    np.add.at(sums, group_of_value, values)
    return sums, counts
