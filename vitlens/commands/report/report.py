"""The report of `vitlens report --compare`: what got worse, what else changed beyond chance, and what was different."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np

from vitlens.commands.evaluate.record import EvaluateRecord, PredictionArrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import Chaptered
from vitlens.errors import InputError
from vitlens.record import Better, Record, col, table
from vitlens.report.claims import Claim, found
from vitlens.report.prose import say
from vitlens.report.sections import Overview, Report, Section
from vitlens.uncertainty import LEVEL, Estimate, accuracy_difference, difference_of, holm, paired_test

_IGNORED: Final = frozenset({"run", "out", "overwrite", "quiet"})  # options that change no number
_IMAGES: Final = frozenset({"data", "images", "seed"})


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
    def direction(self) -> Literal["better", "worse", ""]:
        """Whether a change beyond chance is for the better or the worse, "" where there is none or neither is known."""
        if not self.changed or self.better is None or not self.difference.value:
            return ""
        return "better" if (self.difference.value > 0) == (self.better == "higher") else "worse"


@dataclass(frozen=True)
class JudgedRow:
    """One judgement of both reports."""

    judged: str = col("judged", unit="text")
    before: str = col("before")
    after: str = col("after")


@dataclass(frozen=True)
class SettingRow:
    """One setting that differs."""

    setting: str = col("setting", unit="text")
    before: str = col("before", unit="text")
    after: str = col("after", unit="text")


@dataclass(frozen=True, kw_only=True)
class ComparedRuns(Record):
    """Two runs of one command. earlier, later: their folders' names; alone: metrics that only one of them has."""

    earlier: str = ""
    later: str = ""
    changes: tuple[MetricChange, ...] = table()
    judged: tuple[JudgedRow, ...] = table()
    settings: tuple[SettingRow, ...] = table()
    alone: tuple[str, ...] = ()

    @property
    def tested(self) -> Sequence[MetricChange]:
        """The metrics with an interval in both."""
        return [row for row in self.changes if row.p is not None]

    @property
    def changed(self) -> Sequence[MetricChange]:
        """Those that changed beyond chance, the clearest first."""
        return sorted((row for row in self.changes if row.changed), key=lambda row: row.p_holm or 0)

    @property
    def worse(self) -> Sequence[MetricChange]:
        """Those that got worse beyond chance."""
        return [row for row in self.changed if row.direction == "worse"]


def compared_runs(before: Any, after: Any, command_line: str) -> ComparedRuns:
    """Two runs of one command; command_line: that compares them.

    Raises InputError unless both are done, with as many models.
    """
    if before.command != after.command:
        raise InputError(
            f"expected two folders of one command, found {before.command} ({before.folder}) and {after.command} "
            f"({after.folder})"
        )
    for record in (before, after):
        if record.status != "done":
            raise InputError(f"expected a run that is done in {record.folder}, found one that is {record.status}")
    if len(before.aliases) != len(after.aliases):
        raise InputError(
            f"expected as many models in both folders, found {len(before.aliases)} in {before.folder} and "
            f"{len(after.aliases)} in {after.folder}"
        )
    names = _renamed(before, after)
    alone = [name for name in after.metrics if name not in names]
    return ComparedRuns(
        config=replace(after.config, command_line=command_line, data=None),
        folder=after.folder,
        earlier=before.folder.name,
        later=after.folder.name,
        changes=changes_between(before, after),
        judged=tuple(_judged(before, after)),
        settings=tuple(_settings(before, after)),
        alone=(*alone, *(name for name in before.metrics if name not in names.values())),
    )


def changes_between(before: Record, after: Record) -> tuple[MetricChange, ...]:
    """Every metric of both runs, models matched by their place on the command line."""
    found = [_change(before, after, name, other) for name, other in _renamed(before, after).items()]
    corrected = iter(holm([change.p for change in found if change.p is not None]))
    return tuple(replace(change, p_holm=next(corrected)) if change.p is not None else change for change in found)


def _renamed(before: Record, after: Record) -> dict[str, str]:
    """The metrics of both runs: name after -> name before, which differ by the models' aliases."""
    aliases = dict(zip(after.aliases, before.aliases))
    declared = COMMANDS[after.command].contents.metrics
    names: dict[str, str] = {}
    for name in after.metrics:
        known = ((metric, parts) for metric in declared if (parts := metric.parts(name)) is not None)
        metric, parts = next(known, (None, {}))
        other = (
            name
            if metric is None
            else metric.pattern.format(**{key: aliases.get(part, part) for key, part in parts.items()})
        )
        if other in before.metrics:
            names[name] = other
    return names


def _change(before: Record, after: Record, name: str, other: str) -> MetricChange:
    """One metric, called `other` before: of an accuracy by the answers to the same images where both runs keep them."""
    was, now, (word, _, alias) = before.metrics[other], after.metrics[name], name.partition("/")
    better = after.better(name)
    first, second = _predictions(before, other.partition("/")[2]), _predictions(after, alias)
    if word == "accuracy" and first and second and np.array_equal(first.label, second.label):
        right_before, right = (np.asarray(each.prediction == each.label) for each in (first, second))
        p = paired_test(right, right_before, groups=second.groups)
        gap = accuracy_difference(right, right_before, groups=second.groups)
        return MetricChange(name, was, now, gap, p, test="paired", better=better)
    gap = difference_of(now, was)  # Newcombe's method needs the ends of two intervals alone, not fractions
    if now.unit != "fraction":
        low, high = (None if end is None else end / 100 for end in (gap.low, gap.high))
        gap = Estimate(gap.value / 100, low, high, now.n, now.unit)
    if gap.low is None or gap.high is None:
        return MetricChange(name, was, now, gap, None, better=better)
    arm = gap.value - gap.low if gap.value > 0 else gap.high - gap.value
    z = NormalDist().inv_cdf(0.975) * abs(gap.value) / arm if arm > 0 else np.inf * bool(gap.value)
    p = 2 * (1 - NormalDist().cdf(z)) if gap.value else 1.0
    return MetricChange(name, was, now, gap, p, test="independent", better=better)


