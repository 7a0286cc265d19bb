"""Short texts of results for a notebook: their numbers as one table, without the numbers
themselves.

A result derives from `Summary` and has `@dataclass(repr=False)`. Nothing is computed but ranges of
what is there.
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

LONGEST: Final = 24  # lines of a text
_CELL: Final = 112  # characters of a value
_STRONGEST: Final = 0.7  # opacity of a board's strongest colour, under black or white text


@dataclasses.dataclass(frozen=True)
class Line:
    """One value of a result: its name, its unit ("" for none), and the value."""

    name: str
    value: object
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class HeadBoard:
    """A number of every head: values by layer, NaN where there is no head; unit: "" for none."""

    title: str
    values: Sequence[Sequence[float]]
    unit: str = ""


class Summary:
    """A result whose repr is a table of its values: name, shape, range, unit; in a notebook with
    boards of heads.
    """

    def summary(self) -> Iterable[Line]:
        """Yield the values that are shown, by default all fields."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            yield Line(field.name, getattr(self, field.name))

    def boards(self) -> Iterable[HeadBoard]:
        """Return what a notebook shows as layers by heads, by default nothing."""
        return ()

    def __repr__(self) -> str:
        return as_text(type(self).__name__, self._rows())

    def _repr_html_(self) -> str:
        table = as_html(type(self).__name__, ("name", "value", "unit"), self._rows())
        return table + "".join(map(as_board, self.boards()))

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(line.name, described(line.value), line.unit) for line in self.summary()]


class Table(Summary, ABC):
    """A result that is a table, with a row for each head, image or epsilon."""

    @abstractmethod
    def records(self) -> Iterable[Mapping[str, object]]:
        """Return the rows, each with the same columns."""

    def to_pandas(self) -> "DataFrame":
        """Return the rows as a pandas DataFrame. Raises InputError where pandas is not
        installed."""
        return data_frame(self.records())


def data_frame(
    rows: Iterable[Mapping[str, object]], columns: Sequence[str] | None = None
) -> "DataFrame":
    """Return rows as a pandas DataFrame; columns: their names, needed only where there may be no
    row.

    Raises InputError where pandas is not installed.
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
    shown = [[_short(cell) for cell in row] for row in rows[:LONGEST]]
    widths = [max(map(len, column)) for column in zip(*shown)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown
    ]
    more = [f"and {len(rows) - LONGEST} more"] if len(rows) > LONGEST else []
    return "\n  ".join([title, *lines, *more])


def as_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same as an HTML table, every text escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_short(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(_short(title))}</caption><tr>{head}</tr>{body}</table>"


def as_board(board: HeadBoard) -> str:
    """Return a board as an HTML table: layers down, heads across, blue for positive values and
    orange for negative ones.

    A colour's strength is the value's share of the greatest one, over any background.
    """
    rows = [list(map(float, layer)) for layer in board.values]
    most = (
        max((abs(value) for layer in rows for value in layer if isfinite(value)), default=0.0)
        or 1.0
    )

    def cell(value: float) -> str:
        if not isfinite(value):
            return "<td></td>"
        colour = "0,114,178" if value >= 0 else "213,94,0"  # the figures' blue and vermillion
        opacity = f"{_STRONGEST * abs(value) / most:.2f}"
        return f'<td style="background:rgba({colour},{opacity})">{value:.3g}</td>'

    heads = "".join(f"<th>H{head}</th>" for head in range(max(map(len, rows), default=0)))
    body = "".join(
        f"<tr><th>L{layer}</th>{''.join(map(cell, values))}</tr>"
        for layer, values in enumerate(rows)
    )
    title = escape(_short(f"{board.title} ({board.unit})" if board.unit else board.title))
    caption = f'<caption style="white-space:nowrap;text-align:left">{title}</caption>'
    return f"<table>{caption}<tr><th></th>{heads}</tr>{body}</table>"


def described(value: Any) -> str:
    """Return a value in a few words: a number, a text, or the shape and range of numbers."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _numbers(value)
    if isinstance(value, bool | int | str) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "value") and hasattr(value, "low"):  # an Estimate
        ends = "" if value.low is None else f" [{value.low:.4g}, {value.high:.4g}]"
        return f"{value.value:.4g}{ends} {value.unit}".rstrip()
    if isinstance(value, Mapping):
        return _listed([f"{key}: {described(each)}" for key, each in value.items()], 4)
    if isinstance(value, Sequence):
        if value and all(isinstance(each, str | int | float) for each in value):
            return _listed([described(each) for each in value], 8)
        kinds = sorted({type(each).__name__ for each in value})
        return f"{len(value)} of {', '.join(kinds)}" if value else "none"
    if isinstance(value, Summary) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return f"a {type(value).__name__}"
    return type(value).__name__


def _numbers(values: Any) -> str:
    """Return the shape of an array or tensor, and its range or, of booleans, how many are true."""
    shape = f"({', '.join(str(side) for side in values.shape)})"
    if 0 in values.shape:
        return shape
    numbers = values.detach().cpu() if hasattr(values, "detach") else values
    if "bool" in str(values.dtype):
        return f"{shape} {int(numbers.sum())} true"
    flat = numbers.reshape(-1)
    finite = flat[(flat == flat) & (abs(flat) != float("inf"))]
    if not len(finite):
        return f"{shape} none finite"
    gaps = f", {len(flat) - len(finite)} not finite" if len(finite) < len(flat) else ""
    return f"{shape} {float(finite.min()):.4g} to {float(finite.max()):.4g}{gaps}"


def _listed(words: Sequence[str], most: int) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _short(text: str) -> str:
    text = visible(text[: 2 * _CELL])
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"
