"""Intervals of an accuracy over training seeds and test images, and comparisons over training seeds.

Two models trained with several seeds each are compared by Welch's t test over the seeds: what is compared is how models
are trained, and three trainings are three observations, however many images they are tested on.

All models of a point are tested on the same images, so correct predictions form a table of seeds by images. For the
accuracy of one point both are random effects, as readers and cases are in multi-reader studies: in the two-way random-
effects model the variance of the grand mean is (mean square of seeds + of images - of the residual) / (seeds x images),
with Satterthwaite's (1946) degrees of freedom for Student's t. An interval over seeds alone would ignore the sampling
of test images; pooling all predictions would treat three predictions for one image as three images.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from vitlens.errors import InputError
from vitlens.uncertainty import LEVEL, POWER, Estimate, accuracy_difference, mcnemar, wilson


class Spread(NamedTuple):
    """Standard error of a table's mean (a fraction), and its degrees of freedom."""

    error: float
    freedom: float


class AccuracyDifference(NamedTuple):
    """A difference of accuracies in points with its 95 % interval, and its two-sided p-value; spread: over seeds,
    None for one seed and where nothing differs."""

    estimate: Estimate
    p: float
    spread: Spread | None = None

    def detectable(self, level: float = LEVEL) -> float | None:
        """The smallest true difference, in points, that a two-sided test at this level finds with probability POWER.

        By Student's t with the spread that was found (Cohen 1988): the quantiles of level and power add.
        """
        if self.spread is None:
            return None
        quantiles = stats.t.ppf([1 - level / 2, POWER], self.spread.freedom)
        return 100 * self.spread.error * float(quantiles.sum())


def accuracy_over_seeds(correct: ArrayLike) -> Estimate:
    """The mean accuracy (fraction) of correct (seeds, images) with an interval over both.

    Wilson's over the images for one seed, or where all predictions are correct or all wrong. n: images.
    """
    table = _table(correct)
    value, images = float(table.mean()), table.shape[1]
    spread = _spread(table)
    if spread is None:
        return wilson(round(float(table[0].sum())), images)
    half = spread.error * float(stats.t.ppf(0.975, spread.freedom))
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0), images)


def difference_over_seeds(first: ArrayLike, second: ArrayLike) -> AccuracyDifference:
    """The accuracy of the first minus the second's, both (seeds, images) of the same seeds and images: Welch's interval
    and test over seeds (Welch 1947).

    With one seed, where no seed differs from another of its model, and where no prediction differs: the paired
    bootstrap over images and McNemar's exact test, of the first seed.
    """
    first_table, second_table = _table(first), _table(second)
    if first_table.shape != second_table.shape:
        raise InputError(
            f"expected the same seeds and images twice, found {first_table.shape} and {second_table.shape}"
        )
    table = first_table - second_table
    value, images = 100 * float(table.mean()), table.shape[1]
    spread = _welch(first_table.mean(1), second_table.mean(1)) if table.any() else None
    if spread is None:
        p = mcnemar(int((table[0] > 0).sum()), int((table[0] < 0).sum()))
        return AccuracyDifference(accuracy_difference(first_table[0], second_table[0]), p)
    half = 100 * spread.error * float(stats.t.ppf(0.975, spread.freedom))
    p = 2 * float(stats.t.sf(abs(value) / (100 * spread.error), spread.freedom))
    return AccuracyDifference(
        Estimate(value, max(value - half, -100.0), min(value + half, 100.0), images, "points"), p, spread
    )


def _welch(first: NDArray[np.float64], second: NDArray[np.float64]) -> Spread | None:
    """The spread of the difference of two means over seeds, with Welch's degrees of freedom; None without any."""
    if len(first) < 2:
        return None
    parts = np.array([values.var(ddof=1) / len(values) for values in (first, second)])
    variance = float(parts.sum())
    if not variance:
        return None
    return Spread(float(np.sqrt(variance)), variance**2 / float(np.sum(parts**2) / (len(first) - 1)))


def _spread(table: NDArray[np.float64]) -> Spread | None:
    """The spread of the mean of (seeds, images); None for one seed, one image, or a constant table."""
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
    # where the residual mean square is the greatest, a variance component is negative and set to 0
    parts = np.array([seed, image, min(seed, image, other)])
    variance = float(parts[0] + parts[1] - parts[2])
    if not variance:  # equal means of all seeds and of all images
        return None
    return Spread(float(np.sqrt(variance / table.size)), variance**2 / float(np.sum(parts**2 / freedom)))


def _table(values: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise InputError(f"expected predictions of shape (seeds, images), none of them 0, found {table.shape}")
    return table
