"""Findings: the measured effects that survive correction, the largest first.

All effects of a report are corrected together, whatever measured them: disturbances, corruptions,
attacks, heads, maps and features. Only their size decides the order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Final

from vitlens.report.claims import ASKED, FEWEST, SMALLEST, Claim, doubted_measurements
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond, holm

AUC: Final = "AUC"  # unit of a probability for which 0.5 is chance
_NO_AUC: Final = (0.45, 0.55)  # with an AUC between them, errors hardly differ from the rest
# points of one unit, the common scale of all findings; effects of other units have no size
_POINTS: Final = {"points": 1.0, "fraction": 100.0, AUC: 100.0}


def size_of(claim: Claim) -> float | None:
    """Return the distance of a claim's effect from its reference, in points.

    It is None for an effect that is not on this scale, such as a time, a loss or a distance.
    """
    effect = claim.effect
    if effect is None or effect.unit not in _POINTS:
        return None
    return abs(effect.value - claim.reference) * _POINTS[effect.unit]


def is_candidate(claim: Claim) -> bool:
    """Return True if an effect can be a finding.

    It must be on the common scale, from enough images, and large enough. Its interval must exclude
    the reference. An AUC between 0.45 and 0.55 is not large enough.
    """
    effect = claim.effect
    size = size_of(claim)
    if effect is None or size is None:
        return False
    if (effect.n or 0) < FEWEST or size < SMALLEST:
        return False
    if effect.unit == AUC and _NO_AUC[0] <= effect.value <= _NO_AUC[1]:
        return False
    return beyond(effect, claim.reference) is not Side.UNDECIDED


def largest(effects: Iterable[Claim], most: int | None = None) -> tuple[Claim, ...]:
    """Return the largest effects that survive Holm's correction over all effects.

    There is one for each question and subject. The returned claims have the corrected p-value.

    effects: every measured effect, also those that are not significant, with p-values before any
        correction. If a claim has no p-value, it is computed from the interval.
    most: the largest number of findings, None for all.
    """
    measured = [claim for claim in effects if size_of(claim) is not None]
    corrected_p = holm([_p_of(claim) for claim in measured])
    significant = []
    for claim, p in zip(measured, corrected_p):
        if is_candidate(claim) and p <= ASKED:
            significant.append(replace(claim, p=p))
    significant.sort(key=lambda claim: -(size_of(claim) or 0.0))
    largest_by_subject: dict[tuple[str, str], Claim] = {}
    for claim in significant:
        largest_by_subject.setdefault((claim.question, claim.subject), claim)
    return tuple(largest_by_subject.values())[:most]


def _p_of(claim: Claim) -> float:
    """Return the p-value of a claim, or that of its interval if the estimate were normal."""
    if claim.p is not None:
        return claim.p
    if claim.effect is None:
        return 1.0
    return _p_of_interval(claim.effect, claim.reference)


def _p_of_interval(effect: Estimate, reference: float) -> float:
    low = effect.low
    high = effect.high
    if low is None or high is None or low <= reference <= high:
        return 1.0
    # on the side of the reference
    half_width = high - effect.value
    if effect.value > reference:
        half_width = effect.value - low
    if half_width <= 0:
        return 0.0
    quantile = NormalDist().inv_cdf(1 - LEVEL / 2)
    z = abs(effect.value - reference) / half_width * quantile
    return 2 * (1 - NormalDist().cdf(z))


def not_doubted(effects: Iterable[Claim], claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Return the effects that rest on no measurement that a verdict among the claims doubts."""
    doubts = doubted_measurements(claims)
    return tuple(effect for effect in effects if doubts.isdisjoint(effect.rests_on))
