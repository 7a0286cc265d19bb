"""The area under the ROC curve of a number as a predictor of a model's failures, with interval and test.

The area is the probability that a random failure has a greater value than a random success (ties count half); 0.5 is
chance. Interval and test follow DeLong 1988, with the sums over groups of Obuchowski 1997 where images share a source,
on the logit scale, so that the interval lies between 0 and 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from vitlens.uncertainty import Estimate

FEWEST = 10  # failures, and successes, for an interval and a test

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Separation:
    """How well a number separates failures from successes.

    area: with its interval (None with too few images); failures: their number; median_failure, median_success: medians
    of the number; p: two-sided p-value of area 0.5 (None with too few images).
    """

    name: str
    area: Estimate
    failures: int
    median_failure: float
    median_success: float
    p: float | None


def separations(
    numbers: Mapping[str, Float[Tensor, " batch"]], correct: Bool[Tensor, " batch"], *, groups: Tensor | None = None
) -> tuple[Separation, ...]:
    """The separation by each number (n,); images of NaN (not known) are left out, as are numbers without both failures
    and successes."""
    results = []
    for name, values in numbers.items():
        known = values.isfinite()
        right = correct[known.to(correct.device)]
        if 0 < int(right.sum()) < len(right):
            own = None if groups is None else groups[known]
            results.append(separation(values[known], right, name=name, groups=own))
    return tuple(results)


def separation(
    values: Float[Tensor, " batch"],
    correct: Bool[Tensor, " batch"],
    *,
    name: str = "",
    groups: Tensor | None = None,
) -> Separation:
    """How well one number (n,), finite, separates failures from successes, of which there are some."""
    numbers = values.detach().cpu().double().numpy()
    wrong = ~correct.cpu().numpy()
    failing, passing = int(wrong.sum()), int((~wrong).sum())
    area, parts = _area(numbers, wrong)
    if groups is not None and len(groups.unique()) < len(groups):
        error = _grouped_error(parts, groups)
    else:  # DeLong's
        variances = ((own**2).sum() * len(own) / max(len(own) - 1, 1) for own in (parts[wrong], parts[~wrong]))
        error = float(np.sqrt(sum(variances)))
    ends: tuple[float | None, float | None] = (None, None)
    p, tested = None, min(failing, passing) >= FEWEST
    if tested and area in (0.0, 1.0):  # no interval of complete separation; p is the exact one of all orders
        p = min(1.0, 2 / math.comb(failing + passing, failing))
    elif tested and error == 0:
        p = 1.0
    elif tested:  # on the logit scale
        slope, centre = 1 / (area * (1 - area)), math.log(area / (1 - area))
        half = float(stats.norm.ppf(0.975)) * error * slope
        low, high = (1 / (1 + math.exp(-end)) for end in (centre - half, centre + half))
        ends, p = (low, high), float(2 * stats.norm.sf(abs(centre) / (error * slope)))
    medians = float(np.median(numbers[wrong])), float(np.median(numbers[~wrong]))
    return Separation(name, Estimate(area, *ends, len(numbers), ""), failing, *medians, p)


def area_difference(
    first: Float[Tensor, " batch"],
    second: Float[Tensor, " batch"],
    first_correct: Bool[Tensor, " batch"],
    second_correct: Bool[Tensor, " batch"],
    *,
    groups: Tensor | None = None,
) -> tuple[Estimate, float] | None:
    """The area of a number for one model minus that for another on the same images, with its paired interval and p.

    Images of NaN (not known) are left out; None with fewer than 10 failures or successes of either.
    """
    known = first.isfinite() & second.isfinite()
    found = []
    for values, correct in ((first, first_correct), (second, second_correct)):
        wrong = ~correct[known].cpu().numpy()
        if min(wrong.sum(), (~wrong).sum()) < FEWEST:
            return None
        found.append(_area(values[known].detach().cpu().double().numpy(), wrong))
    (area, parts), (other, others) = found
    error = _grouped_error(parts - others, None if groups is None else groups[known])
    gap, half = area - other, float(stats.norm.ppf(0.975)) * error
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    return Estimate(gap, gap - half, gap + half, int(known.sum()), ""), p


def _area(numbers: Array, wrong: NDArray[np.bool_]) -> tuple[float, Array]:
    """The area, and what each image contributes to its deviation from its mean (n,): for a failure from the share of
    successes below it, for a success from the share of failures above it."""
    high, low = np.sort(numbers[wrong]), np.sort(numbers[~wrong])
    below, not_above = (
        (np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")) / 2 / len(others)
        for others, own in ((low, numbers[wrong]), (high, numbers[~wrong]))
    )
    area, parts = float(below.mean()), np.empty(len(wrong))
    parts[wrong], parts[~wrong] = (below - area) / len(high), (1 - not_above - area) / len(low)
    return area, parts


def _grouped_error(parts: Array, groups: Tensor | None) -> float:
    """The standard error from sums of the images' deviations over groups."""
    members = np.arange(len(parts)) if groups is None else groups.cpu().unique(return_inverse=True)[1].numpy()
    sums = np.bincount(members, weights=parts)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))
