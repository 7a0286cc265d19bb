"""The report of `vitlens report --compare`: what got worse, what else changed beyond chance, and what was different."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.changes import MetricChange, changes_between, left_out
from vitlens.record import Record, col, table
from vitlens.report.claims import Claim
from vitlens.report.prose import say
from vitlens.report.sections import Overview, Report, Section

_IGNORED: Final = frozenset({"run", "out", "overwrite", "quiet"})  # options that change no number
_IMAGES: Final = frozenset({"data", "images", "seed"})


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

    command: ClassVar[str] = "report"
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
    """Two runs that `require_comparable` lets pass; command_line: that compares them."""
    return ComparedRuns(
        config=replace(after.config, command_line=command_line, data=None),
        folder=after.folder,
        earlier=before.folder.name,
        later=after.folder.name,
        changes=changes_between(before, after),
        judged=tuple(_judged(before, after)),
        settings=tuple(_settings(before, after)),
        alone=left_out(before, after),
    )


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
    given = {"worse": runs.worse, "changed": runs.changed, "tested": runs.tested,
             "names": [row.metric for row in runs.worse], "more": len(runs.worse[1:])}  # fmt: skip
    yield Claim(
        "regression", runs.later,
        say("Of {{ tested|length }} metrics with intervals {{ changed|length }} changed beyond chance, "
            "{{ worse|length }} of them for the worse{% if names %}: {{ names|names }}{% endif %}.", **given),
        title=say("{% if names %}{{ names[0] }}{% if more %} and {{ more }} more{% endif %} got "
                  "worse{% elif not tested %}Nothing that can be tested was measured twice{% else %}Nothing got worse "
                  "beyond chance{% endif %}", **given),
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
