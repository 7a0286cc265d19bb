"""Writes records as results.json and arrays, and reads them back; see vitlens/record.py."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from vitlens.arrays import arrays_of, as_arrays, read_arrays
from vitlens.files import inside, named_file
from vitlens.record import (
    AGAIN,
    CONFIG,
    RESULTS,
    Config,
    Record,
    RunRecord,
    array_files,
    command_line,
    table_classes,
)
from vitlens.typed import read_as
from vitlens.uncertainty import Estimate

R = TypeVar("R", bound=Record)


def serialise_record(
    record: Record,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the metrics, the tables and the arrays of a record.

    Metrics and tables are as in results.json. Arrays are by the name of their file, without its
    suffix.
    """
    metrics = {}
    for name, number in record.metrics.items():
        metrics[name] = _without_none(msgspec.to_builtins(number))
    files: dict[str, dict[str, Any]] = {}
    for field_name, (pattern, _) in array_files(type(record)).items():
        value = getattr(record, field_name)
        if isinstance(value, Mapping):
            before, after = _around_placeholder(pattern)
            for key, part in value.items():
                files[f"{before}{key}{after}"] = as_arrays(part)
        elif value is not None:
            files[pattern] = as_arrays(value)
    return metrics, serialise_tables(record), files


def serialise_tables(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of a record as they are in results.json."""
    return {name: [_as_json(row) for row in rows] for name, rows in record.tables.items()}


def _as_json(row: Any) -> dict[str, Any]:
    """Return a row as in results.json: without null, except in fields that have no default."""
    required = set()
    for row_field in fields(row):
        if row_field.default is MISSING and row_field.default_factory is MISSING:
            required.add(row_field.name)
    cells: dict[str, Any] = msgspec.to_builtins(row)
    return {
        name: _without_none(cell)
        for name, cell in cells.items()
        if cell is not None or name in required
    }


def _without_none(value: Any) -> Any:
    """Return a value of JSON without the entries of its objects that are null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def read_record(kind: type[R], run: RunRecord) -> R:
    """Return the record of a run's folder.

    Raises InputError, one line, at the first value that does not fit.
    """
    path = run.folder / RESULTS
    tables = run.results["tables"]
    hints = get_type_hints(kind)
    hint = command_line(run.config)
    values: dict[str, Any] = {}
    missing_tables = []
    for name in table_classes(kind):
        if name not in tables:
            missing_tables.append(name)
        rows = tables.get(name, [])
        values[name] = read_as(hints[name], rows, source=f"table {name!r} of {path}", hint=hint)
    values["missing_tables"] = tuple(missing_tables)
    for name, (pattern, array_class) in array_files(kind).items():
        arrays_by_key = {}
        for key, file in _files(run.folder, pattern):
            arrays_by_key[key] = arrays_of(array_class, read_arrays(file), file)
        if "{" in pattern:
            values[name] = arrays_by_key
        elif arrays_by_key:
            values[name] = arrays_by_key[""]
    config = read_as(Config, run.config, source=str(run.folder / CONFIG), hint=AGAIN)
    return kind(
        config=config,
        **values,
        folder=run.folder,
        status=run.status,
        seconds=float(run.results["seconds"]),
    )


def _around_placeholder(pattern: str) -> tuple[str, str]:
    """Return the text before and after the only placeholder of a file's name."""
    before, after = re.split(r"\{\w+\}", pattern)
    return before, after


def _files(folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a pattern, by the value of its placeholder ("" without one)."""
    arrays_folder = inside(folder, "arrays")
    if "{" not in pattern:
        path = inside(folder, "arrays", named_file(pattern, ".npz"))
        if path.is_file():
            yield "", path
        return
    before, after = _around_placeholder(pattern)
    expression = re.compile(f"{re.escape(before)}(.+){re.escape(after)}")
    if arrays_folder.is_dir():
        for path in sorted(arrays_folder.glob("[!.]*.npz")):
            match = expression.fullmatch(path.stem)
            if match:
                yield match[1], inside(folder, "arrays", path.name)


def join_records(parts: Sequence[R]) -> R:
    """Return several records of a command as one, with the rows and the arrays of all.

    Arrays without a placeholder in their file's name are those of the first record.
    """
    values: dict[str, Any] = {}
    for name in parts[0].tables:
        values[name] = tuple(row for part in parts for row in part.tables[name])
    for name, (pattern, _) in array_files(type(parts[0])).items():
        if "{" in pattern:
            values[name] = {}
            for part in parts:
                values[name].update(getattr(part, name))
    return dataclasses.replace(parts[0], **values)


def flat(row: Any) -> dict[str, Any]:
    """Return a row as the cells of a data frame or a CSV file.

    An Estimate has four columns: value, low, high and n. A mapping has columns for each key.
    """
    cells: dict[str, Any] = {}
    for row_field in fields(row):
        value = getattr(row, row_field.name)
        items = value if isinstance(value, Mapping) else {"": value}
        for key, item in items.items():
            name = f"{row_field.name}_{key}" if key else row_field.name
            if isinstance(item, Estimate):
                cells[name] = item.value
                cells[f"{name}_low"] = item.low
                cells[f"{name}_high"] = item.high
                cells[f"{name}_n"] = item.n
            else:
                cells[name] = item
    return cells
