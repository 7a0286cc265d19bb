"""Which of several points to take: one rule, and its words; free of torch.

Of the candidates that are shown to lose at most MARGIN points against the best (the whole interval of the paired
difference), the cheapest. One that is neither shown to be within the margin nor significantly worse is open. Where an
open one is cheaper, or may be better by more than the margin, there is no difference that the comparison can see if it
would have seen one of SEEN points with every open one, and the cheapest of them all is taken; else it is inconclusive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.report.claims import Claim, found
from vitlens.report.numbers import number
from vitlens.report.prose import Marked, finalize, listed, say
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, POWER, Estimate

MARGIN: Final = 2.0  # points that a cheaper candidate may lose
SEEN: Final = 5.0  # points: a comparison that would have seen less than this may call candidates alike
_FEW: Final = 3  # names in a title
_MOST: Final = 100.0  # points: the largest difference of two accuracies

Outcome = Literal["best", "cheaper", "no difference", "inconclusive"]


@dataclass(frozen=True)
class Candidate:
    """One of those to choose from. value: what is to be high; costs: by name, the first that differ decide; gap:
    its value minus the best's, paired, in points (None: it is the best); p: of that, after Holm; detectable: the
    smallest true gap that the comparison finds with a probability of 80 %, points."""

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
    def may_be_better(self) -> bool:
        """Return True if it may be better by more than the margin."""
        return self.gap is not None and (self.gap.high is None or self.gap.high > MARGIN)


@dataclass(frozen=True)
class Choice:
    """best: the highest; cheapest: of those not shown to be worse; within, open, worse: the others; detectable:
    the smallest difference that would have been seen with every open one (None: not known)."""

    outcome: Outcome
    best: Candidate
    cheapest: Candidate
    within: tuple[Candidate, ...]
    open: tuple[Candidate, ...]
    worse: tuple[Candidate, ...]
    detectable: float | None

    @property
    def alike(self) -> tuple[Candidate, ...]:
        """Return those between which no difference is shown."""
        return (self.best, *self.open, *self.within)


def choose(candidates: Sequence[Candidate]) -> Choice:
    """Return the choice among candidates, exactly one of which is the best; of equal costs the first."""
    (best,) = (each for each in candidates if each.gap is None)
    others = [each for each in candidates if each is not best]
    within = [each for each in others if each.is_within]
    worse = [each for each in others if not each.is_within and each.p is not None and each.p <= LEVEL]
    left = [each for each in others if each not in within and each not in worse]

    def cost(each: Candidate) -> tuple[float, ...]:
        return (*each.costs.values(), candidates.index(each))

    taken = min((best, *within), key=cost)
    known = [each.detectable for each in left if each.detectable is not None]
    detectable = max(known) if known and len(known) == len(left) else None
    outcome: Outcome = "best" if taken is best else "cheaper"
    if any(cost(each) < cost(taken) or each.may_be_better for each in left):
        taken = min((best, *within, *left), key=cost)
        outcome = "no difference" if detectable is not None and detectable <= SEEN else "inconclusive"
    return Choice(outcome, best, taken, tuple(within), tuple(left), tuple(worse), detectable)


_SAYS: Final[Mapping[Outcome, str]] = {
    "best": "Take **{{ own.name }}**: the highest {{ what }}, {{ own.value }}{% if cheaper %}; no cheaper one "
    "is shown to be within {{ margin }} points of it{% else %}, and none is cheaper{% endif %}.",
    "cheaper": "Take **{{ own.name }}**: {{ what }} {{ own.value }}, {{ own.gap|alone }} from the highest "
    "(**{{ best.name }}**){{ price }}.",
    "no difference": "{{ alike|names }} do not differ measurably; a difference of {{ detectable }} points would "
    "have been found. "
    "Take the cheapest, **{{ own.name }}**: {{ what }} {{ own.value }}{{ price }}.",
    "inconclusive": "Undecided: **{{ best.name }}** has the highest {{ what }}, {{ best.value }}, but "
    "{{ alike|names }} do not differ significantly{% if detectable %}; a difference below {{ detectable }} points may "
    "have been missed{% endif %}. The cheapest is **{{ own.name }}**{{ price }}.",
}
_TITLES: Final[Mapping[Outcome, str]] = {
    "best": "Take {{ own.name }}: the highest {{ what }}, {{ own.value|value }}",
    "cheaper": "Take {{ own.name }}: as good as {{ best.name }}, and cheaper",
    "no difference": "Take {{ own.name }}, the cheapest: the variants do not differ measurably",
    "inconclusive": "Undecided between {{ named }}",
}


_NOT_SHOWN: Final = "{{ alike|names }} do not differ significantly"


def claim_of(choice: Choice, subject: str) -> Claim:
    """Return what is to be taken, with what it costs against the best by the first cost in which they differ."""
    own = choice.cheapest
    best = choice.best
    more = len(choice.alike) - _FEW
    costs = tuple(own.costs.values())
    undecided = choice.outcome == "inconclusive"
    cost = next((name for name in own.costs if own.costs[name] != best.costs[name]), "")
    price = ", at {{ ratio|number }} times the {{ name }} of **{{ best }}**" if cost else ""
    ratio = own.costs[cost] / best.costs[cost] if cost else 1.0
    given = {
        "named": listed([finalize(each.name) for each in choice.alike[:_FEW]] + ([f"{more} more"] if more > 0 else [])),
        "cheaper": any(tuple(each.costs.values()) < costs for each in (*choice.alike, *choice.worse)),
        "own": own,
        "best": best,
        "what": "top-1 accuracy",
        "margin": MARGIN,
        "alike": choice.alike,
        "price": Marked(say(price, ratio=ratio, name=cost, best=best.name)),
        "detectable": in_points(choice.detectable) if choice.detectable and choice.detectable < _MOST else None,
    }
    return found(
        "choice",
        subject,
        _SAYS[choice.outcome],
        own.gap,
        given=given,
        headline=_TITLES[choice.outcome],
        verdict=Verdict("inconclusive", say(_NOT_SHOWN, **given)) if undecided else None,
        p=own.p,
        kind="answer",
        place="points",
    )


def others(choice: Choice) -> str:
    """Return how the candidates that are not taken stand against the best: a sentence."""
    return say(
        "**{{ best }}** is the highest.{% if worse %} Lower: {{ worse|names }}.{% endif %}{% if within %} At most "
        "{{ margin }} points lower: {{ within|names }}.{% endif %}{% if open %} Undecided: "
        "{{ open|names }}.{% endif %}",
        best=choice.best.name,
        worse=choice.worse,
        open=choice.open,
        within=choice.within,
        margin=MARGIN,
    )


def missed(choice: Choice) -> str:
    """Return the smallest differences to the best that would have been seen; "" where they are not known."""
    known = sorted(each.detectable for each in (*choice.alike, *choice.worse) if each.detectable is not None)
    return say(
        "{% if ends %}Differences from **{{ best }}** below {{ ends|join(' to ') }} points may have been missed "
        "(power: {{ power|percent }}).{% endif %}",
        best=choice.best.name,
        ends=list(dict.fromkeys(in_points(each) for each in known[:: max(1, len(known) - 1)])),
        power=POWER,
    )


def in_points(detectable: float) -> Marked:
    """Return the smallest difference that would have been seen; few seeds that differ would not see the largest there
    is."""
    return Marked(number(detectable, 1) if detectable < _MOST else f"over {_MOST:g}")
