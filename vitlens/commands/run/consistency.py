"""The consistency of a report: one head, number or model with two labels, signs, samples or states.

A conflict that a sentence can reconcile is explained in the report (`reconciled`). Any other is an
error of this package, which tests look for (`errors`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vitlens.analysis.naming.words import MATTERS
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import Chaptered
from vitlens.record import Record
from vitlens.report.claims import Claim, veto_doubted
from vitlens.report.prose import listed, say
from vitlens.report.sections import Report
from vitlens.report.verdicts import ORDER
from vitlens.uncertainty import Estimate

_CAUSE: Final = re.compile(r"\b(because|due to|caused by)\b", re.IGNORECASE)
_ROUNDING: Final = 1e-9  # by which two equal numbers may differ
_MOST_NAMED: Final = 5  # heads in a sentence
# columns that give the reason of a state in their row
_REASONS: Final = ("because", "not passed", "lacks", "found")
_STATES: Final = "|".join(ORDER)
_BARE_STATE: Final = re.compile(rf"^(?:{_STATES})(?: \(.*\))?$")
_HEADING_WITH_STATE: Final = re.compile(rf"^## .*\((?:{_STATES})\)$", re.MULTILINE)


@dataclass(frozen=True)
class Conflict:
    """Two statements of one report that contradict each other.

    about: what both are about.
    error: how they differ.
    says: the sentence that reconciles them, "" where none can.
    """

    about: str
    error: str
    says: str = ""


@dataclass(frozen=True)
class _Source:
    """A record with its name in the report, and its metrics that are those of the whole run."""

    name: str
    record: Any
    metrics: Mapping[str, Estimate]

    @property
    def claims(self) -> tuple[Claim, ...]:
        report = COMMANDS[self.record.command].report
        if not isinstance(report, Report):  # a function makes this command's report
            return ()
        return veto_doubted(report.claims(self.record))


def conflicts(record: Record) -> Iterator[Conflict]:
    """Yield all conflicts of a report: between its parts, and within each part."""
    sources = _sources(record)
    yield from _conflicts_between(sources)
    for source in sources:
        yield from claim_conflicts(source.claims)
        yield from _count_conflicts(source.record)


def reconciled(record: Record) -> tuple[str, ...]:
    """Return the sentences that reconcile conflicts between parts of a report, each once."""
    sentences = [conflict.says for conflict in _conflicts_between(_sources(record))]
    return tuple(dict.fromkeys(sentence for sentence in sentences if sentence))


def errors(record: Record) -> tuple[str, ...]:
    """Return the conflicts that no sentence reconciles, which are errors of this package."""
    return tuple(
        f"{conflict.about}: {conflict.error}" for conflict in conflicts(record) if not conflict.says
    )


def _sources(record: Record) -> list[_Source]:
    """Return the parts of a report: the record itself, or those of its chapters."""
    if not isinstance(record, Chaptered):
        return [_Source(record.command, record, record.metrics)]
    sources = []
    for chapter in record.parts:
        if chapter.row.word != "train":  # it has no metrics of the whole run
            sources.append(_Source(chapter.name, chapter.record, record.metrics_of(chapter)))
    return sources


def _conflicts_between(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield the conflicts between parts of a report."""
    yield from _metric_conflicts(sources)
    yield from _label_conflicts(sources)
    yield from _effect_conflicts(sources)


