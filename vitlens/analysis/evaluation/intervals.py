"""Means of many numbers at once, with intervals and tests.

The numbers are rows that share the draws, or running sums. The draws of bootstrap and sign flips
are those of `resampling` with the same seed, so a row has the same interval without the others.

Training seeds. Two kinds of training, each with several seeds, are compared by Welch's t test over
the seeds. Three trainings are three observations, however many images they are tested on. All
models are tested on the same images.

The accuracy of one kind of training has seeds and images as random effects, like readers and cases
in multi-reader studies. In the two-way random-effects model, the variance of the grand mean is
(mean square of seeds + of images - of the residual) / (seeds x images), with Satterthwaite's (1946)
degrees of freedom. An interval over seeds only would ignore the sampling of test images. Pooling
all predictions would treat three predictions for one image as three images.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor

from vitlens import resampling
from vitlens.errors import InputError
from vitlens.resampling import DRAWS, Numbers
from vitlens.uncertainty import LEVEL, POWER, Estimate, accuracy_difference, paired_test, share_of

ByRow = Float[Tensor, "cases batch"]
Rows = Float[Tensor, " cases"]
Key = tuple[str, int]  # statistic, layer
_MEMBERS: Final[Key] = ("", 0)  # the key of the number of images in each group
_ROUNDING: Final = 1e-9  # values that spread less, as a part of their mean, are equal
_BEYOND: Final = 1e300  # stands for Student's t of values that do not vary
_AT_ONCE: Final = 4_000_000  # drawn means at a time: bounds memory to tens of megabytes


def resampled_means(
    values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS
) -> Float[Tensor, "draws cases"]:
    """Return the means of values (cases, n) over bootstrap samples of images, or of groups (n,)."""
    sums, counts = _by_group(values, groups)
    return torch.from_numpy(resampling.resampled_means(sums, counts, seed=seed, draws=draws))


def intervals(
    values: ByRow,
    *,
    groups: Tensor | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    least: float = -math.inf,
    most: float = math.inf,
) -> tuple[Rows, Rows]:
    """Return low and high of the 95 % interval of each row (`mean_interval`).

    Both are NaN for fewer than 2 images (or groups).

    groups (n,): the group of each image, if images of one group are not independent.
    least, most: the smallest and largest possible value, which bound the intervals.
    """
    sums, counts = _by_group(values, groups)
    ends = resampling.mean_interval(sums, counts, seed=seed, draws=draws)
    if ends is None:
        undefined = torch.full((len(values),), torch.nan, dtype=torch.float64)
        return undefined, undefined
    low, high = ends
    return torch.from_numpy(low).clamp_min(least), torch.from_numpy(high).clamp_max(most)


def estimates(
    values: ByRow,
    *,
    groups: Tensor | None = None,
    seed: int = 0,
    unit: str = "fraction",
    least: float = -math.inf,
    most: float = math.inf,
) -> list[Estimate]:
    """Return the mean of each row (cases, n), with its interval if that is defined.

    least, most: the smallest and largest possible value, which bound the intervals.
    """
    lows, highs = intervals(values, groups=groups, seed=seed, least=least, most=most)
    n = values.shape[1]
    means = values.double().mean(1).tolist()
    if lows.isnan().any():  # then all are
        return [Estimate(mean, n=n, unit=unit) for mean in means]
    return [
        Estimate(mean, low, high, n, unit)
        for mean, low, high in zip(means, lows.tolist(), highs.tolist())
    ]


def sign_flips(
    values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS
) -> Rows:
    """Return two-sided p-values that each row (cases, n) is centred on zero.

    The signs of a group's values are flipped together.
    """
    sums, _ = _by_group(values, groups)
    # slightly reduced, so that the same sum with another rounding counts as at least as large
    observed = np.abs(sums.sum(0)) * (1 - 1e-12)
    generator = np.random.default_rng(seed)
    at_least_observed = np.zeros(sums.shape[1])
    for _, count in resampling.steps(draws, len(sums)):
        # 0 and 1 become -1 and 1
        signs = generator.integers(0, 2, size=(count, len(sums)), dtype=np.int8) * 2 - 1
        at_least_observed += (np.abs(signs @ sums) >= observed).sum(0)
    return torch.from_numpy((at_least_observed + 1) / (draws + 1))


def mean_test(
    values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS
) -> Rows:
    """Return two-sided p-values that the mean of each row (cases, n) is zero.

    It is the larger of two: `sign_flips` holds for symmetric differences, `studentized_p_values`
    for skewed ones.
    """
    by_sign_flips = sign_flips(values, groups=groups, seed=seed, draws=draws)
    by_bootstrap = studentized_p_values(values, groups=groups, seed=seed, draws=draws)
    return torch.maximum(by_sign_flips, by_bootstrap)


def studentized_p_values(
    values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS
) -> Rows:
    """Return two-sided p-values that row means are zero, by the bootstrap-t (Hall 1988).

    Sign flips assume symmetric differences: for 8 skewed ones they reject in 10 % of the cases
    instead of 5 %. Here the draws have the skewness of the data. The smaller tail is doubled.

    groups (n,): the group of each image. Whole groups are drawn.
    """
    sums, counts = _by_group(values, groups)  # sums (groups, cases): rows of values are columns
    mean = sums.sum(0) / counts.sum()
    residuals = sums - counts[:, None] * mean
    observed = _ratio(mean, resampling.jackknife_error(sums, counts), scale=mean)
    above = np.zeros(len(mean))
    below = np.zeros(len(mean))
    rows_at_once = max(1, _AT_ONCE // draws)
    for start in range(0, len(mean), rows_at_once):
        columns = slice(start, start + rows_at_once)
        observed_t = observed[columns]
        tolerance = _ROUNDING * np.abs(observed_t)
        drawn = resampling.resampled_deviations(
            residuals[:, columns], counts, seed=seed, draws=draws
        )
        for deviations, errors in drawn:
            drawn_t = _ratio(deviations, errors, scale=mean[columns])
            above[columns] += (drawn_t >= observed_t - tolerance).sum(0)
            below[columns] += (drawn_t <= observed_t + tolerance).sum(0)
    tail = (np.minimum(above, below) + 1) / (draws + 1)
    return torch.from_numpy(np.minimum(2 * tail, 1.0))


def _ratio(difference: Numbers, error: Numbers, *, scale: Numbers) -> Numbers:
    """Return difference / error, Student's t.

    If the error is only rounding, at this scale of the values, the ratio is a very large number
    with the sign of the difference. It is 0 if there is also no difference.
    """
    rounding = _ROUNDING * np.abs(scale)
    sign = np.where(np.abs(difference) > rounding, np.sign(difference), 0.0)
    without_error = _BEYOND * sign
    ratio: Numbers = np.divide(difference, error, out=without_error, where=error > rounding)
    return ratio


def spearman(first: ByRow, second: ByRow) -> Rows:
    """Return Spearman's correlation of each row (cases, n) of two tables.

    Ties have their mean rank. The correlation is NaN if one row is constant or has a NaN, and for
    fewer than two values.
    """
    if first.shape[1] < 2:
        return torch.full((len(first),), torch.nan, dtype=torch.float64)
    first_ranks = _centred_ranks(first)
    second_ranks = _centred_ranks(second)
    lengths = np.sqrt((first_ranks**2).sum(1)) * np.sqrt((second_ranks**2).sum(1))
    products = (first_ranks * second_ranks).sum(1)
    undefined = np.full(len(lengths), np.nan)
    return torch.from_numpy(np.divide(products, lengths, out=undefined, where=lengths > 0))


def _centred_ranks(values: ByRow) -> Numbers:
    ranks = stats.rankdata(values.detach().cpu().double().numpy(), axis=1)
    centred: Numbers = ranks - ranks.mean(1, keepdims=True)
    return centred


def sizes_of_groups(images: int, groups: Tensor | None) -> Numbers:
    """Return the number of images in each group, float64.

    Without groups each image is one group.
    """
    _, counts = _by_group(torch.ones(1, images), groups)
    return counts


def _by_group(values: ByRow, groups: Tensor | None) -> tuple[Numbers, Numbers]:
    """Return sums (groups, cases) and numbers of images (groups,).

    Without groups each image is one group.
    """
    columns = values.detach().cpu().double().numpy().T
    if not len(columns) or not np.isfinite(columns).all():
        raise InputError(
            "expected finite values of at least one image, found NaN, infinity or none"
        )
    members = None if groups is None else groups.cpu().numpy()
    return resampling.by_group(columns, members)


@dataclass
class Moments:
    """Sums and sums of squares over images, float64, of named numbers per layer.

    Memory does not grow with images. Moments of different images are joined by adding all numbers.
    Images of one group (cluster) are not independent, so intervals are over groups.

    count: the number of images.
    sums, squares (heads,): the sums and sums of squares by (name, layer).
    clusters: the number of groups of images, 0 if each image is independent.
    cluster_sums (clusters, heads): the sums over the images of each group by (name, layer). Under
        _MEMBERS, the number of images of each group.
    """

    count: int = 0
    sums: dict[Key, Tensor] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)
    clusters: int = 0
    cluster_sums: dict[Key, Tensor] = field(default_factory=dict)

    def add(
        self, values: Mapping[Key, Tensor], images: int, *, groups: Tensor | None = None
    ) -> None:
        """Add a batch.

        values (images, heads): the values by name and layer.
        images: the number of images.
        groups (images,): the group of each image, from 0 to clusters - 1.
        """
        exact = {key: value.detach().double().cpu() for key, value in values.items()}
        for key, value in exact.items():
            _add_to(self.sums, key, value.sum(0))
            _add_to(self.squares, key, value.square().sum(0))
        if self.clusters and groups is not None:
            # summed over a group, ones are the number of its images
            ones = torch.ones(images, 1, dtype=torch.float64)
            for key, value in {_MEMBERS: ones, **exact}.items():
                zeros = torch.zeros(self.clusters, value.shape[1], dtype=torch.float64)
                sums = self.cluster_sums.get(key, zeros)
                self.cluster_sums[key] = sums.index_add(0, groups.cpu(), value)
        self.count += images

    def mean(self, key: Key) -> Tensor:
        """Return the mean over images, (heads,)."""
        return self.sums[key] / self.count

    def half_width(self, key: Key) -> Tensor:
        """Return half the width of Student's 95 % interval of the mean, (heads,).

        It is NaN for one image or one group.
        """
        undefined = torch.full_like(self.sums[key], torch.nan)
        if self.clusters:
            members = self.cluster_sums[_MEMBERS][:, 0]
            has_images = members > 0
            counts = members[has_images].numpy()
            if len(counts) < 2:
                return undefined
            sums = self.cluster_sums[key][has_images].numpy()
            error = torch.from_numpy(resampling.jackknife_error(sums, counts))
        else:
            counts = np.ones(self.count)
            if len(counts) < 2:
                return undefined
            spread = self.squares[key] - self.sums[key].square() / self.count
            error = (spread.clamp_min(0) / (self.count - 1) / self.count).sqrt()
        half: Tensor = resampling.student_quantile(counts) * error
        return half

    def ends(
        self, key: Key, *, least: float = -math.inf, most: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Return both ends (heads,) of the 95 % interval of the mean, within the possible values.

        They are NaN for one image or one group.
        """
        mean = self.mean(key)
        half = self.half_width(key)
        return (mean - half).clamp_min(least), (mean + half).clamp_max(most)

    def estimate(
        self, key: Key, index: int, unit: str, *, least: float = -math.inf, most: float = math.inf
    ) -> Estimate:
        """Return the mean over images of one number with its 95 % interval.

        A single image has no interval.
        """
        value = float(self.mean(key)[index])
        lows, highs = self.ends(key, least=least, most=most)
        low = float(lows[index])
        if not np.isfinite(low):
            return Estimate(value, n=self.count, unit=unit)
        return Estimate(value, low, float(highs[index]), self.count, unit)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up the moments of all processes.

        total: returns the sum of a tensor over all processes.
        """
        self.count = round(float(total(torch.tensor([self.count], dtype=torch.float64))))
        for part in (self.sums, self.squares, self.cluster_sums):
            for key in sorted(part):
                part[key] = total(part[key])


def _add_to(sums: dict[Key, Tensor], key: Key, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


class AccuracyDifference(NamedTuple):
    """A difference of accuracies in points, with its two-sided p-value.

    estimate: the difference with its interval.
    p: the p-value.
    spread: the standard error over seeds (a fraction) and the degrees of freedom. None for one
        seed, and if nothing differs.
    """

    estimate: Estimate
    p: float
    spread: tuple[float, float] | None = None

    def detectable(self, level: float = LEVEL) -> float | None:
        """Return the smallest true difference, in points, that a two-sided test is likely to find.

        The test at this level finds it with the probability POWER. It is the sum of Student's
        quantiles for level and power, times the standard error over seeds (Cohen 1988).
        """
        if self.spread is None:
            return None
        error, freedom = self.spread
        return 100 * error * float(stats.t.ppf([1 - level / 2, POWER], freedom).sum())


def accuracy_over_seeds(correct: ArrayLike, *, groups: ArrayLike | None = None) -> Estimate:
    """Return the mean accuracy (fraction) over seeds and images, with an interval over both.

    For one seed, and if all predictions are correct or all wrong, the interval is Wilson's over the
    images. The n of the result is the number of images.

    correct (seeds, images): 1 for correct predictions, else 0.
    groups (images,): the group of each image, if images of one group are not independent. The
        interval is then over seeds and groups.
    """
    table = np.asarray(correct, dtype=np.float64)
    total = table.shape[1]
    mean = table.mean()
    first_seed = share_of(table[0], groups=groups)
    if groups is not None:
        # One column for each group instead of each image: its contribution to the mean of the seed,
        # scaled so that the means of seeds do not change.
        sums, counts = resampling.by_group(table.T, groups)  # (groups, seeds) and (groups,)
        deviations = sums - mean * counts[:, None]
        table = (mean + deviations * len(counts) / total).T
    seeds, columns = table.shape  # a column is an image, or a group of images
    is_constant = np.ptp(table) == 0
    if min(seeds, columns) < 2 or is_constant:
        return first_seed
    by_seed = table.mean(1)
    by_column = table.mean(0)
    residual = table - by_seed[:, None] - by_column[None] + mean
    # the sums of squares of seeds, columns and the residual, in this order
    squares = np.array(
        [
            columns * np.sum((by_seed - mean) ** 2),
            seeds * np.sum((by_column - mean) ** 2),
            np.sum(residual**2),
        ]
    )
    freedom = np.array([seeds - 1, columns - 1, (seeds - 1) * (columns - 1)])
    mean_squares = squares / freedom
    # The variances of seeds and of columns are in proportion to their mean squares minus that of
    # the residual. The residual is taken to be no larger than either: no variance is below 0.
    mean_squares[2] = mean_squares.min()
    of_seeds, of_columns, of_residual = mean_squares
    variance = float(of_seeds + of_columns - of_residual)  # times seeds x columns
    if variance == 0:  # the means of all seeds, and those of all columns, are equal
        return first_seed
    satterthwaite = variance**2 / float(np.sum(mean_squares**2 / freedom))
    error = float(np.sqrt(variance / table.size))
    half = error * float(stats.t.ppf(0.975, satterthwaite))
    value = float(mean)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0), total)


def difference_over_seeds(
    first: ArrayLike, second: ArrayLike, *, groups: ArrayLike | None = None
) -> AccuracyDifference:
    """Return the accuracy of the first minus that of the second, by Welch's test over seeds (1947).

    With one seed, or if no seed differs from another of its model, or if no prediction differs, the
    first seeds are compared: by the paired bootstrap and the exact test (`paired_test`) over
    images, or over groups of images.

    first, second (seeds, images): 1 for correct predictions, else 0.
    groups (images,): the group of each image, if images of one group are not independent.
    """
    first_table = np.asarray(first, dtype=np.float64)
    second_table = np.asarray(second, dtype=np.float64)
    differences = first_table - second_table
    seeds, images = differences.shape
    value = 100 * float(differences.mean())
    variances = np.zeros(2)  # of the means of both kinds of training
    if seeds > 1:
        variances = np.array([_variance_of_mean(first_table), _variance_of_mean(second_table)])
    if not differences.any() or not variances.any():
        p = paired_test(first_table[0], second_table[0], groups=groups)
        estimate = accuracy_difference(first_table[0], second_table[0], groups=groups)
        return AccuracyDifference(estimate, p)
    variance = float(variances.sum())
    error = float(np.sqrt(variance))
    freedom = variance**2 / float(np.sum(variances**2) / (seeds - 1))  # Welch and Satterthwaite
    half = 100 * error * float(stats.t.ppf(0.975, freedom))
    p = 2 * float(stats.t.sf(abs(value) / (100 * error), freedom))
    low = max(value - half, -100.0)
    high = min(value + half, 100.0)
    return AccuracyDifference(Estimate(value, low, high, images, "points"), p, (error, freedom))


def _variance_of_mean(table: Numbers) -> float:
    """Return the variance of the mean over seeds of a table (seeds, images)."""
    return float(table.mean(1).var(ddof=1) / len(table))
