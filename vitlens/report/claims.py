"""Claims: what a report says was found, in one register from which title, first page, verdicts and JUnit are made.

One quantity is judged once, by one limit, with one sign and one sample (tests/kit/contradictions.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """That there are too few images for a claim, where that is so."""
    if count < FEWEST:
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about others.", n=count)


@dataclass(frozen=True)
class Claim:
    """One thing that was found.

    question: what is asked ("calibration"); subject: of what ("vit-digits"), of a comparison both models; says: the
    sentence, finished; title: the same in at most twelve words, for the report's title, "" where it cannot be one;
    verdict: the judgement with its reason, None where none is made; effect, p: the number; evidence: counted, read off
    gradients and maps, or measured after something was changed: only then a sentence may name a cause; place: the
    figure that shows it; reference: the value that the effect would have if there were nothing; kind: whether it was
    asked for; rests_on: question and subject of the claims whose measurements it uses, which may veto its title;
    next_step: a hypothesis and the command that tests it; is_null: True where it says that no effect was shown, which a
    study lists under what it does not show.
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

    @property
    def state(self) -> State | Literal[""]:
        """Return the judgement, "" where none is made."""
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
        """Return the distance of the effect from its reference in half-widths of its interval, at most CAP, by its
        weight."""
        if self.effect is None or self.effect.low is None or self.effect.high is None:
            return 0.0
        half = (self.effect.high - self.effect.low) / 2
        return WEIGHTS[self.kind] * (CAP if half == 0 else min(abs(self.effect.value - self.reference) / half, CAP))

    @property
    def is_shown(self) -> bool:
        """Return True if it may stand on the first page: the answer to what was asked, a judgement, or an effect clear
        of its reference at the level for what was not asked for."""
        if not self.says:
            return False
        if self.kind == "answer" or self.state in ("warn", "fail"):
            return True
        level = ASKED if self.kind == "comparison" else FOUND
        if self.effect is None or (self.p is not None and self.p > level):
            return False
        return clear(self.effect, self.reference, level)


def clear(effect: Estimate, reference: float, level: float = FOUND) -> bool:
    """Return True if an effect differs from a reference at a level (two-sided), by its 95 % interval's arm towards
    it."""
    side = beyond(effect, reference)
    if side is Side.UNDECIDED or effect.low is None or effect.high is None:
        return False
    arm = effect.value - effect.low if side is Side.ABOVE else effect.high - effect.value
    return abs(effect.value - reference) >= arm * _normal(level) / _normal(LEVEL)


def _normal(level: float) -> float:
    return NormalDist().inv_cdf(1 - level / 2)


def judge(question: str, subject: str, value: Estimate, limit: str, *, because: str, says: str = "") -> Claim:
    """Return a claim that is judged by the worse end of its interval."""
    return Claim(question, subject, says, verdict=Verdict(LIMITS[limit].judge(value), because, limit), effect=value)


def unjudged(question: str, subject: str, because: str, *, state: State = "inconclusive", limit: str = "") -> Claim:
    """Return a claim that only says why something is not judged."""
    return Claim(question, subject, verdict=Verdict(state, because, limit))


def together(claims: Iterable[Claim]) -> Verdict | None:
    """Return the most urgent verdict of several claims, with the subjects that it concerns where others differ."""
    judged = [(claim, claim.verdict) for claim in claims if claim.verdict is not None]
    if not judged:
        return None
    worst = min((verdict.state for _, verdict in judged), key=ORDER.index)
    concerned = [(claim, verdict) for claim, verdict in judged if verdict.state == worst]
    subjects: dict[str, list[str]] = {}
    for claim, verdict in concerned:
        subjects.setdefault(verdict.because, []).append(finalize(claim.subject))
    limits = {verdict.limit for _, verdict in concerned}
    because = "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in subjects.items())
    if len(subjects) == 1 and len(concerned) == len(judged):
        because = concerned[0][1].because
    doubts = any(verdict.doubts for _, verdict in concerned)
    return Verdict(worst, because, limits.pop() if len(limits) == 1 else "", doubts)


def verdict_rows(claims: Iterable[Claim]) -> list[dict[str, str]]:
    """Return the verdicts of a report as results.json holds them, each with its reason and its limit."""
    rows = []
    for claim in claims:
        if claim.verdict is not None:
            state = claim.verdict.state
            because = claim.verdict.because
            limit = claim.verdict.limit
            words = LIMITS[limit].words if limit else ""
            row = {"question": claim.question, "subject": claim.subject, "state": str(state), "because": because}
            rows.append({**row, "limit": words})
    return rows


def vetoed(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims, without the sentence and the title of each that rests on a measurement in doubt.

    A claim doubted by the verdict of another is no answer any more: that verdict speaks in its place.
    """
    known = tuple(claims)
    doubted = {(each.question, each.subject) for each in known if each.verdict is not None and each.verdict.doubts}
    kept = []
    for claim in known:
        is_doubted = any(measurement in doubted for measurement in claim.rests_on)
        kept.append(replace(claim, says="", title="", kind="fact", effect=None, p=None) if is_doubted else claim)
    return tuple(kept)


def shown(claims: Iterable[Claim], most: int = 5) -> tuple[Claim, ...]:
    """Return those of the first page: the answers in their order, then what fails, then the clearest."""
    known = [claim for claim in claims if claim.is_shown]
    answers = [claim for claim in known if claim.kind == "answer"]
    others = sorted((c for c in known if c.kind != "answer"), key=lambda c: (-_URGENCY[c.state], -c.rank))
    return tuple([*answers, *others][:most])


def title_of(claims: Sequence[Claim], otherwise: str) -> str:
    """Return the first claim of the first page that can be a title."""
    return next((claim.title for claim in shown(claims, len(claims)) if claim.title), otherwise)


def above(estimate: Estimate | None, value: float, tests: int = 1) -> bool:
    """Return True if an estimate, one of so many tests, is shown to lie above a value (Bonferroni)."""
    low = None if estimate is None else widened(estimate, tests).low
    return low is not None and low > value


def below(estimate: Estimate | None, value: float, tests: int = 1) -> bool:
    """Return True if it is shown to lie below."""
    high = None if estimate is None else widened(estimate, tests).high
    return high is not None and high < value


def found(
    question: str,
    subject: str,
    template: str,
    effect: Estimate | None = None,
    *,
    given: dict[str, Any],
    headline: str = "",
    **more: Any,
) -> Claim:
    """Return a claim whose sentence is a template; headline: of its title, where it can be one; given: their values."""
    known = {"effect": effect, **given}
    if headline:
        more["title"] = say(headline, **known)
    return Claim(question, subject, say(template, **known), effect=effect, **more)
