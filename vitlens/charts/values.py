"""Values of rows for charts: numbers with their ends, titles with units, and the axes and legends made of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts.style import SERIES, shortened
from vitlens.record import Column, columns
from vitlens.uncertainty import Estimate

Draw: TypeAlias = Callable[[Sequence[Any], str], Figure]
Values: TypeAlias = NDArray[np.float64]
STYLES: Final = ("-", "--", ":", "-.")
MARKERS: Final = "osD^vP"
_LETTER: Final = 0.075  # inch per letter of a legend


def value(row: Any, name: str) -> Any:
    """Return a value of a row; "statistics.distance": the entry of a column that holds several."""
    field, _, key = name.partition(".")
    found = getattr(row, field)
    return found.get(key) if key and isinstance(found, Mapping) else found


def column_of(rows: Sequence[Any], name: str) -> Column:
    """Return how a column is declared."""
    field, _, key = name.partition(".")
    declared = columns(type(rows[0])).get(field)
    if declared is None:  # a property
        return Column(field.replace("_", " "))
    return Column(key.replace("_", " "), declared.unit) if key else declared


def unit_of(rows: Sequence[Any], name: str) -> str:
    """Return the unit of a column's numbers: that of its first Estimate, or the one that is declared."""
    first = next((found for row in rows if isinstance(found := value(row, name), Estimate)), None)
    return first.unit if first is not None else column_of(rows, name).unit


def label(rows: Sequence[Any], name: str, title: str = "") -> str:
    """Return a column as an axis is labelled: "top-1 accuracy (%)"."""
    unit = unit_of(rows, name)
    shown = "%" if unit == "fraction" else unit
    text = title or column_of(rows, name).title
    return f"{text} ({shown})" if shown and shown not in text else text


def numbers(rows: Sequence[Any], name: str) -> Values:
    """(3, rows): values, lower and upper ends as they are drawn (fractions in %), NaN where there is none."""
    scale = 100.0 if unit_of(rows, name) == "fraction" else 1.0
    found = np.full((3, len(rows)), np.nan)
    for at, row in enumerate(rows):
        number = value(row, name)
        if isinstance(number, Estimate):
            ends = (number.value, number.low, number.high)
            found[:, at] = [np.nan if end is None else end for end in ends]
        elif number is not None:
            found[0, at] = float(number)
    return found * scale


def series_of(rows: Sequence[Any], name: str) -> dict[str, list[Any]]:
    """Rows by the series that they belong to; one without a name where there is no such column."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(str(value(row, name)) if name else "", []).append(row)
    return found


def colour(index: int) -> str:
    """Return the colour of a series."""
    return SERIES[index % len(SERIES)]


def legend(figure: Figure, *panels: Axes) -> None:
    """A legend below the figure of the series of all panels, where several have names."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    kept = {title: handle for handles, titles in found for handle, title in zip(handles, titles) if title}
    names = [shortened(title, 30) for title in kept]
    if len(kept) > 1:
        room = figure.get_figwidth() / (0.6 + _LETTER * max(map(len, names)))
        columns = max(1, min(4, len(kept), int(room)))
        figure.legend(list(kept.values()), names, loc="outside lower center", ncols=columns)
