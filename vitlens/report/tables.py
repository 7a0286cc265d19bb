"""Tables of a report: the cells of rows, by the columns that a record declares."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitlens.display import protected, visible
from vitlens.record import Column
from vitlens.report.document import Cell, Table
from vitlens.report.numbers import COUNTED, p_value
from vitlens.report.prose import Marked, finalize
from vitlens.uncertainty import Estimate, in_points


def table_of(rows: Sequence[Any], shown: Mapping[str, Column], *, of: int, file: str = "") -> Table:
    """Return rows as a table, without columns that are empty in all rows.

    shown: the columns by the name of their field.
    of: the number of rows in all, more than `rows` if some are left out.
    file: the path of the CSV file that holds all rows, "" if there is none.
    """
    columns_of_cells = {}
    for field, column in shown.items():
        cells = [cell(getattr(row, field), column) for row in rows]
        if any(value not in (None, "") for value in cells):
            columns_of_cells[column.title] = cells
    caption = ""
    if of > len(rows):
        caption = f"{len(rows)} of {of:,} rows"
        if file:
            caption += f" (all rows: {file})"
    rows_of_cells = tuple(zip(*columns_of_cells.values()))
    return Table(caption, columns=tuple(columns_of_cells), rows=rows_of_cells)


def cell(value: Any, column: Column) -> Cell:
    """Return a value of a column as a table shows it."""
    if isinstance(value, Estimate):
        return in_points(value) if column.unit == "points" else value
    if value is None:
        return None
    if column.unit == "text":
        return Marked(protected(visible(value)))
    if column.unit == "p" and isinstance(value, float):
        return p_value(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        # an estimate is printed with its unit; of integers, only bytes and FLOPs have one
        has_unit = bool(column.unit) if isinstance(value, float) else column.unit in COUNTED
        return Estimate(value, unit=column.unit) if has_unit else value
    if isinstance(value, Mapping):
        entries = [f"{finalize(key)} {finalize(entry)}" for key, entry in value.items()]
        return ", ".join(entries) or None
    if isinstance(value, list | tuple):
        return ", ".join(map(finalize, value))
    return finalize(value)


def column_of_property(name: str, row: Any) -> Column:
    """Return the column of a property.

    Its text is written by vitlens, so a table does not shorten it as it does a name.
    """
    unit = "text" if isinstance(getattr(row, name), str) else ""
    return Column(name.replace("_", " "), unit=unit)
