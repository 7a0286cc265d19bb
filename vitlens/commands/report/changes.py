"""The metrics of two runs of one command, side by side, and which of them changed beyond chance."""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.evaluate.record import EvaluateRecord, PredictionArrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import Chaptered
from vitlens.errors import InputError
from vitlens.record import Better, Record, col
from vitlens.uncertainty import LEVEL, Estimate, accuracy_difference, difference_of, holm, mcnemar

Direction = Literal["better", "worse", ""]


@dataclass(frozen=True)
class MetricChange:
    """One metric before and after; difference: after minus before. p_holm: corrected for all metrics with an interval
    in both runs, None without; test: "paired" where the two runs' predictions of the same images were compared
    (McNemar's exact test); otherwise the two estimates count as independent, which on the same images finds too few
    changes rather than too many; better: the direction that is."""

    metric: str = col("metric", unit="text")
    before: Estimate = col("before")
    after: Estimate = col("after")
    difference: Estimate = col("difference")
    p: float | None = col("p")
    p_holm: float | None = col("p (Holm)", default=None)
    test: Literal["paired", "independent", ""] = col("test", default="")
    better: Better | None = col("better", default=None)

    @property
    def changed(self) -> bool:
        """Whether it changed beyond chance."""
        return self.p_holm is not None and self.p_holm <= LEVEL

    @property
    def direction(self) -> Direction:
        """Whether a change beyond chance is for the better or the worse, "" where there is none or neither is known."""
        if not self.changed or self.better is None or not self.difference.value:
            return ""
        return "better" if (self.difference.value > 0) == (self.better == "higher") else "worse"


def require_comparable(before: Record, after: Record) -> None:
    """Raise InputError unless the runs are of one command, done, with as many models."""
    if before.command != after.command:
        raise InputError(
            f"expected two folders of one command, found {before.command} ({before.folder}) and {after.command} "
            f"({after.folder})"
        )
    for record in (before, after):
        if record.status != "done":
            raise InputError(f"expected a run that is done in {record.folder}, found one that is {record.status}")
    if len(before.models) != len(after.models):
        raise InputError(
            f"expected as many models in both folders, found {len(before.models)} in {before.folder} and "
            f"{len(after.models)} in {after.folder}"
        )


def changes_between(before: Record, after: Record) -> tuple[MetricChange, ...]:
    """Every metric of both runs, models matched by their place on the command line."""
    names = _renamed(before, after)
    changes = [
        _paired(before, after, name, other) or _change(name, before.metrics[other], after.metrics[name])
        for name, other in names.items()
    ]
    found = [replace(change, better=after.better(change.metric)) for change in changes]
    tested = [change for change in found if change.p is not None]
    corrected = iter(holm([float(change.p or 0.0) for change in tested]))
    return tuple(replace(change, p_holm=next(corrected)) if change.p is not None else change for change in found)


def left_out(before: Record, after: Record) -> tuple[str, ...]:
    """The metrics that only one of the two runs has."""
    names = _renamed(before, after)
    alone = [name for name in after.metrics if name not in names]
    return (*alone, *(name for name in before.metrics if name not in names.values()))


def _renamed(before: Record, after: Record) -> dict[str, str]:
    """The metrics of both runs: name after -> name before, which differ by the models' aliases."""
    aliases = dict(zip(after.aliases, before.aliases))
    declared = COMMANDS[after.command].contents.metrics
    names: dict[str, str] = {}
    for name in after.metrics:
        parts = next((parts for metric in declared if (parts := metric.parts(name)) is not None), {})
        metric = next((metric for metric in declared if metric.parts(name) is not None), None)
        other = name if metric is None else metric(**{key: aliases.get(part, part) for key, part in parts.items()})
        if other in before.metrics:
            names[name] = other
    return names


def _change(name: str, before: Estimate, after: Estimate) -> MetricChange:
    gap = _gap(after, before)
    if gap.low is None or gap.high is None:
        return MetricChange(name, before, after, gap, None)
    arm = gap.value - gap.low if gap.value > 0 else gap.high - gap.value
    z = NormalDist().inv_cdf(0.975) * abs(gap.value) / arm if arm > 0 else np.inf * bool(gap.value)
    p = 2 * (1 - NormalDist().cdf(z)) if gap.value else 1.0
    return MetricChange(name, before, after, gap, p, test="independent")


def _gap(first: Estimate, second: Estimate) -> Estimate:
    """The difference of two estimates, as if of other images; of fractions in points."""
    gap = difference_of(first, second)  # Newcombe's method needs the ends of two intervals alone, not fractions
    if first.unit == "fraction":
        return gap
    low, high = (None if end is None else end / 100 for end in (gap.low, gap.high))
    return Estimate(gap.value / 100, low, high, first.n, first.unit)


def _paired(before: Record, after: Record, name: str, other: str) -> MetricChange | None:
    """The change of an accuracy of which both runs keep the answers to the same images."""
    word, _, alias = name.partition("/")
    answers = (_predictions(before, other.partition("/")[2]), _predictions(after, alias)) if word == "accuracy" else ()
    if not answers or any(each is None for each in answers):
        return None
    first, second = (each for each in answers if each is not None)
    if not np.array_equal(first.label, second.label):
        return None
    was, now = _correct(first), _correct(second)
    gap = accuracy_difference(now, was)
    p = mcnemar(int((now & ~was).sum()), int((was & ~now).sum()))
    return MetricChange(name, before.metrics[other], after.metrics[name], gap, p, test="paired")


def _predictions(record: Any, alias: str) -> PredictionArrays | None:
    """The answers of a model in a run of evaluate, or in the chapter on it of a study or an audit."""
    chapters = record.of("evaluate") if isinstance(record, Chaptered) else ()
    run = record if isinstance(record, EvaluateRecord) else chapters[0].record if chapters else None
    return None if run is None else run.predictions.get(alias)


def _correct(answers: PredictionArrays) -> NDArray[np.bool_]:
    correct: NDArray[np.bool_] = np.asarray(answers.prediction) == np.asarray(answers.label)
    return correct
