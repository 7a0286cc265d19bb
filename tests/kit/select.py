"""Rows of a table chosen by their values."""

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def select(rows: Iterable[Row], /, **values: object) -> list[Row]:
    """Return the rows with these values, in their order."""
    return [
        row for row in rows if all(getattr(row, name) == value for name, value in values.items())
    ]


def select_one(rows: Iterable[Row], /, **values: object) -> Row:
    """Return the only row with these values; ValueError where there is none, or another."""
    (row,) = select(rows, **values)
    return row


def index_by(rows: Iterable[Row], *names: str) -> dict[Any, Row]:
    """Return the rows by the value of this field, or by those of several fields as a tuple."""
    value = attrgetter(*names)
    return {value(row): row for row in rows}


def values_of(rows: Iterable[object], *names: str) -> list[Any]:
    """Return a column of a table, or several as tuples; "value.low" is a field of a field."""
    return list(map(attrgetter(*names), rows))


def names_in(folder: Path) -> set[str]:
    """Return the names of the files and folders in a folder."""
    return {path.name for path in folder.iterdir()}
