"""The report of a comparison: what got worse, what else changed beyond chance, and what differs in the settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.comparison.changes import MetricChange, changes_between, left_out
from vitlens.records import Record
from vitlens.report.document import Document, Finding, Section, Sentence, Table, Verdict
from vitlens.report.findings import finding, ranked
from vitlens.report.numbers import in_words

_IGNORED: Final = frozenset({"run", "out", "overwrite", "quiet"})  # options that change no number


@dataclass(frozen=True)
class ComparedRuns:
    """Two runs and their metrics."""

    before: Record
    after: Record
    changes: tuple[MetricChange, ...]

    @classmethod
    def of(cls, before: Record, after: Record) -> "ComparedRuns":
        """Two runs that `require_comparable` lets pass."""
        return cls(before, after, changes_between(before, after))

    @property
    def worse(self) -> tuple[MetricChange, ...]:
        """The metrics that got worse beyond chance."""
        return tuple(change for change in self.changes if change.direction == "worse")


def document(comparison: ComparedRuns, command_line: str = "") -> Document:
    """What changed from the first run to the second; command_line: that compares them."""
    before, after = comparison.before, comparison.after
    differing = tuple(_settings(before, after))
    return Document(
        f"What changed: {after.config.title}",
        sections=(_answer(comparison), _judgements(before, after), *_setting_section(differing)),
        limits=tuple(_limits(comparison, differing)),
        verdicts=(_verdict(comparison),),
        findings=ranked(map(_finding, comparison.changes)),
        appendix=(_all(comparison),),
        preface=(Sentence(f"Before: `{before.folder.name}`. After: `{after.folder.name}`.", says="setting"),),
        command_line=command_line,
    )


def _verdict(comparison: ComparedRuns) -> Verdict:
    tested = [change for change in comparison.changes if change.p is not None]
    threshold = "no metric worse with p (Holm) to 0.05"
    if not tested:
        return Verdict("no regression", "inconclusive", None, threshold, "no metric has an interval in both runs")
    if comparison.worse:
        named = ", ".join(change.metric for change in comparison.worse)
        return Verdict("no regression", "fail", None, threshold, f"worse beyond chance: {named}")
    return Verdict(
        "no regression", "pass", None, threshold,
        f"of {len(tested)} metrics with intervals none is shown to be worse; smaller changes than the intervals of the "
        "differences (appendix) cannot be seen",
    )  # fmt: skip


def _finding(change: MetricChange) -> Finding | None:
    judged = {"better": "improved", "worse": "got worse", "": "changed"}[change.direction]
    claim = f"`{change.metric}` {judged}: {in_words(change.before)} before, {in_words(change.after)} after."
    return finding(claim, change.difference, kind="answer", p=change.p_holm, rows=(change,))


def _answer(comparison: ComparedRuns) -> Section:
    changed = sorted((change for change in comparison.changes if change.changed), key=lambda change: change.p_holm or 0)
    tested = [change for change in comparison.changes if change.p is not None]
    exact = [change for change in comparison.changes if change.p is None and change.difference.value]
    words = f"Of {len(tested)} metrics with intervals, {len(changed)} changed beyond chance; {len(comparison.worse)} "
    text = f"{words}of them for the worse. {len(exact)} metrics without an interval differ, and are not judged."
    backing = (len(tested), len(changed), len(comparison.worse), len(exact))
    tables = [_table("Changed beyond chance", changed)] if changed else []
    if exact:
        tables.append(_table("Differing metrics without an interval", exact))
    return Section("What changed", (Sentence(text, backing),), tuple(tables), leading=True)


def _table(caption: str, changes: Sequence[MetricChange]) -> Table:
    columns = {
        "metric": lambda change: change.metric,
        "before": lambda change: change.before,
        "after": lambda change: change.after,
        "difference": lambda change: change.difference,
        "p (Holm)": lambda change: change.p_holm,
        "test": lambda change: "" if change.p is None else "paired" if change.paired else "independent",
        "for the": lambda change: change.direction,
    }
    return Table.of(caption, changes, columns)


def _all(comparison: ComparedRuns) -> Section:
    alone = left_out(comparison.before, comparison.after)
    text = f"Metrics of one run alone, which are not compared: {', '.join(f'`{name}`' for name in alone)}."
    sentences = (Sentence(text, alone),) if alone else ()
    return Section("All metrics of both runs", sentences, (_table("All metrics of both runs", comparison.changes),))


def _judgements(before: Record, after: Record) -> Section:
    """The verdicts of both reports, those that differ first."""
    was, now = (COMMANDS[record.command].report(record).verdicts for record in (before, after))
    aliases = dict(zip(after.aliases, before.aliases))
    earlier = {verdict.subject: verdict for verdict in was}
    rows = []
    for verdict in now:
        words = verdict.subject
        for alias, other in aliases.items():
            words = words.removesuffix(f" of {alias}") + (f" of {other}" if words.endswith(f" of {alias}") else "")
        if words in earlier:
            rows.append((verdict.subject, earlier[words].state, verdict.state))
    moved = [row for row in rows if row[1] != row[2]]
    text = f"{len(moved)} of {len(rows)} verdicts differ. A verdict near its threshold can differ by chance."
    ordered = tuple(sorted(rows, key=lambda row: row[1] == row[2]))
    table = Table("Verdicts before and after", ("subject", "before", "after"), ordered)
    return Section(
        "Verdicts of both runs", (Sentence(text, (len(moved), len(rows))),), (table,) if rows else (), leading=True
    )


def _settings(before: Record, after: Record) -> Iterator[tuple[str, str, str]]:
    """What differs between the runs: options, data, device, versions, weights."""
    first, second = before.config, after.config
    pairs: list[tuple[str, object, object]] = [
        (f"option {name}", first.options.get(name), second.options.get(name))
        for name in sorted({*first.options, *second.options} - _IGNORED)
    ]
    pairs += [
        (name, first.versions.get(name), second.versions.get(name))
        for name in sorted({*first.versions, *second.versions})
    ]
    pairs += [("seed", first.seed, second.seed), ("device", first.device, second.device)]
    pairs += [("precision", first.precision, second.precision)]
    if first.data is not None and second.data is not None:
        pairs += [("data", first.data.title, second.data.title), ("images", first.data.images, second.data.images)]
    for old, new in zip(first.models, second.models):
        pairs += [(f"model {new.alias}", old.alias, new.alias), (f"weights of {new.alias}", old.sha256, new.sha256)]
    return ((name, str(old), str(new)) for name, old, new in pairs if old != new)


def _setting_section(differing: tuple[tuple[str, str, str], ...]) -> Iterator[Section]:
    words = f"{len(differing)} settings differ." if differing else "No setting differs."
    table = Table("Settings that differ", ("setting", "before", "after"), differing)
    yield Section(
        "What was done differently",
        (Sentence(words, (len(differing),), says="setting"),),
        (table,) if differing else (),
        leading=True,
    )


def _limits(comparison: ComparedRuns, differing: tuple[tuple[str, str, str], ...]) -> Iterator[Sentence]:
    independent = [change for change in comparison.changes if change.p is not None and not change.paired]
    if independent:
        yield Sentence(
            f"{len(independent)} metrics were compared as if the runs had other images; on the same images this misses "
            "small changes.",
            (len(independent),),
        )
    names = {name for name, _, _ in differing}
    if names & {"data", "images", "seed"}:
        yield Sentence("The runs saw other images, so a change can be one of the images.", differing)
