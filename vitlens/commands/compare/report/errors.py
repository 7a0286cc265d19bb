"""Errors by class and by image property, calibration, and the differences between failures and successes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.compare.record import (
    BY_CLASS,
    BY_NUMBER,
    CELL_SHARE,
    CONFUSED,
    SEPARATIONS,
    ConfusedPairRow,
    NumberSliceRow,
    SeparationRow,
)
from vitlens.commands.compare.report.maps import example_sheets
from vitlens.commands.compare.report.summary import cell_counts, cell_names, pair_of
from vitlens.commands.shared.calibration import CALIBRATION_ERROR, reliability, undrawn
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, values_and_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 12  # of a table in the report; results.json has them all
_KINDS: Final = {
    "image": "Properties of the images",
    "attention": "Attention (means over all heads)",
    "map": "Maps",
}


def error_section(record: Record) -> Section:
    """The cells of errors, by class and by image property; confusions; calibration; examples."""
    calibrated = "; ".join(
        f"{alias} {in_words(record.metric(CALIBRATION_ERROR(model=alias)), with_n=False)}" for alias in record.aliases
    )
    words = f"Expected calibration error (bins of equal width, conservative intervals): {calibrated}."
    return Section(
        "Errors in detail",
        (
            Sentence(words, tuple(record.metric(CALIBRATION_ERROR(model=alias)) for alias in record.aliases)),
            *undrawn(record),
        ),
        (_cell_table(record), _confused_table(record, record.rows(CONFUSED))),
        (_cell_figure(record), *_number_figure(record), *reliability(record), *example_sheets(record)),
    )


def failure_section(record: Record) -> Section:
    """Which properties of images, attention and maps differ between each model's failures and its successes."""
    title, rows = "Failures and successes", record.rows(SEPARATIONS)
    if not rows:
        by_class = record.rows(BY_CLASS)
        return Section(title, (Sentence("There are no failures, or no successes, to compare.", by_class),))
    sentences = []
    for kind, heading in _KINDS.items():
        differing = list(separation_words(rows, kind))
        if differing:
            sentences.append(Sentence(f"**{heading}.** {' '.join(differing)}", rows))
    tested = sum(row.p is not None for row in rows)
    if tested:
        sentences.append(
            Sentence(
                f"p-values are corrected by Holm's method over all {tested} tests. Area: the area under the ROC curve, "
                "that is the probability that a failure has a greater value than a success (DeLong 1988); 0.5: no "
                "difference.",
                rows,
            )
        )
    return Section(title, tuple(sentences), figures=(_separation_figure(rows),))


def separation_words(rows: Sequence[SeparationRow], kind: str) -> Iterator[str]:
    """Which quantities of one kind differ between failures and successes, by model, after Holm's correction."""
    for alias in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == alias and row.kind == kind]
        tested = [row for row in mine if row.p_holm is not None]
        differing = [row for row in tested if _differs(row)]
        if not mine:
            continue
        if not tested:
            yield f"{alias}: too few images to test (failures: {mine[0].failures}, successes: {mine[0].successes})."
        elif not differing:
            yield f"{alias}: no difference between failures and successes is shown (quantities tested: {len(tested)})."
        else:
            listed = "; ".join(map(_difference, differing))
            yield f"{alias}, failures compared with successes: {listed} ({len(differing)} of {len(tested)} quantities)."


def _differs(row: SeparationRow) -> bool:
    return row.p_holm is not None and row.p_holm <= LEVEL


def _difference(row: SeparationRow) -> str:
    interval = "" if row.low is None or row.high is None else f", {number(row.low)} to {number(row.high)}"
    return (
        f"{row.number} {'greater' if row.area > 0.5 else 'smaller'} (median {number(row.median_failure)} and "
        f"{number(row.median_success)}; area {number(row.area)}{interval})"
    )


def _cell_table(record: Record) -> Table:
    counts = cell_counts(record.rows(BY_CLASS))
    rows: list[tuple[Cell, ...]] = []
    for name, (column, count) in zip(cell_names(record.aliases), counts.items()):
        share = record.metric(CELL_SHARE(**pair_of(record), cell=column.replace("_", "-")))
        rows.append((name, count, in_words(share, with_n=False)))
    return Table("Which model is wrong", ("images", "n", "share"), tuple(rows))


def _confused_table(record: Record, rows: Sequence[ConfusedPairRow]) -> Table:
    first, second = record.aliases
    more = f" (the {_ROWS} most frequent of {len(rows)})" if len(rows) > _ROWS else ""
    return Table.of(
        f"Confusions, number of images for each model{more}",
        rows[:_ROWS],
        {
            "truth": lambda row: row.truth,
            "prediction": lambda row: row.prediction,
            first: lambda row: row.first,
            second: lambda row: row.second,
        },
    )


def _cell_figure(record: Record) -> FigureSpec:
    return FigureSpec(
        "errors",
        "Which model is wrong, by class. Bars of classes with few images are coarse; accuracies by class with "
        "intervals are in results.json (by_class).",
        partial(_draw_cells, record),
    )


def _draw_cells(record: Record) -> "Figure":
    from vitlens.figures.errors import error_cells

    rows = record.rows(BY_CLASS)
    counts = {"all": list(cell_counts(rows).values())} | {row.name: list(row.counts) for row in rows}
    return error_cells(counts=counts, cells=list(cell_names(record.aliases)))


def _number_figure(record: Record) -> Iterator[FigureSpec]:
    """Accuracy by every quantity of which images have more than one value."""
    rows = record.rows(BY_NUMBER)
    numbers = {name: [row for row in rows if row.number == name] for name in dict.fromkeys(row.number for row in rows)}
    divided = {name: slices for name, slices in numbers.items() if len(slices) > 1}
    if divided:
        yield FigureSpec(
            "errors_by_number",
            "Accuracy in quarters of the images, ordered by the quantity above each panel; below: its value at the "
            "ends of the quarters. Intervals that overlap "
            "widely show no difference. The quantities depend on each other, so none is shown to be a cause.",
            partial(_draw_numbers, record, divided),
        )


def _draw_numbers(record: Record, numbers: dict[str, list[NumberSliceRow]]) -> "Figure":
    from vitlens.figures.errors import AccuracyBySlice, errors_by_number

    first, second = record.aliases
    panels = [
        AccuracyBySlice(
            name,
            [slices[0].lowest, *(row.highest for row in slices)],
            [row.n for row in slices],
            values_and_ends([row.first for row in slices]),
            values_and_ends([row.second for row in slices]),
        )
        for name, slices in numbers.items()
    ]
    return errors_by_number(numbers=panels, names=(first, second))


def _separation_figure(rows: Sequence[SeparationRow]) -> FigureSpec:
    return FigureSpec(
        "failures",
        "For each quantity, the probability that a random failure has a greater value than a random success (area "
        "under the ROC curve), with its 95 % interval; 0.5: no difference. Filled: p at most 0.05 after Holm's "
        "correction over all tests of this figure. Marks without an interval: fewer than 10 failures or successes.",
        partial(_draw_separations, rows),
    )


def _draw_separations(rows: Sequence[SeparationRow]) -> "Figure":
    from vitlens.figures.errors import SeparationMark, separation_chart

    charted: dict[str, list[SeparationMark]] = {}
    for row in rows:
        mark = SeparationMark(row.number, row.area, row.low, row.high, _differs(row))
        charted.setdefault(row.model, []).append(mark)
    return separation_chart(rows=charted, title="What differs between failures and successes")
