"""Requirements of a run's metrics, --at-least METRIC=VALUE and --at-most METRIC=VALUE, and their
outcomes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal

from vitlens.errors import InputError, nearest
from vitlens.record import MetricName, Record
from vitlens.uncertainty import Estimate

Bound = Literal["at least", "at most"]


@dataclass(frozen=True)
class Requirement:
    """A bound on a metric: its path in results.json, with or without the model's alias."""

    metric: str
    bound: Bound
    value: float


@dataclass(frozen=True)
class RequirementOutcome:
    """The outcome of a requirement on one metric.

    metric: its whole path; because: the number that was judged.
    """

    requirement: Requirement
    metric: str
    holds: bool
    because: str

    @property
    def line(self) -> str:
        """Return the line that is printed at the end of a command."""
        required = f"{self.requirement.metric} {self.requirement.bound} {self.requirement.value:g}"
        outcome = "holds" if self.holds else "does not hold"
        return f"{required}: {outcome}: {self.metric} {self.because}"


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
    patterns = list(dict.fromkeys((*map(_without_alias, with_alias), *with_alias)))
    for requirement in requirements:
        if any(MetricName(pattern).parts(requirement.metric) is not None for pattern in patterns):
            continue
        near = nearest(requirement.metric, patterns) or patterns[:3]
        hint = f"e.g. {', '.join(near)}" if near else "it has none"
        option = f"--{requirement.bound.replace(' ', '-')}"
        raise InputError(
            f"expected a metric of vitlens {word} with {option}, found {requirement.metric!r}; "
            f"{hint}"
        )


def outcomes(requirements: Sequence[Requirement], record: Record) -> Iterator[RequirementOutcome]:
    """Yield the outcome of each requirement on each metric of its name.

    A requirement that names no metric of the run does not hold.
    """
    for requirement in requirements:
        chosen = [
            name for name in record.metrics if requirement.metric in (name, _without_alias(name))
        ]
        if not chosen:
            near = nearest(
                requirement.metric, {*record.metrics, *map(_without_alias, record.metrics)}
            )
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            yield RequirementOutcome(
                requirement, requirement.metric, False, f"was not measured by this command{hint}"
            )
        for name in chosen:
            yield _judge(requirement, name, record.metrics[name])


def _without_alias(name: str) -> str:
    word, _, rest = name.partition("/")
    return "/".join(filter(None, (word, rest.partition("/")[2])))


def _judge(requirement: Requirement, name: str, estimate: Estimate) -> RequirementOutcome:
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
