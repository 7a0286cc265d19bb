"""The area under the ROC curve of a number as a predictor of a model's failures, with interval and test.

The area is the probability that a random failure has a greater value than a random success (ties count half); 0.5 is
chance. Interval and test follow DeLong 1988, with the sums over groups of Obuchowski 1997 where images share a source,
on the logit scale, so that the interval lies between 0 and 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from vitlens.errors import InputError
from vitlens.uncertainty import Estimate, holm

FEWEST = 10  # failures, and successes, for an interval and a test

Array = NDArray[np.float64]
Ends = tuple[float | None, float | None]


@dataclass(frozen=True)
class Separation:
    """How well a number separates failures from successes.

    area: with its interval (None with too few images); failures, successes: numbers of images; median_failure,
    median_success: medians of the number; p: two-sided p-value of area 0.5 (None with too few images); p_holm:
    corrected for all tests of the call.
    """

    name: str
    area: Estimate
    failures: int
    successes: int
    median_failure: float
    median_success: float
    p: float | None
    p_holm: float | None = None


def separations(
    numbers: Mapping[str, Float[Tensor, " batch"]], correct: Bool[Tensor, " batch"], *, groups: Tensor | None = None
) -> tuple[Separation, ...]:
    """The separation by each number (n,), p-values corrected (Holm) for their count; images of NaN (not known) are
    left out, as are numbers without both failures and successes."""
    results = []
    for name, values in numbers.items():
        known = values.isfinite()
        right = correct[known.to(correct.device)]
        if 0 < int(right.sum()) < len(right):
            own = None if groups is None else groups[known]
            results.append(separation(values[known], right, name=name, groups=own))
    return corrected(results)


def corrected(results: list[Separation]) -> tuple[Separation, ...]:
    """The same results with p_holm corrected for the number of tests; those without a test are unchanged."""
    tested = [result.p for result in results if result.p is not None]
    adjusted = iter(holm(tested))
    return tuple(replace(result, p_holm=next(adjusted)) if result.p is not None else result for result in results)


def separation(
    values: Float[Tensor, " batch"],
    correct: Bool[Tensor, " batch"],
    *,
    name: str = "",
    groups: Tensor | None = None,
) -> Separation:
    """How well one number (n,) separates failures from successes. Raises InputError without both, or for NaN."""
    numbers = values.detach().cpu().double().numpy()
    wrong = ~correct.cpu().numpy()
    if not np.isfinite(numbers).all():
        raise InputError(f"expected finite values of {name or 'the number'}, found NaN or infinity")
    high, low = numbers[wrong], numbers[~wrong]
    if not len(high) or not len(low):
        raise InputError(f"expected failures and successes, found {len(high)} and {len(low)}")
    shares = _shares(high, low)
    area = float(shares[0].mean())
    members = None if groups is None else groups.cpu().numpy()
    error = _standard_error(*shares, area, members, wrong)
    interval: Ends = (None, None)
    p = None
    if min(len(high), len(low)) >= FEWEST:
        interval, p = _inference(area, error, len(high), len(low))
    return Separation(
        name,
        Estimate(area, *interval, len(numbers), ""),
        len(high),
        len(low),
        float(np.median(high)),
        float(np.median(low)),
        p,
    )


def _shares(high: Array, low: Array) -> tuple[Array, Array]:
    """For each failure the share of successes below it, for each success the share of failures above it."""
    ordered, others = np.sort(low), np.sort(high)
    below = (np.searchsorted(ordered, high, "left") + np.searchsorted(ordered, high, "right")) / 2 / len(low)
    above = 1 - (np.searchsorted(others, low, "left") + np.searchsorted(others, low, "right")) / 2 / len(high)
    return below, above


def _deviations(failing: Array, passing: Array, area: float, wrong: NDArray[np.bool_]) -> Array:
    """What each image contributes to the area's deviation from its mean; they sum to 0 over failures and successes."""
    parts = np.empty(len(wrong))
    parts[wrong] = (failing - area) / len(failing)
    parts[~wrong] = (passing - area) / len(passing)
    return parts


def _grouped_error(parts: Array, groups: NDArray[np.generic] | None) -> float:
    """The standard error from sums of the images' deviations over groups."""
    members = np.arange(len(parts)) if groups is None else np.unique(groups, return_inverse=True)[1].ravel()
    sums = np.bincount(members, weights=parts)
    return float(np.sqrt(len(sums) / max(len(sums) - 1, 1) * (sums**2).sum()))


def _standard_error(
    failing: Array, passing: Array, area: float, groups: NDArray[np.generic] | None, wrong: NDArray[np.bool_]
) -> float:
    """The standard error of the area from sums of the images' deviations over groups (without groups DeLong's)."""
    parts = _deviations(failing, passing, area, wrong)
    if groups is not None and len(np.unique(groups)) < len(groups):
        return _grouped_error(parts, groups)
    variance = sum(
        (chosen**2).sum() * len(chosen) / max(len(chosen) - 1, 1) for chosen in (parts[wrong], parts[~wrong])
    )
    return float(np.sqrt(variance))


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
    areas, parts = [], []
    for values, correct in ((first, first_correct), (second, second_correct)):
        numbers, wrong = values[known].detach().cpu().double().numpy(), ~correct[known].cpu().numpy()
        if min(wrong.sum(), (~wrong).sum()) < FEWEST:
            return None
        shares = _shares(numbers[wrong], numbers[~wrong])
        areas.append(float(shares[0].mean()))
        parts.append(_deviations(*shares, areas[-1], wrong))
    error = _grouped_error(parts[0] - parts[1], None if groups is None else groups[known].cpu().numpy())
    gap, half = areas[0] - areas[1], float(stats.norm.ppf(0.975)) * error
    p = 1.0 if error == 0 else float(2 * stats.norm.sf(abs(gap) / error))
    return Estimate(gap, gap - half, gap + half, int(known.sum()), ""), p


def _inference(area: float, error: float, failures: int, successes: int) -> tuple[Ends, float]:
    """The 95 % interval on the logit scale, and the test against 0.5.

    With complete separation there is no interval, and p is the exact one of all orders.
    """
    if area in (0.0, 1.0):
        return (None, None), min(1.0, 2 / math.comb(failures + successes, failures))
    if error == 0:
        return (None, None), 1.0
    slope = 1 / (area * (1 - area))
    centre, half = math.log(area / (1 - area)), float(stats.norm.ppf(0.975)) * error * slope
    low, high = (1 / (1 + math.exp(-end)) for end in (centre - half, centre + half))
    return (low, high), float(2 * stats.norm.sf(abs(centre) / (error * slope)))