def _metric_conflicts(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield metrics with two values: first those on as many images, then those on other images.

    One sentence reconciles the latter: it names the number of images of each part.
    """
    first_values: dict[str, tuple[_Source, Estimate]] = {}
    image_counts: dict[str, int] = {}  # by name of the part
    on_other_images: list[Conflict] = []
    for source in sources:
        for name, value in source.metrics.items():
            first_source, first_value = first_values.setdefault(name, (source, value))
            is_equal = abs(first_value.value - value.value) <= _ROUNDING
            if is_equal and first_value.n == value.n:
                continue
            error = (
                f"{first_value.value:g} (n = {first_value.n}) in {first_source.name}, "
                f"{value.value:g} (n = {value.n}) in {source.name}"
            )
            conflict = Conflict(name, error)
            # without n, the parts' numbers of images say whether the images differ
            if first_value.n is None:
                has_equal_counts = first_source.record.images == source.record.images
            else:
                has_equal_counts = first_value.n == value.n
            if has_equal_counts:
                yield conflict
                continue
            image_counts[first_source.name] = first_source.record.images
            image_counts[source.name] = source.record.images
            on_other_images.append(conflict)
    counts_in_words = []
    for name, count in image_counts.items():
        counts_in_words.append(say("{{ name }} {{ n }}", name=name, n=count))
    says = say(
        "Numbers of images: {{ parts }}. Numbers of the same name differ where the images do.",
        parts=listed(counts_in_words),
    )
    for conflict in on_other_images:
        yield replace(conflict, says=says)


def _label_conflicts(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield heads with two labels of what they attend to.

    One sentence reconciles all heads of two parts that use other images.
    """
    # by model, layer and head
    first_labels: dict[tuple[str, int, int], tuple[_Source, str]] = {}
    # by the names of both parts
    conflicts_of_parts: dict[tuple[str, str], list[Conflict]] = {}
    source_by_name = {source.name: source for source in sources}
    for source in sources:
        for row in _rows_with(source.record, "layer", "head", "label"):
            if row.head is None or row.label is None:
                continue
            key = (getattr(row, "model", ""), row.layer, row.head)
            first_source, first_label = first_labels.setdefault(key, (source, row.label))
            if first_label != row.label:
                error = (
                    f"labels {first_label} in {first_source.name} and {row.label} in {source.name}"
                )
                conflict = Conflict(f"L{row.layer}.H{row.head}", error)
                parts = (first_source.name, source.name)
                conflicts_of_parts.setdefault(parts, []).append(conflict)
    for (first_name, second_name), conflicts_of_pair in conflicts_of_parts.items():
        says = _unstable_labels_words(
            source_by_name[first_name],
            source_by_name[second_name],
            [conflict.about for conflict in conflicts_of_pair],
        )
        for conflict in conflicts_of_pair:
            yield replace(conflict, says=says)


def _unstable_labels_words(first: _Source, second: _Source, heads: Sequence[str]) -> str:
    """Return that labels of heads depend on the images; "" for parts that use as many images."""
    if first.record.images == second.record.images:
        return ""
    return say(
        "The label{{ heads|s }} of {{ heads|names }} {{ heads|are }} unstable: {{ first.name }} "
        "uses {{ first.record.images }} images, {{ second.name }} {{ second.record.images }}.",
        heads=heads,
        first=first,
        second=second,
    )


def _effect_conflicts(sources: Sequence[_Source]) -> Iterator[Conflict]:
    """Yield heads that matter to one class although their removal does not change the mean loss."""
    without_effect: set[tuple[str, int, int]] = set()  # model, layer and head
    # rows of heads of `vitlens ablate`
    for source in sources:
        for row in _rows_with(source.record, "layer", "head", "effect"):
            if row.head is not None and row.effect == "no effect":
                model = getattr(row, "model", "") or row.unit
                without_effect.add((model, row.layer, row.head))
    contradictory = []
    # rows of what heads write, as of `vitlens head`
    for source in sources:
        for row in _rows_with(source.record, "layer", "head", "writes", "state"):
            if row.state == MATTERS and (row.model, row.layer, row.head) in without_effect:
                contradictory.append(row)
    if contradictory:
        heads = []
        for row in contradictory[:_MOST_NAMED]:
            heads.append(say("**{{ row.name }}** ({{ row.writes }})", row=row))
        if len(contradictory) > _MOST_NAMED:
            heads.append(f"{len(contradictory) - _MOST_NAMED} more")
        yield Conflict(
            "heads without an effect on the mean loss",
            f"{len(contradictory)} matter to a class",
            say(
                "Removing {{ heads }} lowers the log-odds of one class more than of others. "
                "Their effect on the loss over all classes is smaller than what ablation counts.",
                heads=listed(heads),
            ),
        )


def _count_conflicts(record: Any) -> Iterator[Conflict]:
    """Yield changes of images that count more images, or more errors, than there are."""
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
    rows_with_fields = []
    for rows in record.tables.values():
        if rows and all(hasattr(rows[0], name) for name in names):
            rows_with_fields += rows
    return rows_with_fields


def claim_conflicts(claims: Iterable[Claim]) -> Iterator[Conflict]:
    """Yield conflicts between claims of one question and subject, and causes without evidence.

    A claim may name a cause only if something was changed to show it.
    """
    first_claims: dict[tuple[str, str], Claim] = {}
    for claim in claims:
        first = first_claims.setdefault((claim.question, claim.subject), claim)
        about = f"{claim.question} of {claim.subject}"
        if claim.state != first.state:
            first_state = first.state or "no judgement"
            state = claim.state or "no judgement"
            yield Conflict(about, f"{first_state} and {state}")
        if claim.effect is not None and first.effect is not None:
            if claim.effect.value * first.effect.value < 0:
                yield Conflict(about, "two signs")
            if claim.effect.n != first.effect.n:
                yield Conflict(about, f"{first.effect.n} and {claim.effect.n} images")
        if claim.evidence != "intervened" and _CAUSE.search(claim.says):
            yield Conflict(about, f"a cause without an intervention: {claim.says}")


def bare_statuses(text: str) -> list[str]:
    """Return the states in a report.md without their reason: in headings, and in cells of tables.

    A cell has a reason if its table has a column with reasons.
    """
    statuses = _HEADING_WITH_STATE.findall(text)
    columns: list[str] = []  # of the table that is being read, none between tables
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:  # the first line of a table
            columns = cells
            continue
        if not any(name in columns for name in _REASONS):
            statuses += [cell for cell in cells if _BARE_STATE.fullmatch(cell)]
    return statuses
