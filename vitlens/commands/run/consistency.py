"""The consistency of a report: one head, number or model with two labels, signs, samples or
verdicts.

What a sentence can reconcile is said in the report; the rest is an error of this package, which
tests look for.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vitlens.analysis.naming.words import MATTERS
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import Chaptered
from vitlens.record import Record
from vitlens.report.claims import Claim, veto_doubted
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Report
from vitlens.report.verdicts import ORDER
from vitlens.uncertainty import Estimate

_CAUSE: Final = re.compile(r"\b(because|due to|caused by)\b", re.IGNORECASE)
_SAME: Final = 1e-9  # between two numbers that are one
# columns that give the reason of a state in their row
_REASONED: Final = ("because", "not passed", "lacks", "found")
_STATUS_WORDS: Final = "|".join(ORDER)
_BARE: Final = re.compile(rf"^(?:{_STATUS_WORDS})(?: \(.*\))?$")
_HEADING: Final = re.compile(rf"^## .*\((?:{_STATUS_WORDS})\)$", re.MULTILINE)


@dataclass(frozen=True)
class Conflict:
    """Two statements of one report about one thing.

    about: what they are about.
    error: how they differ.
    says: the sentence that reconciles them, "" where none can.
    """

    about: str
    error: str
    says: str = ""


@dataclass(frozen=True)
class _Source:
    """A record with its name in the report."""

    name: str
    record: Any

    @property
    def claims(self) -> tuple[Claim, ...]:
        report = COMMANDS[self.record.command].report
        return veto_doubted(report.claims(self.record)) if isinstance(report, Report) else ()


def conflicts(record: Record) -> Iterator[Conflict]:
    """Yield what two parts of a report say differently about one thing."""
    sources = _sources(record)
    yield from _between(sources)
    for source in sources:
        yield from claim_conflicts(source.claims)
        yield from _of_counts(source.record)


def reconciled(record: Record) -> tuple[str, ...]:
    """Return the sentences that reconcile what parts of a report say differently, each once."""
    return tuple(
        dict.fromkeys(conflict.says for conflict in _between(_sources(record)) if conflict.says)
    )


def errors(record: Record) -> tuple[str, ...]:
    """Return the conflicts that no sentence reconciles, which are errors of this package."""
    return tuple(
        f"{conflict.about}: {conflict.error}" for conflict in conflicts(record) if not conflict.says
    )


def _sources(record: Record) -> list[_Source]:
    if not isinstance(record, Chaptered):
        return [_Source(record.command, record)]
    return [
        _Source(chapter.name, chapter.record)
        for chapter in record.parts
        if chapter.row.word != "train"
    ]


def _between(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield the conflicts between parts of a report."""
    yield from _of_numbers(sources)
    yield from _of_labels(sources)
    yield from _of_heads(sources)


