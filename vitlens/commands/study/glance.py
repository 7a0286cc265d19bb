"""The table on the first page of a study: lines of the chapters' first pages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitlens.commands.shared.shortcut import misleading
from vitlens.commands.study.record import StudyRecord
from vitlens.report.document import Cell, Table
from vitlens.report.prose import say
from vitlens.report.sections import urgency
from vitlens.uncertainty import Estimate

# the table of the first page: lines of the chapters' first pages, by command
_GLANCED: Final[Mapping[str, tuple[str, ...]]] = {
    "evaluate": ("top-1 accuracy", "calibration error"),
    "attack": ("robust accuracy at 1/255", "accuracy lost to corruptions"),
}


def glance(record: StudyRecord) -> Table | None:
    """Return lines of the chapters' first pages, failing ones first."""
    lines: list[Mapping[str, Cell]] = []  # cells by the title of their column
    for word, titles in _GLANCED.items():
        chapters = record.of(word)
        if chapters:
            lines += filter(None, map(chapters[0].glance, titles))  # a line may be empty
    lines += _without_cue(record)
    if not lines:
        return None
    keys = ["metric", *record.studied]
    titles_of_columns = list(keys)
    if len(record.studied) == 2:
        keys.append("difference")
        titles_of_columns.append("first minus second")
    keys.append("status")
    titles_of_columns.append("status")
    lines.sort(key=lambda line: urgency(str(line.get("status") or "")))
    rows = [_shorten_line(line, keys) for line in lines]
    caption = "A status judges the worse end of an interval"
    return Table(caption, tuple(titles_of_columns), tuple(rows))


def _shorten_line(line: Mapping[str, Cell], keys: Sequence[str]) -> tuple[Cell, ...]:
    """Return the cells of a line, with the number of images in the first.

    keys: the cells, in order. If the line has a difference, only that keeps its interval.
    """
    counts = {cell.n for cell in line.values() if isinstance(cell, Estimate)}
    n = None
    if len(counts) == 1:  # all estimates of the line are on the same number of images
        (n,) = counts
    has_difference = isinstance(line.get("difference"), Estimate)
    cells: list[Cell] = []
    for key in keys:
        cell = line.get(key)
        if isinstance(cell, Estimate) and n is not None:
            cell = replace(cell, n=None)
        if isinstance(cell, Estimate) and has_difference and key != "difference":
            cell = replace(cell, low=None, high=None)
        cells.append(cell)
    if n is not None:
        cells[0] = say("{{ metric|whole }} (n = {{ n }})", metric=cells[0], n=n)
    return tuple(cells)


def _without_cue(record: StudyRecord) -> Iterator[Mapping[str, Cell]]:
    """Yield how many errors of each model are corrected without the cue that misleads most, and by
    the control.
    """
    comparisons = record.of("compare")
    if not comparisons:
        return
    comparison = comparisons[0].record
    cues = misleading(comparison)
    if not cues:
        return
    strongest = cues[0]
    cells: dict[str, Cell] = {
        "metric": say("errors corrected {{ row.change|whole }} (n = {{ row.n }})", row=strongest)
    }
    for row in comparison.reliance:
        if row.cue_and_change == strongest.cue_and_change:
            cells[row.model] = say(
                "{{ row.fixed }} of {{ row.errors }} (control {{ row.control_fixed }})", row=row
            )
    yield cells
