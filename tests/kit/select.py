"""Rows of a table chosen by their values."""

from collections.abc import Iterable
from typing import TypeVar

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
