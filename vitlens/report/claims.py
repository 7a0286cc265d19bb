"""Claims: the results of a report, in one register that title, first page, verdicts and JUnit are
made from.

One quantity is judged once, by one limit, with one sign and one sample
(tests/kit/contradictions.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Final, Literal

from vitlens.report.document import State
from vitlens.report.prose import finalize, say
from vitlens.report.verdicts import LIMITS, ORDER, Verdict
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond, widened

Evidence = Literal["observed", "attributed", "intervened"]
Kind = Literal["answer", "comparison", "hidden fault", "fact", "expected fact"]
WEIGHTS: Final[Mapping[Kind, float]] = MappingProxyType(  # of a claim's rank
    {"answer": 20.0, "comparison": 1.5, "hidden fault": 1.5, "fact": 1.0, "expected fact": 0.5}
)
CAP: Final = 10.0  # half-widths
FEWEST: Final = 20  # images, below which nothing is claimed
SMALLEST: Final = 0.5  # points of accuracy: a smaller difference is no finding, however certain
ASKED: Final = 0.05  # significance level, after Holm, of what a command was asked for
FOUND: Final = 0.001  # of what it was not asked for, one of many effects
_URGENCY: Final = {"fail": 3, "warn": 2, "inconclusive": 0, "pass": 0, "not tested": 0, "": 0}


def enough(value: Estimate | None) -> bool:
    """Return True if a number is of enough images for a claim."""
    return value is not None and (value.n or 0) >= FEWEST


def few_images(count: int) -> Iterator[str]:
    """Yield a sentence about images too few for a claim; nothing for enough images."""
    if count < FEWEST:
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about others.", n=count)


@dataclass(frozen=True)
class Claim:
    """One result of a report.

    question: the topic ("calibration").
    subject: the model ("vit-digits"), or both models of a comparison.
    says: the finished sentence.
    brief: the same for a page on many claims: without tests and intervals, "" where `says` is
        short.
    lead: the reader's question that it answers there.
    title: at most twelve words, for the report's title, or "".
    verdict: the judgement with its reason, None without one.
    effect, p: the number.
    evidence: counted, read off gradients and maps, or measured after a change; only after a change
        may a sentence name a cause.
    place: the figure that shows it.
    reference: the value of the effect if there were none.
    kind: the reason for which it is reported.
    rests_on: question and subject of the claims whose measurements it uses, and whose doubts remove
        it.
    next_step: a hypothesis and the command that tests it.
    is_null: True if no effect was shown, which a study lists under what it does not show.
    better: the model that a comparison favours, "" for none.
    """

    question: str
    subject: str
    says: str = ""
    title: str = ""
    verdict: Verdict | None = None
    effect: Estimate | None = None
    p: float | None = None
    evidence: Evidence = "observed"
    place: str = ""
    reference: float = 0.0
    kind: Kind = "fact"
    rests_on: tuple[tuple[str, str], ...] = ()
    next_step: str = ""
    is_null: bool = False
    brief: str = ""
    lead: str = ""
    better: str = ""

    @property
    def state(self) -> State | Literal[""]:
        """Return the judgement, "" without one."""
        return "" if self.verdict is None else self.verdict.state

    @property
    def because(self) -> str:
        """Return what was judged, or why it could not be."""
        return "" if self.verdict is None else self.verdict.because

    @property
    def limit(self) -> str:
        """Return the name of its limit in limits.toml, "" for none."""
        return "" if self.verdict is None else self.verdict.limit

    @property
    def rank(self) -> float:
        """Return the weight of its kind times the distance of the effect from its reference.

        The distance is measured in half-widths of the interval, and is at most CAP.
        """
        effect = self.effect
        if effect is None or effect.low is None or effect.high is None:
            return 0.0
        distance = CAP
        half_width = (effect.high - effect.low) / 2
        if half_width != 0:
            distance = min(abs(effect.value - self.reference) / half_width, CAP)
        return WEIGHTS[self.kind] * distance

    @property
    def is_shown(self) -> bool:
        """Return True if the first page may show it.

        That is the answer to the question of the command, a warning or failure, or an effect clear
        of its reference.
        """
        if not self.says:
            return False
        if self.kind == "answer" or self.state in ("warn", "fail"):
            return True
        level = ASKED if self.kind == "comparison" else FOUND
        if self.effect is None or (self.p is not None and self.p > level):
            return False
        return clear(self.effect, self.reference, level)


def clear(effect: Estimate, reference: float, level: float = FOUND) -> bool:
    """Return True if an effect differs from a reference at a level (two-sided).

    The 95 % interval is widened to the level on the side that faces the reference.
    """
    side = beyond(effect, reference)
    if side is Side.UNDECIDED or effect.low is None or effect.high is None:
        return False
    half_width = effect.high - effect.value
    if side is Side.ABOVE:
        half_width = effect.value - effect.low
    return abs(effect.value - reference) >= half_width * _quantile(level) / _quantile(LEVEL)


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf(1 - level / 2)


def judge(
    question: str, subject: str, value: Estimate, limit: str, *, because: str, says: str = ""
) -> Claim:
    """Return a claim that is judged by the worse end of its interval."""
    verdict = Verdict(LIMITS[limit].judge(value), because, limit)
    return Claim(question, subject, says, verdict=verdict, effect=value)


def unjudged(
    question: str, subject: str, because: str, *, state: State = "inconclusive", limit: str = ""
) -> Claim:
    """Return a claim that only says why something is not judged."""
    return Claim(question, subject, verdict=Verdict(state, because, limit))


def overall_verdict(claims: Iterable[Claim]) -> Verdict | None:
    """Return the most urgent verdict of several claims.

    Its reason names the subjects that it concerns; where a failure or warning concerns all of
    several, it says so.
    """
    verdicts = [(claim.subject, claim.verdict) for claim in claims if claim.verdict is not None]
    if not verdicts:
        return None
    worst = min((verdict.state for _, verdict in verdicts), key=ORDER.index)
    subjects = {subject for subject, _ in verdicts}
    limits: set[str] = set()
    doubts = False
    is_shared = True
    subjects_by_reason: dict[str, list[str]] = {}
    for subject, verdict in verdicts:
        if verdict.state != worst:
            is_shared = False
            continue
        limits.add(verdict.limit)
        doubts = doubts or verdict.doubts
        subjects_by_reason.setdefault(verdict.because, []).append(finalize(subject))
    if is_shared and len(subjects_by_reason) == 1:
        (because,) = subjects_by_reason
        if len(subjects) > 1 and worst in ("fail", "warn"):
            because = f"{because}, for {_in_words(subjects)}"
    else:
        reasons = [
            f"{reason}, for {' and '.join(names)}" for reason, names in subjects_by_reason.items()
        ]
        because = "; ".join(reasons)
    limit = limits.pop() if len(limits) == 1 else ""
    return Verdict(worst, because, limit, doubts)


def _in_words(subjects: Collection[str]) -> str:
    """Return that a verdict concerns all of several models."""
    return "both models" if len(subjects) == 2 else f"all {len(subjects)} models"


def verdict_rows(claims: Iterable[Claim]) -> list[dict[str, str]]:
    """Return the verdicts of a report as results.json holds them, each with its reason and its
    limit.
    """
    rows = []
    for claim in claims:
        if claim.verdict is None:
            continue
        row = {
            "question": claim.question,
            "subject": claim.subject,
            "state": str(claim.state),
            "because": claim.because,
            "limit": LIMITS[claim.limit].words if claim.limit else "",
        }
        rows.append(row)
    return rows


def veto_doubted(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Remove the sentence and the title of claims that rest on a measurement in doubt.

    A claim doubted by the verdict of another is no answer any more: that verdict speaks in its
    place.
    """
    claims = tuple(claims)
    doubts = doubted_measurements(claims)
    checked = []
    for claim in claims:
        if not doubts.isdisjoint(claim.rests_on):
            claim = replace(claim, says="", brief="", title="", kind="fact", effect=None, p=None)
        checked.append(claim)
    return tuple(checked)


