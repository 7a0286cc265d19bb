"""Requirements of a run's metrics, and their outcomes.

A user types --at-least METRIC=VALUE or --at-most METRIC=VALUE. A metric has a path in results.json,
such as "accuracy/vit-digits": a word, then the alias of the model. A requirement without the alias
("accuracy") is one on this metric of every model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from string import Formatter
from typing import Final, Literal

from vitlens.errors import InputError, nearest
from vitlens.record import MetricName, Record
from vitlens.uncertainty import Estimate

Bound = Literal["at least", "at most"]
_EXAMPLES: Final = 3  # metrics that an error names, if none is near the one that was typed


@dataclass(frozen=True)
class Requirement:
    """A bound on a metric.

    metric: its path in results.json, with or without the model's alias.
    """

    metric: str
    bound: Bound
    value: float

    @property
    def words(self) -> str:
        """Return the requirement in words: "accuracy at least 0.9"."""
        return f"{self.metric} {self.bound} {self.value:g}"


@dataclass(frozen=True)
class RequirementOutcome:
    """The outcome of a requirement on one metric.

    metric: the path of the metric, with the model's alias.
    holds: True if the requirement holds.
    because: the number that was judged, in words.
    """

    requirement: Requirement
    metric: str
    holds: bool
    because: str

    @property
    def line(self) -> str:
        """Return the line that is printed at the end of a command."""
        outcome = "holds" if self.holds else "does not hold"
        return f"{self.requirement.words}: {outcome}: {self.metric} {self.because}"


def requirements_of(at_least: Sequence[str], at_most: Sequence[str]) -> tuple[Requirement, ...]:
    """Return the requirements that were typed. Raises InputError for anything but METRIC=VALUE."""
    requirements = [_parse(text, "at least", "--at-least") for text in at_least]
    requirements += [_parse(text, "at most", "--at-most") for text in at_most]
    return tuple(requirements)


def _parse(text: str, bound: Bound, option: str) -> Requirement:
    metric, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not metric or isnan(value):
        raise InputError(f"expected {option} METRIC=VALUE, such as accuracy=0.9, found {text!r}")
    return Requirement(metric, bound, value)


def require_known(
    requirements: Sequence[Requirement], metrics: Sequence[MetricName], *, word: str
) -> None:
    """Raise InputError, before anything is measured, for a metric that a command never has."""
    with_alias: list[str] = []
    for metric in metrics:
        with_alias += metric.patterns
    without_alias = [_without_alias(pattern) for pattern in with_alias]
    patterns = list(dict.fromkeys((*without_alias, *with_alias)))
    for requirement in requirements:
        if any(MetricName(pattern).parts(requirement.metric) is not None for pattern in patterns):
            continue
        examples = _examples(requirement.metric, patterns)
        hint = f"e.g. {', '.join(examples)}" if examples else "it has none"
        option = f"--{requirement.bound.replace(' ', '-')}"
        raise InputError(
            f"expected a metric of vitlens {word} with {option}, found {requirement.metric!r}; "
            f"{hint}"
        )


def _examples(metric: str, patterns: Sequence[str]) -> list[str]:
    """Return known metrics that an unknown one may stand for, as a user types them."""
    typed = list(dict.fromkeys(map(_as_typed, patterns)))
    same_word = [name for name in typed if name.partition("/")[0] == metric.partition("/")[0]]
    return same_word[:_EXAMPLES] or nearest(metric, typed) or typed[:_EXAMPLES]


def _as_typed(pattern: str) -> str:
    """Return a pattern with capitals for what a user replaces: "cost/METHOD" for "cost/{method}".

    The head of a pattern is the first, L0.H0.
    """
    of_first_layer = pattern.replace("L{layer}.H", "L0.H")
    of_first_head = of_first_layer.replace("L0.H{head}", "L0.H0")
    pieces = []
    for text, placeholder, _, _ in Formatter().parse(of_first_head):
        pieces += [text, (placeholder or "").upper()]
    return "".join(pieces)


def outcomes(requirements: Sequence[Requirement], record: Record) -> Iterator[RequirementOutcome]:
    """Yield the outcome of each requirement on each metric of its name.

    A requirement that names no metric of the run does not hold.
    """
    for requirement in requirements:
        matching = []
        for name in record.metrics:
            if requirement.metric in (name, _without_alias(name)):
                matching.append(name)
        if not matching:
            because = "was not measured by this command"
            known = {*record.metrics, *map(_without_alias, record.metrics)}
            near = nearest(requirement.metric, known)
            if near:
                because += f"; did you mean {' or '.join(near)}?"
            yield RequirementOutcome(requirement, requirement.metric, holds=False, because=because)
        for name in matching:
            yield _judge(requirement, name, record.metrics[name])


def _without_alias(name: str) -> str:
    """Return the path of a metric without its second part: "word/alias/rest" as "word/rest"."""
    word, _, alias_and_rest = name.partition("/")
    _, _, rest = alias_and_rest.partition("/")
    return f"{word}/{rest}" if rest else word


def _judge(requirement: Requirement, name: str, estimate: Estimate) -> RequirementOutcome:
    """Judge a requirement by the end of the interval that is worse for it."""
    if requirement.bound == "at least":
        end = "lower"
        worst = estimate.low
        holds = worst is not None and worst >= requirement.value
    else:
        end = "upper"
        worst = estimate.high
        holds = worst is not None and worst <= requirement.value
    if worst is None:
        because = f"is {estimate.value:.4g}, without an interval to judge by"
    else:
        because = f"is {estimate.value:.4g}, the {end} end of its interval {worst:.4g}"
    return RequirementOutcome(requirement, name, holds, because)