def _of_numbers(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield metrics with two values on as many images, or on other images.

    One sentence names the latter's parts.
    """
    first_values: dict[str, tuple[_Source, Estimate]] = {}
    image_counts: dict[str, int] = {}
    on_others: list[Conflict] = []
    for source in sources:
        predicted = source.record.options.get("predicted", False)
        for name, value in source.record.metrics.items():
            if predicted and name.startswith("accuracy/"):  # 1 by construction
                continue
            first, other = first_values.setdefault(name, (source, value))
            if abs(other.value - value.value) <= _SAME and other.n == value.n:
                continue
            differs = (
                f"{other.value:g} (n = {other.n}) in {first.name}, {value.value:g} (n = "
                f"{value.n}) in {source.name}"
            )
            conflict = Conflict(name, differs)
            counts = (
                [first.record.images, source.record.images]
                if other.n is None
                else [other.n, value.n]
            )
            if len({*counts}) == 1:
                yield conflict
                continue
            image_counts |= {part.name: part.record.images for part in (first, source)}
            on_others.append(conflict)
    says = say(
        "Numbers of images: {{ parts }}. Numbers of the same name differ where the images do.",
        parts=listed(
            [say("{{ name }} {{ n }}", name=name, n=count) for name, count in image_counts.items()]
        ),
    )
    yield from (replace(conflict, says=says) for conflict in on_others)


def _of_labels(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield heads with two labels of what they attend to.

    On other images one sentence names all of them.
    """
    first_labels: dict[tuple[str, int, int], tuple[_Source, str]] = {}
    differing: dict[tuple[str, str], list[Conflict]] = {}
    by_name = {source.name: source for source in sources}
    for source in sources:
        for row in _rows_with(source.record, "layer", "head", "label"):
            if row.head is None or row.label is None:
                continue
            model = getattr(row, "model", "")
            first, label = first_labels.setdefault(
                (model, row.layer, row.head), (source, row.label)
            )
            if label != row.label:
                error = f"labels {label} in {first.name} and {row.label} in {source.name}"
                conflict = Conflict(f"L{row.layer}.H{row.head}", error)
                differing.setdefault((first.name, source.name), []).append(conflict)
    for (first_name, second_name), label_conflicts in differing.items():
        says = _on_other_images(
            by_name[first_name],
            by_name[second_name],
            [conflict.about for conflict in label_conflicts],
        )
        yield from (replace(conflict, says=says) for conflict in label_conflicts)


def _on_other_images(first: _Source, second: _Source, heads: Sequence[str]) -> str:
    """Return that labels of heads depend on the images; "" for parts that use as many images."""
    if first.record.images == second.record.images:
        return ""
    return say(
        "The label{{ heads|s }} of {{ heads|names }} {{ heads|are }} unstable: {{ first }} uses "
        "{{ n }} images, {{ second }} {{ m }}.",
        heads=heads,
        first=first.name,
        second=second.name,
        n=first.record.images,
        m=second.record.images,
    )


def _of_heads(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield heads that matter to one class, and whose removal is shown not to change the mean
    loss."""
    spared: dict[tuple[str, int, int], str] = {}
    for source in sources:
        for row in _rows_with(source.record, "layer", "head", "effect"):
            if row.head is not None and row.effect == "no effect":
                spared[getattr(row, "model", "") or row.unit, row.layer, row.head] = row.unit
    contradictory = [
        row
        for source in sources
        for row in _rows_with(source.record, "layer", "head", "writes", "state")
        if row.state == MATTERS and (row.model, row.layer, row.head) in spared
    ]
    if contradictory:
        heads = Marked(
            listed(
                [say("**{{ row.name }}** ({{ row.writes }})", row=row) for row in contradictory[:5]]
            )
        )
        yield Conflict(
            "heads without an effect on the mean loss",
            f"{len(contradictory)} matter to a class",
            say(
                "Removing {{ heads }} lowers the log-odds of one class more than of others. "
                "Their effect on the loss over all classes is smaller than what ablation counts.",
                heads=heads,
            ),
        )


def _of_counts(record: Any) -> Iterator[Conflict]:
    """Yield changes of images that count images whose property is not known."""
    covariates = {(row.model, row.covariate): row for row in getattr(record, "covariates", ())}
    for test in getattr(record, "interventions", ()):
        row = covariates.get((test.model, test.covariate))
        about = f"{test.covariate} of {test.model}"
        if row is not None and (test.gain.n or 0) > (row.area.n or 0):
            yield Conflict(about, f"changed on {test.gain.n} images, known of {row.area.n}")
        if test.mended > test.errors:
            yield Conflict(about, f"{test.mended} of {test.errors} errors fixed")


def _rows_with(record: Any, *names: str) -> list[Any]:
    """Return the rows of all tables of a record that have these fields."""
    tables = [
        rows
        for rows in record.tables.values()
        if rows and all(hasattr(rows[0], name) for name in names)
    ]
    return [row for rows in tables for row in rows]


def claim_conflicts(claims: Iterable[Claim]) -> Iterator[Conflict]:
    """Yield what claims on one question and subject say differently, and causes that nothing was
    changed to show.
    """
    seen: dict[tuple[str, str], Claim] = {}
    for claim in claims:
        first = seen.setdefault((claim.question, claim.subject), claim)
        about = f"{claim.question} of {claim.subject}"
        if claim.state != first.state:
            yield Conflict(
                about, f"{first.state or 'no judgement'} and {claim.state or 'no judgement'}"
            )
        if claim.effect and first.effect and claim.effect.value * first.effect.value < 0:
            yield Conflict(about, "two signs")
        if claim.effect and first.effect and claim.effect.n != first.effect.n:
            yield Conflict(about, f"{first.effect.n} and {claim.effect.n} images")
        if claim.evidence != "intervened" and _CAUSE.search(claim.says):
            yield Conflict(about, f"a cause without an intervention: {claim.says}")


def bare_statuses(text: str) -> list[str]:
    """Return the statuses of a report.md that stand without their reason: in headings, and in cells
    of tables.
    """
    statuses = _HEADING.findall(text)
    columns: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
            continue
        if not any(name in columns for name in _REASONED):
            statuses += [cell for cell in cells if _BARE.fullmatch(cell)]
    return statuses
