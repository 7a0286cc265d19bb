"""The differences between the points of a comparison, tested on the same images."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.study.record import (
    DIFFERENCE,
    DIFFERENCES,
    POINTS,
    STEP,
    STEPS,
    ComparisonRow,
)
from vitlens.records import MetricName, Record, TableOf
from vitlens.report.document import Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

_COMPARED: Final = (
    (DIFFERENCES, DIFFERENCE, "of points", "Paired differences of accuracy"),
    (STEPS, STEP, "of a point with the one that it changes", "Each point and the one that it changes"),
)


def difference_section(record: Record) -> Section:
    """The comparisons of points, and of each with the one that it changes where a kind goes step by step."""
    return Section("Differences", tuple(_differences(record)), tuple(_comparisons(record)))


def _differences(record: Record) -> Iterator[Sentence]:
    names = _names(record)
    for table, metric, which, _ in _COMPARED:
        rows = record.rows(table)
        if not rows:
            continue
        differing = significant(rows)
        count = f"{len(differing) or 'None'} of {len(rows)} comparison{'' if len(rows) == 1 else 's'} {which}"
        if differing:
            listed = "; ".join(_difference(record, metric, row, names) for row in differing)
            gaps = [record.metric(metric(model=row.label, against=row.against)) for row in differing]
            verb = "is" if len(differing) == 1 else "are"
            yield Sentence(f"{count} {verb} significant after Holm's correction: {listed}.", (*rows, *gaps, 0.0))
        else:
            yield Sentence(
                f"{count} is significant after Holm's correction; that does not show that there is no difference.",
                tuple(rows),
            )


def significant(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The comparisons whose difference is significant after Holm's correction."""
    return [row for row in rows if row.p_holm <= LEVEL]


def _difference(record: Record, metric: MetricName, row: ComparisonRow, names: dict[str, str]) -> str:
    estimate = record.metric(metric(model=row.label, against=row.against))
    side = "above" if estimate.value > 0 else "below"
    size = f"{abs(estimate.value):.1f} points{_size(estimate)}"
    return f"`{names[row.label]}` is {size} {side} `{names[row.against]}`"


def _size(estimate: Estimate) -> str:
    """The interval of a difference's size: from 0 where the interval of the difference contains 0; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    low, high = sorted((abs(estimate.low), abs(estimate.high)))
    return f" ({0.0 if beyond(estimate, 0.0) is Side.UNDECIDED else low:.1f} to {high:.1f})"


def _comparisons(record: Record) -> Iterator[Table]:
    for table, metric, _, caption in _COMPARED:
        if record.rows(table):
            yield _comparison_table(record, table, metric, f"{caption}, in points, on the same test images")


def _comparison_table(record: Record, table: TableOf[ComparisonRow], metric: MetricName, caption: str) -> Table:
    names = _names(record)
    return Table.of(
        caption,
        record.rows(table),
        {
            "point": lambda row: names[row.label],
            "against": lambda row: names[row.against],
            "difference": lambda row: in_words(
                record.metric(metric(model=row.label, against=row.against)), with_n=False
            ),
            "p": lambda row: row.p,
            "p (Holm)": lambda row: row.p_holm,
        },
    )


def _names(record: Record) -> dict[str, str]:
    return {row.label: row.words for row in record.rows(POINTS)}
