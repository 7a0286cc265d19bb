"""Short descriptions of results for a notebook: one table of shapes, ranges and units.

A result is a subclass of `Summary` with `@dataclass(repr=False)`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from vitlens.display import visible
from vitlens.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

LONGEST: Final = 28  # most lines of a text
_CELL_LENGTH: Final = 100  # most characters of a value
_MOST_ENTRIES: Final = 4  # most entries of a mapping that are written
_MOST_ITEMS: Final = 8  # most items of a sequence that are written
# opacity of a board's strongest colour, at which both black and white text can be read
_STRONGEST: Final = 0.7


@dataclasses.dataclass(frozen=True)
class Line:
    """One value of a result: its name, its unit ("" for none), and the value."""

    name: str
    value: object
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class HeadBoard:
    """A number of every head.

    values: the values of the heads by layer, NaN for no head.
    unit: the unit of the values, "" for none.
    """

    title: str
    values: Sequence[Sequence[float]]
    unit: str = ""


class Summary:
    """A result whose repr is a table of its values: name, shape, range, unit.

    In a notebook, boards of heads follow.
    """

    def summary(self) -> Iterable[Line]:
        """Yield the lines of the table, by default all fields."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            yield Line(field.name, getattr(self, field.name))

    def boards(self) -> Iterable[HeadBoard]:
        """Return the boards of layers by heads, by default none."""
        return ()

    def __repr__(self) -> str:
        return as_text(type(self).__name__, self._rows())

    def _repr_html_(self) -> str:
        table = as_html(type(self).__name__, ("name", "value", "unit"), self._rows())
        return table + "".join(map(as_board, self.boards()))

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(line.name, describe_value(line.value), line.unit) for line in self.summary()]


class Table(Summary, ABC):
    """A result that is a table, with a row for each head, image or epsilon."""

    @abstractmethod
    def records(self) -> Iterable[Mapping[str, object]]:
        """Return the rows, each with the same columns."""

    def to_pandas(self) -> "DataFrame":
        """Return the rows as a pandas DataFrame. Raises InputError without pandas."""
        return data_frame(self.records())


def data_frame(
    rows: Iterable[Mapping[str, object]], columns: Sequence[str] | None = None
) -> "DataFrame":
    """Return rows as a pandas DataFrame.

    columns: their names, needed only if there may be no row. Raises InputError without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError(
            "expected pandas for to_pandas, found none; type pip install pandas"
        ) from error
    return pandas.DataFrame(list(rows), columns=columns)


def as_text(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a title and rows of cells below each other, at most LONGEST of them."""
    cut_rows = [[_short(cell) for cell in row] for row in rows[:LONGEST]]
    widths = [max(map(len, column)) for column in zip(*cut_rows)]
    lines = [title]
    for row in cut_rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    if len(rows) > LONGEST:
        lines.append(f"and {len(rows) - LONGEST} more")
    return "\n  ".join(lines)


def as_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a title and rows of cells as an HTML table, every text escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(_short(cell))}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f"<table><caption>{escape(_short(title))}</caption><tr>{head}</tr>{body}</table>"


def as_board(board: HeadBoard) -> str:
    """Return a board as an HTML table: layers down, heads across.

    Positive values are blue, negative ones orange. A colour's strength is the value's share of the
    largest one, over any background.
    """
    rows = [list(map(float, layer)) for layer in board.values]
    magnitudes = [abs(value) for layer in rows for value in layer if isfinite(value)]
    largest = max(magnitudes, default=0.0) or 1.0  # not 0, to divide by

    def cell(value: float) -> str:
        if not isfinite(value):
            return "<td></td>"
        colour = "0,114,178" if value >= 0 else "213,94,0"  # the figures' blue and vermillion
        opacity = f"{_STRONGEST * abs(value) / largest:.2f}"
        return f'<td style="background:rgba({colour},{opacity})">{value:.3g}</td>'

    heads = "".join(f"<th>H{head}</th>" for head in range(max(map(len, rows), default=0)))
    body = ""
    for layer, values in enumerate(rows):
        cells = "".join(map(cell, values))
        body += f"<tr><th>L{layer}</th>{cells}</tr>"
    title = board.title
    if board.unit:
        title += f" ({board.unit})"
    title = escape(_short(title))
    caption = f'<caption style="white-space:nowrap;text-align:left">{title}</caption>'
    return f"<table>{caption}<tr><th></th>{heads}</tr>{body}</table>"


def describe_value(value: Any) -> str:
    """Return a short description of a value: a number, a text, or a shape and range."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _numbers(value)
    if isinstance(value, bool | int | str) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "value") and hasattr(value, "low"):  # an Estimate
        interval = "" if value.low is None else f" [{value.low:.4g}, {value.high:.4g}]"
        return f"{value.value:.4g}{interval} {value.unit}".rstrip()
    if isinstance(value, Mapping):
        entries = [f"{key}: {describe_value(item)}" for key, item in value.items()]
        return _list_values(entries, _MOST_ENTRIES)
    if isinstance(value, Sequence):
        if not value:
            return "none"
        if all(isinstance(item, str | int | float) for item in value):
            return _list_values([describe_value(item) for item in value], _MOST_ITEMS)
        kinds = sorted({type(item).__name__ for item in value})
        return f"{len(value)} of {', '.join(kinds)}"
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, Summary) or is_instance:
        return f"a {type(value).__name__}"
    return type(value).__name__


def _numbers(values: Any) -> str:
    """Return the shape of an array or tensor, and its range, or the count of true booleans."""
    shape = f"({', '.join(str(side) for side in values.shape)})"
    if 0 in values.shape:
        return shape
    numbers = values.detach().cpu() if hasattr(values, "detach") else values
    if "bool" in str(values.dtype):
        return f"{shape} {int(numbers.sum())} true"
    flat = numbers.reshape(-1)  # of numpy or torch: only what both have is used
    is_number = flat == flat  # NaN is not equal to itself
    finite = flat[is_number & (abs(flat) != float("inf"))]
    if not len(finite):
        return f"{shape} none finite"
    text = f"{shape} {float(finite.min()):.4g} to {float(finite.max()):.4g}"
    if len(finite) < len(flat):
        text += f", {len(flat) - len(finite)} not finite"
    return text


def _list_values(words: Sequence[str], most: int) -> str:
    text = ", ".join(words[:most])
    if len(words) > most:
        text += f" and {len(words) - most} more"
    return text


def _short(text: str) -> str:
    text = visible(text[: 2 * _CELL_LENGTH])  # cut first, to escape little
    return text if len(text) <= _CELL_LENGTH else text[: _CELL_LENGTH - 1] + "…"
