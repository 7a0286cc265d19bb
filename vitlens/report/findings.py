"""Findings: the facts of a report's first page, ranked by one rule.

Rank: the distance of an effect from its reference in half-widths of its 95 % interval, at most 10, times the weight of
its kind; the answer to what a command was asked (which of two models is better) outweighs all others. A report looks at
many effects and an interval of 95 % misses one in twenty, so that a finding needs a margin: the reference must lie 1.5
times as far from the effect as the interval's end does (p of about 0.003).
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from vitlens.report.document import Finding, Sentence, Support
from vitlens.uncertainty import Estimate, Side, beyond

Kind = Literal["answer", "comparison", "hidden fault", "fact", "expected fact"]
WEIGHTS: Final[Mapping[Kind, float]] = MappingProxyType(
    {"answer": 20.0, "comparison": 1.5, "hidden fault": 1.5, "fact": 1.0, "expected fact": 0.5}
)
MOST: Final = 7  # findings of one report
CAP: Final = 10.0  # half-widths
MARGIN: Final = 1.5  # distances of the interval's end on the side of the reference
SMALLEST: Final = 0.5  # points of accuracy: a smaller difference is no finding, however certain


def finding(
    claim: str,
    effect: Estimate,
    *,
    kind: Kind,
    reference: float = 0.0,
    p: float | None = None,
    figure: str = "",
    support: Support = "one method",
    rows: Sequence[object] = (),
) -> Finding | None:
    """A finding with its rank; None where the effect is not clear of the reference, or has no interval.

    claim: one sentence without the effect's interval, which the renderers add; rows: the typed rows that back it.
    """
    if effect.low is None or effect.high is None or not clear(effect, reference):
        return None
    half = (effect.high - effect.low) / 2
    distance = CAP if half == 0 else min(abs(effect.value - reference) / half, CAP)
    return Finding(Sentence(claim, tuple(rows)), effect, p, figure, support, distance * WEIGHTS[kind])


def clear(effect: Estimate, reference: float) -> bool:
    """Whether an effect is far enough from a reference for a first page: by MARGIN times its interval's arm."""
    side = beyond(effect, reference)
    if side is Side.UNDECIDED or effect.low is None or effect.high is None:
        return False
    arm = effect.value - effect.low if side is Side.ABOVE else effect.high - effect.value
    return abs(effect.value - reference) >= MARGIN * arm


def ranked(found: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """The findings of a report: the largest ranks first, at most MOST."""
    return tuple(sorted((each for each in found if each is not None), key=lambda each: -each.rank)[:MOST])
