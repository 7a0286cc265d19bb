"""Errors by class and by number, calibration, and what differs between failures and successes."""

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
from vitlens.commands.scaffold.calibration import CALIBRATION_ERROR, reliability
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 12  # of a table in the report; results.json has them all
_KINDS: Final = {
    "image": "What the images are like",
    "attention": "Attention (means over all heads)",
    "map": "The maps",
}


def error_section(record: Record) -> Section:
    """The cells of errors, by class and by number; confusions; calibration; examples."""
    calibrated = "; ".join(
        f"{alias} by {number(100 * record.metric(CALIBRATION_ERROR(model=alias)).value, 1)} points"
        for alias in record.aliases
    )
    words = f"Confidence is off on average (ECE, 15 equal bins; no interval, as binning biases it): {calibrated}."
    return Section(
        "Errors taken apart",
        (Sentence(words),),
        (_cell_table(record), _confused_table(record, record.rows(CONFUSED))),
        (_cell_figure(record), *_number_figure(record), reliability(record), *example_sheets(record)),
    )


def failure_section(record: Record) -> Section:
    """Which numbers of images, attention and maps differ between each model's failures and its successes."""
    title, rows = "Failures against successes", record.rows(SEPARATIONS)
    if not rows:
        return Section(title, (Sentence("There are no failures, or no successes, to compare."),))
    sentences = []
    for kind, heading in _KINDS.items():
        differing = list(separation_words(rows, kind))
        if differing:
            sentences.append(Sentence(f"**{heading}.** {' '.join(differing)}", rows))
    tested = sum(row.p is not None for row in rows)
    if tested:
        sentences.append(
            Sentence(
                f"All {tested} tests together are corrected by Holm; area: the chance that a failure has the greater "
                "value (DeLong 1988), 0.5 where the number says nothing.",
                rows,
            )
        )
    return Section(title, tuple(sentences), figures=(_separation_figure(rows),))


def separation_words(rows: Sequence[SeparationRow], kind: str) -> Iterator[str]:
    """Which numbers of one kind differ between failures and successes, model by model, after Holm's correction."""
    for alias in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == alias and row.kind == kind]
        tested = [row for row in mine if row.p_holm is not None]
        clear = [row for row in tested if _holds(row)]
        if not mine:
            continue
        if not tested:
            yield f"{alias}: {mine[0].failures} failures and {mine[0].successes} successes are too few to test."
        elif not clear:
            yield f"{alias}: none of {len(tested)} numbers is shown to differ between failures and successes."
        else:
            listed = "; ".join(map(_difference, clear))
            yield f"{alias}, in failures against successes: {listed} ({len(clear)} of {len(tested)} numbers)."


def _holds(row: SeparationRow) -> bool:
    return row.p_holm is not None and row.p_holm <= LEVEL


def _difference(row: SeparationRow) -> str:
    interval = "" if row.low is None or row.high is None else f", {number(row.low)} to {number(row.high)}"
    return (
        f"{row.number} {'greater' if row.area > 0.5 else 'smaller'} (median {number(row.median_failure)} against "
        f"{number(row.median_success)}; area {number(row.area)}{interval})"
    )


def _cell_table(record: Record) -> Table:
    counts = cell_counts(record.rows(BY_CLASS))
    rows: list[tuple[Cell, ...]] = []
    for name, (column, count) in zip(cell_names(record.aliases), counts.items()):
        share = record.metric(CELL_SHARE(**pair_of(record), cell=column.replace("_", "-")))
        rows.append((name, count, in_words(share, with_n=False)))
    return Table("Who is wrong", ("images", "n", "share"), tuple(rows))


def _confused_table(record: Record, rows: Sequence[ConfusedPairRow]) -> Table:
    first, second = record.aliases
    more = f" (the {_ROWS} most frequent of {len(rows)})" if len(rows) > _ROWS else ""
    return Table.of(
        f"Classes confused, images of each model{more}",
        rows[:_ROWS],
        {
            "truth": lambda row: row.truth,
            "taken for": lambda row: row.prediction,
            first: lambda row: row.first,
            second: lambda row: row.second,
        },
    )


def _cell_figure(record: Record) -> FigureSpec:
    return FigureSpec(
        "errors",
        "Which model is wrong, by class. Classes with few images have coarse bars; accuracies by class with intervals "
        "are in results.json (by_class).",
        partial(_draw_cells, record),
    )


def _draw_cells(record: Record) -> "Figure":
    from vitlens.figures.errors import error_cells

    rows = record.rows(BY_CLASS)
    counts = {"all": list(cell_counts(rows).values())} | {row.name: list(row.counts) for row in rows}
    return error_cells(counts=counts, cells=list(cell_names(record.aliases)))


def _number_figure(record: Record) -> Iterator[FigureSpec]:
    """Accuracy by every number of which images have more than one value."""
    rows = record.rows(BY_NUMBER)
    numbers = {name: [row for row in rows if row.number == name] for name in dict.fromkeys(row.number for row in rows)}
    divided = {name: slices for name, slices in numbers.items() if len(slices) > 1}
    if divided:
        yield FigureSpec(
            "errors_by_number",
            "Accuracy in quarters of the images by what is written above each panel. Intervals that overlap widely "
            "show no difference; these numbers depend on each other, so none is shown to be a cause.",
            partial(_draw_numbers, record, divided),
        )


def _draw_numbers(record: Record, numbers: dict[str, list[NumberSliceRow]]) -> "Figure":
    from vitlens.figures.errors import AccuracyBySlice, errors_by_number

    first, second = record.aliases
    panels = [
        AccuracyBySlice(
            name,
            [f"{row.lowest:.4g}\nto {row.highest:.4g}" for row in slices],
            [row.n for row in slices],
            ends([row.first for row in slices]),
            ends([row.second for row in slices]),
        )
        for name, slices in numbers.items()
    ]
    return errors_by_number(numbers=panels, names=(first, second))


def ends(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Rows value, low, high; the value itself where there is no interval."""
    return [
        [one.value for one in estimates],
        [one.value if one.low is None else one.low for one in estimates],
        [one.value if one.high is None else one.high for one in estimates],
    ]


def _separation_figure(rows: Sequence[SeparationRow]) -> FigureSpec:
    return FigureSpec(
        "failures",
        "For each number the chance that a failure has the greater value of a random failure and a random success, "
        "with its 95 % interval; 0.5 says nothing. Filled: p at most 0.05 after Holm's correction for all tests of "
        "this figure. Without an interval: fewer than 10 failures or successes.",
        partial(_draw_separations, rows),
    )


def _draw_separations(rows: Sequence[SeparationRow]) -> "Figure":
    from vitlens.figures.errors import SeparationMark, separation_chart

    charted: dict[str, list[SeparationMark]] = {}
    for row in rows:
        mark = SeparationMark(row.number, row.area, row.low, row.high, _holds(row))
        charted.setdefault(row.model, []).append(mark)
    return separation_chart(rows=charted, title="What differs between failures and successes")