def doubted_measurements(claims: Iterable[Claim]) -> set[tuple[str, str]]:
    """Return the question and subject of each measurement that the verdict of a claim doubts."""
    measurements = set()
    for claim in claims:
        if claim.verdict is not None and claim.verdict.doubts:
            measurements.add((claim.question, claim.subject))
    return measurements


def first_page_claims(claims: Iterable[Claim], most: int = 5) -> tuple[Claim, ...]:
    """Return the claims of the first page: the answers in their order, then what fails, then the
    clearest.
    """
    answers = []
    facts = []
    for claim in claims:
        if not claim.is_shown:
            continue
        if claim.kind == "answer":
            answers.append(claim)
        else:
            facts.append(claim)
    facts.sort(key=lambda claim: (-_URGENCY[claim.state], -claim.rank))
    return tuple([*answers, *facts][:most])


def title_of(claims: Sequence[Claim], otherwise: str) -> str:
    """Return the title of the first claim of the first page that has one."""
    for claim in first_page_claims(claims, len(claims)):
        if claim.title:
            return claim.title
    return otherwise


def above(estimate: Estimate | None, value: float, tests: int = 1) -> bool:
    """Return True if an estimate, one of `tests` estimates, is significantly above a value
    (Bonferroni).
    """
    if estimate is None:
        return False
    low = widened(estimate, tests).low
    return low is not None and low > value


def below(estimate: Estimate | None, value: float, tests: int = 1) -> bool:
    """Return True if an estimate, one of `tests` estimates, is significantly below a value
    (Bonferroni).
    """
    if estimate is None:
        return False
    high = widened(estimate, tests).high
    return high is not None and high < value


def found(
    question: str,
    subject: str,
    template: str,
    effect: Estimate | None = None,
    *,
    given: dict[str, Any],
    headline: str = "",
    brief: str = "",
    **more: Any,
) -> Claim:
    """Return a claim with the sentence of a template.

    given: the values of all templates.
    headline: the template of its title, "" for a claim that cannot be one.
    brief: that of its short sentence, "" where `template` is short.
    """
    values = {"effect": effect, **given}
    if headline:
        more["title"] = say(headline, **values)
    if brief:
        more["brief"] = say(brief, **values)
    return Claim(question, subject, say(template, **values), effect=effect, **more)
