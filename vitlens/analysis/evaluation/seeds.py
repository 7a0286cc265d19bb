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
from numpy.typing import ArrayLike
from scipy import stats

from vitlens.uncertainty import LEVEL, POWER, Estimate, accuracy_difference, mcnemar, wilson


class AccuracyDifference(NamedTuple):
    """A difference of accuracies in points with its 95 % interval, and its two-sided p-value; spread: its standard
    error over seeds (a fraction) and the degrees of freedom, None for one seed and where nothing differs."""

    estimate: Estimate
    p: float
    spread: tuple[float, float] | None = None

    def detectable(self, level: float = LEVEL) -> float | None:
        """The smallest true difference, in points, that a two-sided test at this level finds with probability POWER.

        By Student's t with the spread that was found (Cohen 1988): the quantiles of level and power add.
        """
        if self.spread is None:
            return None
        error, freedom = self.spread
        return 100 * error * float(stats.t.ppf([1 - level / 2, POWER], freedom).sum())


def accuracy_over_seeds(correct: ArrayLike) -> Estimate:
    """The mean accuracy (fraction) of correct (seeds, images) with an interval over both.

    Wilson's over the images for one seed, or where all predictions are correct or all wrong. n: images.
    """
    table = np.asarray(correct, dtype=np.float64)
    (seeds, images), mean = table.shape, table.mean()
    alone = wilson(round(float(table[0].sum())), images)
    if min(seeds, images) < 2 or np.ptp(table) == 0:
        return alone
    by_seed, by_image = table.mean(1), table.mean(0)
    rest = table - by_seed[:, None] - by_image[None] + mean
    sums = [images * np.sum((by_seed - mean) ** 2), seeds * np.sum((by_image - mean) ** 2), np.sum(rest**2)]
    freedom = np.array([seeds - 1, images - 1, (seeds - 1) * (images - 1)])
    seed, image, other = np.array(sums) / freedom
    # where the residual mean square is the greatest, a variance component is negative and set to 0
    parts = np.array([seed, image, min(seed, image, other)])
    variance = float(parts[0] + parts[1] - parts[2])
    if not variance:  # equal means of all seeds and of all images
        return alone
    quantile = float(stats.t.ppf(0.975, variance**2 / float(np.sum(parts**2 / freedom))))
    half, value = float(np.sqrt(variance / table.size)) * quantile, float(mean)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0), images)


def difference_over_seeds(first: ArrayLike, second: ArrayLike) -> AccuracyDifference:
    """The accuracy of the first minus the second's, both (seeds, images) of the same seeds and images: Welch's interval
    and test over seeds (Welch 1947).

    With one seed, where no seed differs from another of its model, and where no prediction differs: the paired
    bootstrap over images and McNemar's exact test, of the first seed.
    """
    both = [np.asarray(each, dtype=np.float64) for each in (first, second)]
    table = both[0] - both[1]
    value, images = 100 * float(table.mean()), table.shape[1]
    variances = np.array([each.mean(1).var(ddof=1) / len(each) for each in both]) if len(table) > 1 else np.zeros(2)
    if not table.any() or not variances.any():
        p = mcnemar(int((table[0] > 0).sum()), int((table[0] < 0).sum()))
        return AccuracyDifference(accuracy_difference(both[0][0], both[1][0]), p)
    variance = float(variances.sum())
    error, freedom = float(np.sqrt(variance)), variance**2 / float(np.sum(variances**2) / (len(table) - 1))
    half, p = (
        100 * error * float(stats.t.ppf(0.975, freedom)),
        2 * float(stats.t.sf(abs(value) / (100 * error), freedom)),
    )
    estimate = Estimate(value, max(value - half, -100.0), min(value + half, 100.0), images, "points")
    return AccuracyDifference(estimate, p, (error, freedom))
