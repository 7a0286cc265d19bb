"""How sure an accuracy is that depends on the seed of the training as well as on the test images.

All models of a point answer the same test images, so answers form a table of seeds by images. Both are taken as drawn
at random, as readers and cases are where several people judge the same X-rays: a two-way random-effects model, whose
variance of the grand mean is (seeds' + images' - the rest's mean square) / (seeds x images), with the degrees of
freedom of Satterthwaite (1946) for Student's t. Averaging over seeds alone would leave out that other test images give
another accuracy; pooling all answers would take three answers to one image for three images.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from vitlens.errors import InputError
from vitlens.uncertainty import Estimate, bootstrap_difference, mcnemar, wilson


class AccuracyDifference(NamedTuple):
    """A difference of accuracies, in points with its 95 % interval, and the two-sided p-value that there is none."""

    estimate: Estimate
    p: float


def accuracy_over_seeds(correct: ArrayLike) -> Estimate:
    """Mean accuracy (fraction) of correct answers (seeds, images) with an interval that covers both.

    Wilson's over the images where there is one seed, or where all answers are right or all wrong. n: images.
    """
    table = _table(correct)
    value, images = float(table.mean()), table.shape[1]
    spread = _spread(table)
    if spread is None:
        return wilson(round(float(table[0].sum())), images)
    half = spread.error * float(stats.t.ppf(0.975, spread.freedom))
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0), images)


def difference_over_seeds(first: ArrayLike, second: ArrayLike) -> AccuracyDifference:
    """Accuracy of the first minus that of the second, both (seeds, images): the same seeds, the same images.

    With one seed: the paired bootstrap over images and McNemar's exact test.
    """
    one, two = _table(first), _table(second)
    if one.shape != two.shape:
        raise InputError(f"expected the same seeds and images twice, found {one.shape} and {two.shape}")
    table = one - two
    value, images = 100 * float(table.mean()), table.shape[1]
    spread = _spread(table)
    if spread is None:
        p = mcnemar(int((table[0] > 0).sum()), int((table[0] < 0).sum()))
        return AccuracyDifference(bootstrap_difference(100 * one[0], 100 * two[0], unit="points"), p)
    half = 100 * spread.error * float(stats.t.ppf(0.975, spread.freedom))
    p = 2 * float(stats.t.sf(abs(value) / (100 * spread.error), spread.freedom))
    return AccuracyDifference(Estimate(value, max(value - half, -100.0), min(value + half, 100.0), images, "points"), p)


class _Spread(NamedTuple):
    """Standard error of a table's mean, and its degrees of freedom."""

    error: float
    freedom: float


def _spread(table: NDArray[np.float64]) -> _Spread | None:
    """How far the mean of (seeds, images) may be off; None for one seed, one image, or a table of equal numbers."""
    seeds, images = table.shape
    if min(seeds, images) < 2 or np.ptp(table) == 0:
        return None
    mean, by_seed, by_image = table.mean(), table.mean(1), table.mean(0)
    rest = table - by_seed[:, None] - by_image[None] + mean
    squares = np.array(
        [images * np.sum((by_seed - mean) ** 2), seeds * np.sum((by_image - mean) ** 2), np.sum(rest**2)]
    )
    freedom = np.array([seeds - 1, images - 1, (seeds - 1) * (images - 1)])
    seed, image, other = squares / freedom
    # where the rest is the greatest a component's estimate is negative and taken as 0: the other one alone remains
    parts = np.array([seed, image, min(seed, image, other)])
    variance = float(parts[0] + parts[1] - parts[2])
    if not variance:  # equal means of all seeds and of all images
        return None
    return _Spread(float(np.sqrt(variance / table.size)), variance**2 / float(np.sum(parts**2 / freedom)))


def _table(values: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise InputError(f"expected answers of shape (seeds, images), none of them 0, found {table.shape}")
    return table
