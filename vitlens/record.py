"""What a command writes: one record class of row classes, whose columns are declared once.

    @dataclass(frozen=True)
    class AccuracyRow(OfModel):
        accuracy: Estimate = col("top-1 accuracy", better="higher", metric="accuracy/{model}")

    @dataclass(frozen=True, kw_only=True)
    class EvaluateRecord(Record):
        accuracy: tuple[AccuracyRow, ...] = table()
        predictions: Mapping[str, PredictionArrays] = arrays("predictions-{model}")

A column gives the JSON of results.json, the metric with its name, the heading of a table, the axis of a chart, the term
in the glossary and the better direction. Files are untrusted: they are read strictly, by the types of the fields.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from string import Formatter
from typing import Any, Final, Literal, TypeVar, cast, get_type_hints

import msgspec

from vitlens.arrays import arrays_of, as_arrays
from vitlens.errors import InputError
from vitlens.files import CONFIG, RESULTS, RunRecord, inside, named_file, read_arrays
from vitlens.recorded import Config
from vitlens.uncertainty import Estimate

SCHEMA: Final = 3  # of the results.json of these records
Better = Literal["higher", "lower"]
_COLUMN: Final = "column"
_TABLE: Final = "table"
_ARRAYS: Final = "arrays"
_AGAIN: Final = "run the command again"
R = TypeVar("R", bound="Record")
F = TypeVar("F", bound=Callable[..., Any])


def _once(function: F) -> F:
    """functools.cache, whose type does not take classes of rows for hashable."""
    return cast(F, cache(function))


@dataclass(frozen=True)
class Column:
    """What a field of a row is called and how it is read.

    title: heading, axis and legend; unit: of plain numbers, as an Estimate has its own (one of a fraction is shown in
    points where this is "points"), or "text" of words that tables do not shorten; term: what it is, one sentence for
    the glossary; better: the direction that is better, None where neither is; metric: the name of its metric in
    results.json, with the row's fields in braces, and {key} for a field that holds several by name; keys: gives the
    entries of such a field that are metrics, where not all are.
    """

    title: str
    unit: str = ""
    term: str = ""
    better: Better | None = None
    metric: str = ""
    keys: Callable[[], Collection[str]] | None = None


def col(title: str, *, default: Any = MISSING, **more: Any) -> Any:
    """A field of a row, declared as a `Column`; more: the other fields of Column."""
    return field(default=default, metadata={_COLUMN: Column(title, **more)})


@dataclass(frozen=True)
class OfModel:
    """A row about one model."""

    model: str = col("model")


def table() -> Any:
    """A field of a record: the rows of a table, empty where nothing was measured."""
    return field(default=(), metadata={_TABLE: True})


def arrays(name: str) -> Any:
    """A field of a record: the arrays of a file, from which figures are drawn.

    name: of the file. With a placeholder, "offsets-{model}", the field is a Mapping from its value to a dataclass of
    arrays (vitlens/arrays.py), else such a dataclass or None.
    """
    several = "{" in name
    return field(**({"default_factory": dict} if several else {"default": None}), metadata={_ARRAYS: name})


@dataclass(frozen=True)
class MetricName:
    """The name of a metric, a path with placeholders: "accuracy/{model}". The model's alias follows the first word.

    keys: what {key} can be; empty where that is not known before the run.
    """

    pattern: str
    keys: tuple[str, ...] = ()

    def __call__(self, **parts: str | int) -> str:
        """The name with its placeholders filled."""
        return self.pattern.format(**parts)

    @cached_property
    def _expression(self) -> "re.Pattern[str]":
        values = {"key": "|".join(map(re.escape, self.keys)) or "[^/]+"}
        pieces = Formatter().parse(self.pattern)
        return re.compile(
            "".join(
                re.escape(text) + (f"(?P<{name}>{values.get(name, '[^/]+')})" if name else "")
                for text, name, _, _ in pieces
            )
        )

    def parts(self, name: str) -> dict[str, str] | None:
        """The values of the placeholders in a name; None for the name of another metric."""
        match = self._expression.fullmatch(name)
        return None if match is None else match.groupdict()

    @property
    def patterns(self) -> tuple[str, ...]:
        """The pattern with each of its keys put in."""
        return tuple(self.pattern.replace("{key}", key) for key in self.keys) or (self.pattern,)


@dataclass(frozen=True)
class Contents:
    """All that a command writes: the names of its metrics, the row class of each table, the class of each file of
    arrays, by the pattern of its name."""

    metrics: tuple[MetricName, ...]
    tables: Mapping[str, type]
    arrays: Mapping[str, type]


@_once
def columns(kind: type) -> Mapping[str, Column]:
    """The columns of a row class by field; a field without `col` is called as it is."""
    return {each.name: each.metadata.get(_COLUMN, Column(each.name.replace("_", " "))) for each in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The output of a run. config: its settings and models; folder: where it was read from; seconds: that it took."""

    config: Config = field(default_factory=Config)
    folder: Path = field(default_factory=Path)
    status: str = "done"
    seconds: float = 0.0

    @property
    def command(self) -> str:
        """The word of the command, by which its record class is named."""
        return type(self).__name__.removesuffix("Record").lower()

    @property
    def aliases(self) -> tuple[str, ...]:
        """The models' aliases, in the order in which they were given."""
        return tuple(model.alias for model in self.config.models)

    @property
    def options(self) -> Mapping[str, Any]:
        """The command's options as they are in config.json."""
        return self.config.options

    @property
    def images(self) -> int:
        """How many images were measured; 0 where the command takes none."""
        return self.config.data.images if self.config.data else 0

    @property
    def tables(self) -> Mapping[str, tuple[Any, ...]]:
        """The rows of every table by its name."""
        return {name: getattr(self, name) for name in _tables(type(self))}

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """Every number that a column names a metric, by the metric's name."""
        return dict(each for rows in self.tables.values() for row in rows for each in _metrics_of(row))

    def better(self, name: str) -> Better | None:
        """The better direction of a metric; None where neither is, or there is no such metric."""
        declared = [each for kind in _tables(type(self)).values() for each in columns(kind).values() if each.metric]
        return next((each.better for each in declared if MetricName(each.metric).parts(name) is not None), None)

    def metric(self, name: str) -> Estimate:
        """One metric. Raises InputError where the run has none of that name."""
        found = self.metrics.get(name)
        if found is None:
            raise InputError(f"expected a metric {name!r} in {self.folder / RESULTS}, found none; {_AGAIN}")
        return found

    @classmethod
    def contents(cls) -> Contents:
        """What the command writes: the patterns of its metrics, its tables and its arrays."""
        rows = _tables(cls)
        declared = [each for kind in rows.values() for each in columns(kind).values() if each.metric]
        named = dict.fromkeys(MetricName(each.metric, tuple(each.keys()) if each.keys else ()) for each in declared)
        return Contents(tuple(named), rows, dict(_array_files(cls).values()))