def _predictions(record: Any, alias: str) -> PredictionArrays | None:
    """The answers of a model in a run of evaluate, or in the chapter on it of a study or an audit."""
    chapters = record.of("evaluate") if isinstance(record, Chaptered) else ()
    run = record if isinstance(record, EvaluateRecord) else chapters[0].record if chapters else None
    return None if run is None else run.predictions.get(alias)


def _judged(before: Any, after: Any) -> Iterator[JudgedRow]:
    """The judgements of both reports, those that differ first."""
    was, now = (COMMANDS[record.command].report(record).claims for record in (before, after))
    aliases = dict(zip(after.aliases, before.aliases))
    earlier = {(claim.question, claim.subject): claim.state for claim in was}
    known = [(claim, earlier.get((claim.question, aliases.get(claim.subject, claim.subject)), "")) for claim in now]
    rows = [
        JudgedRow(f"{claim.question} of {claim.subject}", old, claim.state)
        for claim, old in known
        if claim.state and old
    ]
    yield from sorted(rows, key=lambda row: row.before == row.after)


def _settings(before: Any, after: Any) -> Iterator[SettingRow]:
    """What differs between the runs: options, versions, data, device, weights."""
    first, second = before.config, after.config
    pairs: list[tuple[str, object, object]] = []
    for words, old, new in (("option ", first.options, second.options), ("", first.versions, second.versions)):
        pairs += [(f"{words}{name}", old.get(name), new.get(name)) for name in sorted({*old, *new} - _IGNORED)]
    pairs += [(name, getattr(first, name), getattr(second, name)) for name in ("seed", "device", "precision")]
    if first.data is not None and second.data is not None:
        pairs += [("data", first.data.title, second.data.title), ("images", first.data.images, second.data.images)]
    for old, new in zip(first.models, second.models):
        pairs += [(f"model {new.alias}", old.alias, new.alias), (f"weights of {new.alias}", old.sha256, new.sha256)]
    return (SettingRow(name, str(old), str(new)) for name, old, new in pairs if old != new)


def claims(runs: ComparedRuns) -> Iterator[Claim]:
    """Whether anything got worse, then what changed."""
    yield found(
        "regression", runs.later,
        "Of {{ tested|length }} metrics with intervals {{ changed|length }} changed beyond chance, {{ names|length }} "
        "of them for the worse{% if names %}: {{ names|names }}{% endif %}.",
        headline="{% if names %}{{ names[0] }}{% if more %} and {{ more }} more{% endif %} got worse{% elif not tested "
        "%}Nothing that can be tested was measured twice{% else %}Nothing got worse beyond chance{% endif %}",
        given={"changed": runs.changed, "tested": runs.tested, "names": [row.metric for row in runs.worse],
               "more": len(runs.worse[1:])},
        state="fail" if runs.worse else "pass" if runs.tested else "inconclusive", kind="answer",
    )  # fmt: skip
    for row in runs.changed:
        word = {"better": "improved", "worse": "got worse", "": "changed"}[row.direction]
        says = say(
            "**{{ row.metric }}** {{ word }}: {{ row.before }} before, {{ row.after }} after.", row=row, word=word
        )
        yield Claim("change", row.metric, says, effect=row.difference, p=row.p_holm, kind="comparison")


def unknown(runs: ComparedRuns) -> Iterator[str]:
    """What could overturn this."""
    if _IMAGES & {row.setting for row in runs.settings}:
        yield "The runs saw other images, so a change can be one of the images."
    independent = [row for row in runs.tested if row.test == "independent"]
    if independent:
        yield say(
            "{{ n }} metric{{ n|s }} {{ n|are }} compared as if the runs had other images; on the same images this "
            "misses small changes.", n=len(independent),
        )  # fmt: skip
    if runs.alone:
        yield say("Measured by one run alone, and not compared: {{ names|names }}.", names=runs.alone)


REPORT: Final = Report(
    ComparedRuns,
    claims=claims,
    unknown=unknown,
    title="What changed from {{ record.earlier }} to {{ record.later }}",
    glance=Overview("changed", ("metric", "before", "after", "difference", "p_holm", "test")),
    sections=(
        Section(
            "Which metrics without an interval differ?",
            lambda runs: [row for row in runs.changes if row.p is None and row.difference.value],
            opening="{{ rows|length }} {{ rows|length|are }} not judged.",
            columns=("metric", "before", "after", "difference"),
        ),
        Section(
            "Are the judgements the same?", "judged",
            opening=lambda runs: say(
                "{{ k }} of {{ n }} judgements differ. One near its limit can differ by chance.",
                k=sum(row.before != row.after for row in runs.judged), n=len(runs.judged),
            ),
            columns=("judged", "before", "after"),
        ),
        Section(
            "What was done differently?", "settings", opening="{{ rows|length }} setting{{ rows|length|s }} differ"
            "{% if rows|length == 1 %}s{% endif %}.", without="No setting differs.",
            columns=("setting", "before", "after"),
        ),
        Section(
            "What did both runs measure?", "changes", columns=("metric", "before", "after", "difference", "p_holm"),
            order=lambda row: row.metric,
        ),
    ),
)  # fmt: skip
