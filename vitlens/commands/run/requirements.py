"""Requirements of a run's metrics, and their outcomes.

A user types --at-least METRIC=VALUE or --at-most METRIC=VALUE. A metric has a path in results.json,
such as "accuracy/vit-digits": a word, then the alias of the model. A requirement without the alias
("accuracy") is one on this metric of every model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    def option(self) -> str:
        """Return the option that sets it: --at-least or --at-most."""
        return f"--{self.bound.replace(' ', '-')}"

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
    requirements: Sequence[Requirement],
    metrics: Sequence[MetricName],
    *,
    word: str,
    models: int | None = None,
) -> None:
    """Raise InputError, before anything is measured, for what a command can never meet or judge.

    This is a metric that it never has, and a bound of a share outside 0 to 1.

    metrics: those of the command, whose name is `word`.
    models: the number of its models, None if it is not known.
    """
    names = _typed_names(metrics)
    possible_names = names
    if models == 1:
        possible_names = _typed_names([name for name in metrics if not name.compares_models])
    for requirement in requirements:
        metric = requirement.metric
        fitting = _fitting(metric, possible_names)  # by their patterns, with any values
        if not fitting and _fitting(metric, names):
            raise InputError(
                f"expected a metric of one model with {requirement.option}, found {metric!r}, "
                "which compares two; leave it out"
            )
        if not fitting:
            raise InputError(
                f"expected a metric of vitlens {word} with {requirement.option}, found "
                f"{metric!r}; {_hint(metric, possible_names)}"
            )
        with_known_values = [name for name in fitting if not name.unknown_values(metric)]
        if not with_known_values:
            raise InputError(_unknown_value(requirement, fitting[0], possible_names))
        if any(name.share for name in with_known_values) and not 0 <= requirement.value <= 1:
            raise InputError(
                f"expected a share from 0 to 1 with {requirement.option} {metric}, found "
                f"{requirement.value:g}; 0.9 is 90 %"
            )


def _typed_names(metrics: Sequence[MetricName]) -> list[MetricName]:
    """Return metrics as a user types them, once for each key: first without the model's alias."""
    without_alias = []
    with_alias = []
    for metric in metrics:
        for pattern in metric.patterns:
            without_alias.append(replace(metric, pattern=_without_alias(pattern), keys=()))
            with_alias.append(replace(metric, pattern=pattern, keys=()))
    return list(dict.fromkeys((*without_alias, *with_alias)))


def _fitting(metric: str, names: Sequence[MetricName]) -> list[MetricName]:
    return [name for name in names if name.parts(metric) is not None]


def _unknown_value(requirement: Requirement, name: MetricName, names: Sequence[MetricName]) -> str:
    """Return the message for a metric whose name has a value that no run writes.

    name: the metric. names: all metrics.
    """
    metric = requirement.metric
    values_by_placeholder = dict(name.values)
    (placeholder, value), *_ = name.unknown_values(metric).items()
    corrected = []
    for near in nearest(value, values_by_placeholder[placeholder]):
        corrected.append(metric.replace(f"/{value}", f"/{near}", 1))
    if not corrected:
        word = metric.partition("/")[0] + "/"
        patterns = [other.pattern for other in names if other.pattern.startswith(word)]
        corrected = nearest(metric, [pattern for pattern in patterns if "{" not in pattern])
    if corrected:
        hint = f"did you mean {' or '.join(corrected)}?"
    else:
        hint = f"known: {', '.join(values_by_placeholder[placeholder])}"
    return (
        f"expected a known {placeholder} in {requirement.option} {metric}, found {value!r}; {hint}"
    )


def _hint(metric: str, names: Sequence[MetricName]) -> str:
    """Return known metrics that an unknown one may stand for, as a user types them."""
    typed = list(dict.fromkeys(_as_typed(name.pattern) for name in names))
    same_word = [name for name in typed if name.partition("/")[0] == metric.partition("/")[0]]
    near = nearest(metric, typed)
    if same_word:
        return f"e.g. {', '.join(same_word[:_EXAMPLES])}"
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"e.g. {', '.join(typed[:_EXAMPLES])}" if typed else "it has none"


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
            near = _measured_instead(requirement.metric, record)
            if near:
                because += f"; did you mean {' or '.join(near)}?"
            yield RequirementOutcome(requirement, requirement.metric, holds=False, because=because)
        for name in matching:
            yield _judge(requirement, name, record.metrics[name])


def _measured_instead(metric: str, record: Record) -> list[str]:
    """Return measured metrics that one which was not measured may stand for.

    Those that differ only in their middle come first: the same accuracy under other attacks.
    """
    measured = list(dict.fromkeys((*map(_without_alias, record.metrics), *record.metrics)))
    parts = metric.split("/")
    similar = []
    for name in measured:
        other = name.split("/")
        same_ends = (parts[0], parts[-1]) == (other[0], other[-1])
        if same_ends and len(parts) == len(other) > 1:
            similar.append(name)
    return similar[:_EXAMPLES] or nearest(metric, measured)


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
