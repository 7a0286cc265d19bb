"""Claims: the results of a report. Its title, first page, verdicts and JUnit file use only them.

One quantity is judged once, by one limit, with one sign and one sample
(tests/kit/contradictions.py).
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
WEIGHTS: Final[Mapping[Kind, float]] = MappingProxyType(  # factors of a claim's rank, by kind
    {"answer": 20.0, "comparison": 1.5, "hidden fault": 1.5, "fact": 1.0, "expected fact": 0.5}
)
CAP: Final = 10.0  # half-widths of an interval: larger effects have the same rank
FEWEST: Final = 20  # nothing is claimed from fewer images
SMALLEST: Final = 0.5  # points of accuracy: a smaller difference is no finding, however certain
ASKED: Final = 0.05  # significance level, after Holm, of a result that a command was asked for
FOUND: Final = 0.001  # significance level of any other result, which is one of many effects
# failures come first on the first page, then warnings; other claims by rank
_URGENCY: Final = {"fail": 3, "warn": 2, "inconclusive": 0, "pass": 0, "not tested": 0, "": 0}


def enough(value: Estimate | None) -> bool:
    """Return True if a number was measured on enough images for a claim."""
    return value is not None and (value.n or 0) >= FEWEST


def few_images(count: int) -> Iterator[str]:
    """Yield a sentence if there are too few images for a claim."""
    if count < FEWEST:
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about others.", n=count)


@dataclass(frozen=True)
class Claim:
    """One result of a report.

    question: the topic, e.g. "calibration".
    subject: the model, e.g. "vit-digits", or both models of a comparison.
    says: the finished sentence.
    title: a title for the whole report in at most twelve words, or "".
    verdict: the judgement with its reason, None without one.
    effect: the measured number.
    p: its p-value.
    evidence: "observed" if it was counted, "attributed" if it was read from gradients or maps,
        "intervened" if it was measured after a change. Only after a change may a sentence name a
        cause.
    place: the figure that shows it.
    reference: the value of `effect` that stands for no effect.
    kind: the reason for which it is reported.
    rests_on: question and subject of the claims with measurements that it uses. If such a
        measurement is in doubt, this claim is removed.
    next_step: a hypothesis and the command that tests it.
    is_null: True if no effect was shown. A study lists such claims under what it does not show.
    brief: the sentence for a page with many claims, without tests and intervals. "" if `says` is
        short.
    lead: the reader's question that the claim answers on such a page.
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
        """Return the reason of the judgement, or why there is none."""
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

        It may show answers to the question of the command, warnings and failures, and effects that
        differ clearly from their reference.
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
    """Return True if an effect differs from a reference at a significance level (two-sided).

    The part of the 95 % interval between the effect and its end nearer to the reference is widened
    to this level, as for a normal distribution. It must not pass the reference.
    """
    side = beyond(effect, reference)
    if side is Side.UNDECIDED or effect.low is None or effect.high is None:
        return False
    nearer_end = effect.low if side is Side.ABOVE else effect.high
    half_width = abs(effect.value - nearer_end)
    half_width_at_level = half_width * _two_sided_quantile(level) / _two_sided_quantile(LEVEL)
    return abs(effect.value - reference) >= half_width_at_level


def _two_sided_quantile(level: float) -> float:
    """Return the half-width of a normal interval at a significance level, in standard errors."""
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
    """Return a claim that has no sentence and says only why something is not judged."""
    return Claim(question, subject, verdict=Verdict(state, because, limit))


def overall_verdict(claims: Iterable[Claim]) -> Verdict | None:
    """Return the most urgent verdict of several claims.

    Its reason joins the different reasons of the claims with this verdict, each with its subjects.
    If all claims have this verdict for one reason, the subjects are not listed. A warning or
    failure of several then ends with "for both models" or "for all 3 models".
    """
    verdicts = [(claim.subject, claim.verdict) for claim in claims if claim.verdict is not None]
    if not verdicts:
        return None
    worst = min((verdict.state for _, verdict in verdicts), key=ORDER.index)
    worst_verdicts = [(subject, verdict) for subject, verdict in verdicts if verdict.state == worst]
    subjects_by_reason: dict[str, list[str]] = {}
    for subject, verdict in worst_verdicts:
        subjects_by_reason.setdefault(verdict.because, []).append(finalize(subject))
    all_are_worst = len(worst_verdicts) == len(verdicts)
    has_one_reason = len(subjects_by_reason) == 1
    if all_are_worst and has_one_reason:
        (because,) = subjects_by_reason
        subjects = {subject for subject, _ in verdicts}
        if len(subjects) > 1 and worst in ("fail", "warn"):
            because += f", for {_all_models(len(subjects))}"
    else:
        reasons = []
        for reason, names in subjects_by_reason.items():
            reasons.append(f"{reason}, for {' and '.join(names)}")
        because = "; ".join(reasons)
    limits = {verdict.limit for _, verdict in worst_verdicts}
    limit = limits.pop() if len(limits) == 1 else ""
    doubts = any(verdict.doubts for _, verdict in worst_verdicts)
    return Verdict(worst, because, limit, doubts)


def _all_models(count: int) -> str:
    return "both models" if count == 2 else f"all {count} models"


def verdict_rows(claims: Iterable[Claim]) -> list[dict[str, str]]:
    """Return the verdicts of a report, with reason and limit, as results.json holds them."""
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

    The report then shows the verdict that doubts the measurement, instead of the claim.
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
    """Return the claims of the first page: answers, then failures, then the clearest effects."""
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
    """Return the title of the first claim of the first page that has one, else `otherwise`."""
    for claim in first_page_claims(claims, most=len(claims)):
        if claim.title:
            return claim.title
    return otherwise


def above(estimate: Estimate | None, value: float, tests: int = 1) -> bool:
    """Return True if an estimate is significantly above a value.

    tests: the number of estimates that are tested, for Bonferroni's correction.
    """
    if estimate is None:
        return False
    low = widened(estimate, tests).low
    return low is not None and low > value


def below(estimate: Estimate | None, value: float, tests: int = 1) -> bool:
    """Return True if an estimate is significantly below a value.

    tests: the number of estimates that are tested, for Bonferroni's correction.
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

    template: the template of its sentence.
    given: the values that fill all templates.
    headline: the template of its title, "" for a claim that is no title.
    brief: the template of its short sentence, "" if `template` is short.
    more: further fields of the claim.
    """
    values = {"effect": effect, **given}
    if headline:
        more["title"] = say(headline, **values)
    if brief:
        more["brief"] = say(brief, **values)
    return Claim(question, subject, say(template, **values), effect=effect, **more)