def written(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """A record as it is written: metrics and tables as in results.json, and arrays by the name of their file."""
    metrics = {name: _without_none(msgspec.to_builtins(number)) for name, number in record.metrics.items()}
    tables = {name: [_as_json(row) for row in rows] for name, rows in record.tables.items()}
    files: dict[str, dict[str, Any]] = {}
    for each, (pattern, _) in _array_files(type(record)).items():
        value = getattr(record, each)
        if isinstance(value, Mapping):
            files |= {_filled(pattern, key): as_arrays(part) for key, part in value.items()}
        elif value is not None:
            files[pattern] = as_arrays(value)
    return metrics, tables, files


def read_record(kind: type[R], run: RunRecord) -> R:
    """The record of a run's folder. Raises InputError, one line, at the first value that does not fit."""
    results: Any = run.results
    path = run.folder / RESULTS
    if results["schema"] != SCHEMA:
        raise InputError(
            f"expected results of schema {SCHEMA} in {path}, found schema {results['schema']}, which another version "
            f"wrote; {_AGAIN}"
        )
    tables, hints = results["tables"], get_type_hints(kind)
    values: dict[str, Any] = {"config": _converted(run.config, Config, str(run.folder / CONFIG))}
    for name in _tables(kind):
        if name not in tables and run.status == "done":
            raise InputError(f"expected a table {name!r} in {path}, found none; {_AGAIN}")
        values[name] = _converted(tables.get(name, []), hints[name], f"table {name!r} of {path}")
    for name, (pattern, form) in _array_files(kind).items():
        found = {key: arrays_of(form, read_arrays(file), file) for key, file in _files(run, pattern)}
        if "{" in pattern:
            values[name] = found
        elif found:
            values[name] = found[""]
    return kind(**values, folder=run.folder, status=run.status, seconds=float(results["seconds"]))


def joined(parts: Sequence[R]) -> R:
    """Several records of a command in one: the rows of all, and the arrays of all by their names."""
    tables: dict[str, Any] = {
        name: tuple(row for each in parts for row in each.tables[name]) for name in parts[0].tables
    }
    arrays: dict[str, Any] = {
        name: {key: value for part in parts for key, value in getattr(part, name).items()}
        for name, (pattern, _) in _array_files(type(parts[0])).items() if "{" in pattern
    }  # fmt: skip
    return dataclasses.replace(parts[0], **tables, **arrays)


def _converted(value: object, kind: Any, source: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"expected what a run writes in {source}, found another value: {error}; {_AGAIN}") from error


def _files(run: RunRecord, pattern: str) -> Iterator[tuple[str, Path]]:
    """The files of a pattern, by the value of its placeholder ("" without one)."""
    place = inside(run.folder, "arrays")
    if "{" not in pattern:
        path = inside(run.folder, "arrays", named_file(pattern, ".npz"))
        yield from [("", path)] if path.is_file() else []
        return
    before, after = re.split(r"\{\w+\}", pattern)
    expression = re.compile(f"{re.escape(before)}(.+){re.escape(after)}")
    for path in sorted(place.glob("[!.]*.npz")) if place.is_dir() else ():
        match = expression.fullmatch(path.stem)
        if match:
            yield match[1], inside(run.folder, "arrays", path.name)


def _filled(pattern: str, key: str) -> str:
    return re.sub(r"\{\w+\}", lambda _: key, pattern)


@_once
def _tables(kind: type[Record]) -> Mapping[str, type]:
    """The row class of each table by the table's name, the field's."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name].__args__[0] for each in fields(kind) if _TABLE in each.metadata}


@_once
def _array_files(kind: type[Record]) -> Mapping[str, tuple[str, Any]]:
    """The name of the file and the dataclass of arrays, by field."""
    hints = get_type_hints(kind)
    found = {}
    for each in fields(kind):
        if _ARRAYS in each.metadata:
            kinds = [part for part in hints[each.name].__args__ if dataclasses.is_dataclass(part)]
            found[each.name] = (each.metadata[_ARRAYS], kinds[0])
    return found


def _metrics_of(row: Any) -> Iterator[tuple[str, Estimate]]:
    for name, column in columns(type(row)).items():
        value = getattr(row, name)
        if not column.metric or value is None:
            continue
        parts = {each.name: getattr(row, each.name) for each in fields(row)}
        kept = None if column.keys is None else column.keys()
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if number is not None and (kept is None or key in kept):
                estimate = number if isinstance(number, Estimate) else Estimate(float(number), unit=column.unit)
                yield column.metric.format(**parts, key=key), estimate


def _as_json(row: Any) -> dict[str, Any]:
    """A row as in results.json: without null, but for fields that have no default."""
    needed = {each.name for each in fields(row) if each.default is MISSING and each.default_factory is MISSING}
    cells: dict[str, Any] = msgspec.to_builtins(row)
    return {name: _without_none(cell) for name, cell in cells.items() if cell is not None or name in needed}


def _without_none(value: Any) -> Any:
    """A value of JSON without the entries of its objects that are null."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def flat(row: Any) -> dict[str, Any]:
    """A row as the cells of a data frame or a CSV file: an interval takes three columns, a mapping one for each key."""
    found: dict[str, Any] = {}
    for each in fields(row):
        value = getattr(row, each.name)
        for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
            name = f"{each.name}_{key}" if key else each.name
            if isinstance(part, Estimate):
                found |= {name: part.value, f"{name}_low": part.low, f"{name}_high": part.high, f"{name}_n": part.n}
            else:
                found[name] = part
    return found


head_name: Final = property(lambda row: f"L{row.layer}.H{row.head}", doc="A head as it is written, L3.H7.")


def by(rows: Sequence[Any], name: str) -> Mapping[Any, tuple[Any, ...]]:
    """Rows by the value of a field, in the order of the first of each."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(getattr(row, name), []).append(row)
    return {key: tuple(own) for key, own in found.items()}
