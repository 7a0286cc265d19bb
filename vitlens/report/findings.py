"""Findings: the facts of a report's first page, ranked by one rule.

Rank: the distance of an effect from its reference in half-widths of its 95 % interval, at most 10, times the weight of
its kind; the answer to what a command was asked (which of two models is better) outweighs all others.

A report looks at dozens of effects, and an interval of 95 % misses one in twenty. What it was not asked for therefore
stands on the first page only where p <= 0.001; the answer, and how models given side by side compare, where p <= 0.01
after the correction for the number of tests. In intervals: the reference must lie 1.68 (1.31) times as far from the
effect as the end of its 95 % interval does; and the test's own p, where there is one, must be as small.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, Literal

from vitlens.report.document import Finding, Sentence, Support
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

Kind = Literal["answer", "comparison", "hidden fault", "fact", "expected fact"]
WEIGHTS: Final[Mapping[Kind, float]] = MappingProxyType(
    {"answer": 20.0, "comparison": 1.5, "hidden fault": 1.5, "fact": 1.0, "expected fact": 0.5}
)
MOST: Final = 7  # findings of one report
CAP: Final = 10.0  # half-widths
ASKED: Final = 0.01  # the largest p of the answer to what a command was asked, corrected for its tests
FOUND: Final = 0.001  # of what it was not asked for, one of many effects
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
    level = ASKED if kind in ("answer", "comparison") else FOUND
    if effect.low is None or effect.high is None or not clear(effect, reference, level):
        return None
    if p is not None and p > level:
        return None
    half = (effect.high - effect.low) / 2
    distance = CAP if half == 0 else min(abs(effect.value - reference) / half, CAP)
    return Finding(Sentence(claim, tuple(rows)), effect, p, figure, support, distance * WEIGHTS[kind])


def clear(effect: Estimate, reference: float, level: float = FOUND) -> bool:
    """Whether an effect differs from a reference at a level (two-sided), by its 95 % interval's arm towards it."""
    side = beyond(effect, reference)
    if side is Side.UNDECIDED or effect.low is None or effect.high is None:
        return False
    arm = effect.value - effect.low if side is Side.ABOVE else effect.high - effect.value
    return abs(effect.value - reference) >= arm * _normal(level) / _normal(LEVEL)


def _normal(level: float) -> float:
    return NormalDist().inv_cdf(1 - level / 2)


def ranked(found: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """The findings of a report: the largest ranks first, at most MOST."""
    return tuple(sorted((each for each in found if each is not None), key=lambda each: -each.rank)[:MOST])
