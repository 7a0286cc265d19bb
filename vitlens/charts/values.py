"""Values of rows for charts: numbers with their intervals, labels with units, and legends.

A chart names the columns of its rows. The name "statistics.distance" means the entry "distance" of
the column "statistics", which holds several.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts.style import SERIES, shorten
from vitlens.record import Column, columns
from vitlens.uncertainty import Estimate

Draw: TypeAlias = Callable[[Sequence[Any], str], Figure]  # of rows and the title of the figure
Values: TypeAlias = NDArray[np.float64]
STYLES: Final = ("-", "--", ":", "-.")
MARKERS: Final = "osD^vP"
_LETTER: Final = 0.075  # inch per letter of a legend


def value(row: Any, name: str) -> Any:
    """Return the value of a row in a column, or in an entry of a column."""
    field, _, key = name.partition(".")
    entry = getattr(row, field)
    if key and isinstance(entry, Mapping):
        return entry.get(key)
    return entry  # also for a column with several entries that is None in this row


def column_of(rows: Sequence[Any], name: str) -> Column:
    """Return how a column is declared."""
    field, _, key = name.partition(".")
    declared = columns(type(rows[0])).get(field)
    if declared is None:  # a property
        return Column(field.replace("_", " "))
    if key:
        return Column(key.replace("_", " "), declared.unit)
    return declared


def unit_of(rows: Sequence[Any], name: str) -> str:
    """Return the unit of a column's numbers: of its first Estimate, else as declared."""
    for row in rows:
        entry = value(row, name)
        if isinstance(entry, Estimate):
            return entry.unit
    return column_of(rows, name).unit


def label(rows: Sequence[Any], name: str, title: str = "") -> str:
    """Return the label of an axis for a column: "top-1 accuracy (%)"."""
    unit = unit_of(rows, name)
    if unit == "fraction":
        unit = "%"
    text = title or column_of(rows, name).title
    is_unit_in_title = re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", text)  # as a word
    if unit and not is_unit_in_title:
        text += f" ({unit})"
    return text


def numbers(rows: Sequence[Any], name: str) -> Values:
    """Return the numbers of a column (rows,) as they are drawn: fractions in %, NaN for none."""
    values: Values = numbers_with_ends(rows, name)[0]
    return values


def numbers_with_ends(rows: Sequence[Any], name: str) -> Values:
    """Return numbers and the lower and upper ends of their intervals, (3, rows), as they are drawn.

    Fractions are in %. NaN stands for no number and for no interval.
    """
    scale = 100.0 if unit_of(rows, name) == "fraction" else 1.0
    drawn = np.full((3, len(rows)), np.nan)
    for index, row in enumerate(rows):
        number = value(row, name)
        if isinstance(number, Estimate):
            # numpy converts None to NaN
            drawn[:, index] = np.array([number.value, number.low, number.high], dtype=float)
        elif number is not None:
            drawn[0, index] = float(number)
    return drawn * scale


def series_of(rows: Sequence[Any], name: str) -> dict[str, list[Any]]:
    """Group rows by the values of a column.

    name: the column; "" gives one series with the name "".
    """
    series: dict[str, list[Any]] = {}
    for row in rows:
        key = str(value(row, name)) if name else ""
        series.setdefault(key, []).append(row)
    return series


def colour(index: int) -> str:
    """Return the colour of a series."""
    return SERIES[index % len(SERIES)]


def line_style(index: int) -> str:
    """Return the line style of a series.

    No two of the first 24 series have the same colour and line style.
    """
    # pairs of colour and style repeat after `period` series: from then on, styles move on by one
    period = math.lcm(len(SERIES), len(STYLES))
    repetitions = index // period
    return STYLES[(index + repetitions) % len(STYLES)]


def legend(figure: Figure, *panels: Axes) -> None:
    """Draw a legend below the figure of the series of all panels, if several have names."""
    handle_by_title = {}
    for axes in panels:
        for handle, title in zip(*axes.get_legend_handles_labels()):
            if title:
                handle_by_title[title] = handle
    if len(handle_by_title) > 1:
        names = [shorten(title, 30) for title in handle_by_title]
        room = figure.get_figwidth() / (0.6 + _LETTER * max(map(len, names)))
        column_count = max(1, min(4, len(names), int(room)))
        figure.legend(
            list(handle_by_title.values()), names, loc="outside lower center", ncols=column_count
        )
