"""The choice among several variants: one rule and its sentences; free of torch.

Each candidate but the best is one of these, by the paired difference from the best:

- within: it is shown to lose at most MARGIN points (the whole interval).
- worse: it is shown to lose more than that, or is significantly worse.
- undecided: neither.

The cheapest of the best and those within the margin is taken. That holds unless an undecided one is
cheaper than it, or may be better than the best by more than the margin. Then the cheapest of all
that are not worse is taken: the outcome is "no difference" if a difference of DETECTED points from
every undecided one would have been detected, else "inconclusive".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from vitlens.report.claims import Claim
from vitlens.report.numbers import number
from vitlens.report.prose import Marked, finalize, listed, say
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, POWER, Estimate

MARGIN: Final = 2.0  # points that a cheaper candidate may lose
# points: a comparison that would have detected this may call candidates alike
DETECTED: Final = 5.0
_NAMED: Final = 3  # candidates in a title
_LARGEST: Final = 100.0  # points: the largest difference of two accuracies

Outcome = Literal["best", "cheaper", "no difference", "inconclusive"]


@dataclass(frozen=True)
class Candidate:
    """A variant that can be chosen.

    value: higher is better.
    costs: by name; the first in which two candidates differ decides which is cheaper.
    gap: its value minus that of the best, paired, in points (None: it is the best).
    p: the p-value of the gap, after Holm.
    detectable: the smallest true gap that the comparison detects with a probability of 80 %, in
        points.
    """

    name: str
    value: Estimate
    costs: Mapping[str, float]
    gap: Estimate | None = None
    p: float | None = None
    detectable: float | None = None

    @property
    def is_within(self) -> bool:
        """Return True if it is shown to lose at most the margin."""
        return self.gap is not None and self.gap.low is not None and self.gap.low >= -MARGIN

    @property
    def is_worse(self) -> bool:
        """Return True if it is shown to lose more than the margin, or significantly worse."""
        if self.gap is None or self.is_within:
            return False
        loses_more = self.gap.high is not None and self.gap.high < -MARGIN
        return loses_more or (self.p is not None and self.p <= LEVEL)

    @property
    def may_be_better(self) -> bool:
        """Return True if it may be better by more than the margin."""
        return self.gap is not None and (self.gap.high is None or self.gap.high > MARGIN)


@dataclass(frozen=True)
class Choice:
    """The result of comparing all candidates with the best.

    best: the candidate of the highest value.
    cheapest: the one to take: the cheapest within the margin, or of all that are not shown to be
        worse (see the module).
    within, undecided, worse: all others but the best.
    detectable: the smallest difference from every undecided one that would have been detected, in
        points (None: unknown).
    """

    outcome: Outcome
    best: Candidate
    cheapest: Candidate
    within: tuple[Candidate, ...]
    undecided: tuple[Candidate, ...]
    worse: tuple[Candidate, ...]
    detectable: float | None

    @property
    def alike(self) -> tuple[Candidate, ...]:
        """Return the candidates between which no difference is shown."""
        return (self.best, *self.undecided, *self.within)


def choose(candidates: Sequence[Candidate]) -> Choice:
    """Return the choice among candidates, exactly one of which is the best (it has no gap).

    Of candidates that cost the same, the first is the cheapest.
    """
    best: list[Candidate] = []
    within: list[Candidate] = []
    worse: list[Candidate] = []
    undecided: list[Candidate] = []
    for candidate in candidates:
        if candidate.gap is None:
            best.append(candidate)
        elif candidate.is_within:
            within.append(candidate)
        elif candidate.is_worse:
            worse.append(candidate)
        else:
            undecided.append(candidate)
    (highest,) = best

    def cost(candidate: Candidate) -> tuple[float, ...]:
        """Return the costs as tuples compare them: the first that differs decides."""
        return (*candidate.costs.values(), candidates.index(candidate))

    cheapest = min([highest, *within], key=cost)
    outcome: Outcome = "best" if cheapest is highest else "cheaper"
    detectable = _detectable(undecided)
    could_change_choice = any(
        cost(candidate) < cost(cheapest) or candidate.may_be_better for candidate in undecided
    )
    if could_change_choice:
        cheapest = min([highest, *within, *undecided], key=cost)
        are_alike = detectable is not None and detectable <= DETECTED
        outcome = "no difference" if are_alike else "inconclusive"
    return Choice(
        outcome,
        best=highest,
        cheapest=cheapest,
        within=tuple(within),
        undecided=tuple(undecided),
        worse=tuple(worse),
        detectable=detectable,
    )


def _detectable(candidates: Sequence[Candidate]) -> float | None:
    """Return the smallest gap that is detectable for every candidate; None if that is unknown for
    one of them, or if there are none.
    """
    gaps = [candidate.detectable for candidate in candidates if candidate.detectable is not None]
    if not gaps or len(gaps) < len(candidates):
        return None
    return max(gaps)


# templates over the values of `_values_of`
_SENTENCES: Final[Mapping[Outcome, str]] = {
    "best": "Take **{{ chosen.name }}**: the highest {{ what }}, "
    "{{ chosen.value }}{% if has_cheaper %}; no cheaper variant is shown to be within {{ margin }} "
    "points of it{% else %}, and none is cheaper{% endif %}.",
    "cheaper": "Take **{{ chosen.name }}**: {{ what }} {{ chosen.value }}, {{ chosen.gap|alone }} "
    "from the highest (**{{ best.name }}**){{ price }}.",
    "no difference": "{{ alike|names }} do not differ measurably; a difference of {{ detectable }} "
    "points would have been detected. Take the cheapest, **{{ chosen.name }}**: {{ what }} "
    "{{ chosen.value }}{{ price }}.",
    "inconclusive": "Undecided: **{{ best.name }}** has the highest {{ what }}, {{ best.value }}, "
    "but {{ alike|names }} do not differ significantly{% if detectable %}; a difference below "
    "{{ detectable }} points may have been missed{% endif %}. The cheapest is "
    "**{{ chosen.name }}**{{ price }}.",
}
_TITLES: Final[Mapping[Outcome, str]] = {
    "best": "Take {{ chosen.name }}: the highest {{ what }}, {{ chosen.value|value }}",
    "cheaper": "Take {{ chosen.name }}: as good as {{ best.name }}, and cheaper",
    "no difference": "Take {{ chosen.name }}, the cheapest: the variants do not differ measurably",
    "inconclusive": "Undecided between {{ first_alike }}",
}
_NOT_SIGNIFICANT: Final = "{{ alike|names }} do not differ significantly"


def claim_of(choice: Choice, subject: str) -> Claim:
    """Return which candidate to take, and its cost relative to the best."""
    values = _values_of(choice)
    verdict = None
    if choice.outcome == "inconclusive":
        verdict = Verdict("inconclusive", say(_NOT_SIGNIFICANT, **values))
    return Claim(
        "choice",
        subject,
        say(_SENTENCES[choice.outcome], **values),
        say(_TITLES[choice.outcome], **values),
        verdict,
        effect=choice.cheapest.gap,
        p=choice.cheapest.p,
        kind="answer",
        place="points",
    )


def _values_of(choice: Choice) -> dict[str, Any]:
    """Return the values of the templates of a choice."""
    detectable = None
    if choice.detectable and choice.detectable < _LARGEST:
        detectable = in_points(choice.detectable)
    return {
        "chosen": choice.cheapest,
        "best": choice.best,
        "what": "top-1 accuracy",
        "margin": MARGIN,
        "alike": choice.alike,
        "first_alike": _first_names(choice.alike),
        "has_cheaper": _has_cheaper(choice),
        "price": _price(choice),
        "detectable": detectable,
    }


def _first_names(candidates: Sequence[Candidate]) -> Marked:
    """Return the first names and the number of the others."""
    names = [finalize(candidate.name) for candidate in candidates[:_NAMED]]
    if len(candidates) > _NAMED:
        names.append(f"{len(candidates) - _NAMED} more")
    return listed(names)


def _has_cheaper(choice: Choice) -> bool:
    """Return True if a candidate is cheaper than the chosen one."""
    costs = tuple(choice.cheapest.costs.values())
    return any(
        tuple(candidate.costs.values()) < costs for candidate in (*choice.alike, *choice.worse)
    )


def _price(choice: Choice) -> Marked:
    """Return the first cost in which the chosen candidate differs from the best, as a ratio; "" if
    none does.
    """
    for name, cost in choice.cheapest.costs.items():
        cost_of_best = choice.best.costs[name]
        if cost != cost_of_best:
            price = ", at {{ ratio|number }} times the {{ name }} of **{{ best }}**"
            return Marked(say(price, ratio=cost / cost_of_best, name=name, best=choice.best.name))
    return Marked("")


def compared_with_best(choice: Choice) -> str:
    """Return a sentence that compares the candidates with the best."""
    return say(
        "**{{ best }}** has the highest accuracy.{% if worse %} Shown to be lower: "
        "{{ worse|names }}.{% endif %}{% if within %} At most {{ margin }} points lower: "
        "{{ within|names }}.{% endif %}{% if undecided %} Undecided: "
        "{{ undecided|names }}.{% endif %}",
        best=choice.best.name,
        worse=choice.worse,
        within=choice.within,
        undecided=choice.undecided,
        margin=MARGIN,
    )


def undetectable(choice: Choice) -> str:
    """Return which differences from the best may have been missed; "" where that is unknown."""
    gaps = [
        candidate.detectable
        for candidate in (*choice.alike, *choice.worse)
        if candidate.detectable is not None
    ]
    if not gaps:
        return ""
    ends = [in_points(min(gaps)), in_points(max(gaps))]
    return say(
        "Differences from **{{ best }}** below {{ ends|join(' to ') }} points may have been missed "
        "(power: {{ power|percent }}).",
        best=choice.best.name,
        ends=list(dict.fromkeys(ends)),
        power=POWER,
    )


def in_points(detectable: float) -> Marked:
    """Return a detectable difference, without its unit.

    With few seeds that differ much it can exceed the largest difference that is possible.
    """
    if detectable < _LARGEST:
        return Marked(number(detectable, 1))
    return Marked(f"over {_LARGEST:g}")
