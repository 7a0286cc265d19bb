"""What a command writes: one record class of row classes, whose columns are declared once; and a
run's folder, read.

    @dataclass(frozen=True)
    class AccuracyRow(OfModel):
        accuracy: Estimate = col("top-1 accuracy", better="higher", metric="accuracy/{model}")

    @dataclass(frozen=True, kw_only=True)
    class EvaluateRecord(Record):
        accuracy: tuple[AccuracyRow, ...] = table()
        predictions: Mapping[str, PredictionArrays] = arrays("predictions-{model}")

A column gives the JSON of results.json, the metric with its name, the heading of a table, the axis
of a chart, the term in the glossary and the better direction. Files are untrusted: they are read
strictly, by the types of the fields.

Records live longer than the code that wrote them. What is added keeps the schema: a table that a
folder lacks is empty, one that this version does not know is left out, and a new column has a
default, which rows without it take. What is renamed, removed or means something else takes the next
schema, and folders of another schema are refused.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import arrays_of, as_arrays, read_arrays
from vitlens.errors import InputError
from vitlens.files import inside, named_file, read_json
from vitlens.names import FigureFormat, FigureWidth
from vitlens.typed import Count, Name, Text, between, length, read_as
from vitlens.uncertainty import Estimate

CONFIG: Final = "config.json"
RESULTS: Final = "results.json"
SCHEMA: Final = 3  # of results.json
Better = Literal["higher", "lower"]
_COLUMN: Final = "column"
_TABLE: Final = "table"
_ARRAYS: Final = "arrays"
_AGAIN: Final = "run the command again"
_ALIASES: Final = (
    "model",
    "made_for",
    "shown_to",
    "baseline",
)  # placeholders of metrics that are models' aliases
_PAIR: Final = ("first", "second")  # also aliases, where a metric is about no one model
R = TypeVar("R", bound="Record")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _once(function: F) -> F:
    """functools.cache, whose type does not take classes of rows for hashable."""
    return cast(F, cache(function))


@dataclass(frozen=True)
class ModelEntry:
    """One of the models in config.json, as in file names and in every report."""

    alias: Name
    name: Text = ""
    weights: Text = ""
    sha256: str | None = None
    parameters: Count = 0
    family: Text = ""
    notes: tuple[Text, ...] = ()
    classes: Count = 0


@dataclass(frozen=True)
class SkippedEntry:
    """An image that was left out."""

    file: Text
    reason: Text


@dataclass(frozen=True)
class Data:
    """The images in config.json. size: (height, width), px."""

    title: Text = ""
    part: Text = ""
    images: Count = 0
    classes: Count = 0
    skipped: tuple[SkippedEntry, ...] = ()
    notes: tuple[Text, ...] = ()
    size: tuple[Count, Count] = (0, 0)


@dataclass(frozen=True)
class Config:
    """config.json, the part that all commands share.

    fingerprints: a SHA-256 of the images by part ("train", "test"), and of their labels ("test
    labels"); empty in folders of earlier versions.
    """

    title: Text = ""
    formats: tuple[FigureFormat, ...] = ()
    width: FigureWidth = "page"
    versions: Mapping[str, str] = field(default_factory=dict)
    command_line: Text = ""
    device: Text = ""
    precision: Text = ""
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[ModelEntry, ...] = ()
    data: Data | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Results:
    """results.json; the rows of its tables are declared by each command."""

    schema: int
    command: Name
    status: Literal["running", "done", "failed", "interrupted"]
    seconds: Annotated[float, between(0, 1e10)]
    metrics: Mapping[str, Estimate]
    tables: Mapping[str, tuple[Annotated[Mapping[str, Any], length(0, 1000)], ...]]


@dataclass(frozen=True)
class RunRecord:
    """The output of a run: its folder, and config.json and results.json as they were read."""

    folder: Path
    config: Mapping[str, object]
    results: Mapping[str, Any]

    @property
    def command(self) -> str:
        """Return the command of the run ("evaluate")."""
        return str(self.results["command"])

    @property
    def status(self) -> str:
        """running, done, failed or interrupted."""
        return str(self.results["status"])

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the command's options as they are in config.json."""
        options = self.config.get("options")
        return options if isinstance(options, Mapping) else {}


def read_run(folder: Path) -> RunRecord:
    """Return the output of a run, read from its folder.

    Raises InputError when it is not the folder of a vitlens run, is of another schema, or holds
    something else than a run writes.
    """
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "nothing there"
        raise InputError(
            f"expected the folder of a run at {folder}, found {kind}; see reports/ and runs/"
        )
    missing = [name for name in (CONFIG, RESULTS) if not inside(folder, name).is_file()]
    if missing:
        raise InputError(
            f"expected the folder of a run at {folder}, found no {' and no '.join(missing)} in it"
        )
    config = read_json(folder / CONFIG)
    results = read_json(folder / RESULTS)
    _require_schema(folder, config, results)
    read_as(Config, config, source=str(folder / CONFIG), hint=_AGAIN)
    read_as(_Results, results, source=str(folder / RESULTS), hint=_AGAIN)
    return RunRecord(folder, config, results)


def _require_schema(folder: Path, config: object, results: object) -> None:
    """Raise InputError, with what to type, for results of another schema."""
    schema = results.get("schema", SCHEMA) if isinstance(results, dict) else SCHEMA
    if schema == SCHEMA:
        return
    version = "another version"
    advice = f"make them again: {_command_line(config)}"
    if isinstance(schema, int) and schema < SCHEMA:
        version = "an older version"
    elif isinstance(schema, int):
        version = "a newer version"
        advice = "read them with that version: pip install --upgrade vitlens"
    raise InputError(
        f"expected results of schema {SCHEMA} in {folder / RESULTS}, found schema "
        f"{schema!s:.40}, which {version} wrote; {advice}"
    )


def _command_line(config: object) -> str:
    """Return the command that makes a run again, from its config.json."""
    line = config.get("command_line") if isinstance(config, dict) else None
    if not isinstance(line, str) or not line.startswith("vitlens "):
        return _AGAIN
    return " ".join(line.split())


@dataclass(frozen=True)
class Column:
    """What a field of a row is called and how it is read.

    title: heading, axis and legend; unit: of plain numbers, as an Estimate has its own (one of a
    fraction is shown in points where this is "points"), or "text" of words that tables do not
    shorten; term: what it is, one sentence for the glossary; better: the direction that is better,
    None where neither is; metric: the name of its metric in results.json, with the row's fields in
    braces, and {key} for a field that holds several by name; keys: gives the entries of such a
    field that are metrics, where not all are.
    """

    title: str
    unit: str = ""
    term: str = ""
    better: Better | None = None
    metric: str = ""
    keys: Callable[[], Collection[str]] | None = None


def col(title: str, *, default: Any = MISSING, **more: Any) -> Any:
    """Return a field of a row, declared as a `Column`; more: the other fields of Column."""
    return field(default=default, metadata={_COLUMN: Column(title, **more)})


@dataclass(frozen=True)
class OfModel:
    """A row about one model."""

    model: str = col("model")


def table() -> Any:
    """Return a field of a record: the rows of a table, empty where nothing was measured."""
    return field(default=(), metadata={_TABLE: True})


def arrays(name: str) -> Any:
    """Return a field of a record: the arrays of a file, from which figures are drawn.

    name: of the file. With a placeholder, "offsets-{model}", the field is a Mapping from its value
    to a dataclass of arrays (vitlens/arrays.py), else such a dataclass or None.
    """
    several = "{" in name
    return field(
        **({"default_factory": dict} if several else {"default": None}), metadata={_ARRAYS: name}
    )


@dataclass(frozen=True)
class MetricName:
    """The name of a metric, a path with placeholders: "accuracy/{model}", the model's alias after
    the first word; keys: what {key} can be, empty where that is not known before the run.
    """

    pattern: str
    keys: tuple[str, ...] = ()

    def parts(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders in a name; None for the name of another metric."""
        match = _expression(self).fullmatch(name)
        return match and match.groupdict()

    def renamed(self, name: str, aliases: Mapping[str, str]) -> str:
        """Return the name of this metric for models with other aliases; all else stays as it is
        written.
        """
        match = _expression(self).fullmatch(name)
        if match is None:
            return name
        groups = match.re.groupindex
        models = {*_ALIASES, *(() if "model" in groups else _PAIR)}
        pieces = []
        end = 0
        for start, stop in sorted(match.span(part) for part in groups if part in models):
            alias = name[start:stop]
            pieces += [name[end:start], aliases.get(alias, alias)]
            end = stop
        return "".join([*pieces, name[end:]])

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the pattern with each of its keys put in."""
        return tuple(self.pattern.replace("{key}", key) for key in self.keys) or (self.pattern,)


@cache
def _expression(name: MetricName) -> "re.Pattern[str]":
    values = {"key": "|".join(map(re.escape, name.keys)) or "[^/]+"}
    pieces = Formatter().parse(name.pattern)
    return re.compile(
        "".join(
            re.escape(text) + (f"(?P<{part}>{values.get(part, '[^/]+')})" if part else "")
            for text, part, _, _ in pieces
        )
    )


@dataclass(frozen=True)
class Contents:
    """All that a command writes: the names of its metrics, the row class of each table, the class
    of each file of arrays, by the pattern of its name.
    """

    metrics: tuple[MetricName, ...]
    tables: Mapping[str, type]
    arrays: Mapping[str, type]


def joined_contents(parts: Sequence[Contents]) -> Contents:
    """Return all metrics, tables and arrays of several contents, in their order."""
    metrics: dict[MetricName, None] = {}
    tables: dict[str, type] = {}
    arrays: dict[str, type] = {}
    for part in parts:
        metrics |= dict.fromkeys(part.metrics)
        tables |= part.tables
        arrays |= part.arrays
    return Contents(tuple(metrics), tables, arrays)


@_once
def columns(kind: type) -> Mapping[str, Column]:
    """Return the columns of a row class by field; a field without `col` is called as it is."""
    return {
        each.name: each.metadata.get(_COLUMN, Column(each.name.replace("_", " ")))
        for each in fields(kind)
    }


@dataclass(frozen=True)
class ImageValues:
    """The values (n,) of a metric on the images in their order; groups (n,): as those of a Split,
    or None.
    """

    values: NDArray[np.floating[Any]]
    groups: NDArray[np.integer[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """The output of a run.

    config: its settings and models; folder: where it was read from; seconds: that it took;
    missing_tables: names of those that its folder lacks, which are empty here.
    """

    config: Config = field(default_factory=Config)
    folder: Path = field(default_factory=Path)
    status: str = "done"
    seconds: float = 0.0
    missing_tables: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Return the word of the command, after which its record class is named."""
        return type(self).__name__.removesuffix("Record").lower()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the models' aliases, in the order in which they were given."""
        return tuple(model.alias for model in self.config.models)

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the command's options as they are in config.json."""
        return self.config.options

    @property
    def images(self) -> int:
        """Return how many images were measured; 0 where the command takes none."""
        return self.config.data.images if self.config.data else 0

    @property
    def tables(self) -> Mapping[str, tuple[Any, ...]]:
        """Return the rows of every table by its name."""
        return {name: getattr(self, name) for name in _tables(type(self))}

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """Return every number that a column names a metric, by the metric's name."""
        return dict(
            each for rows in self.tables.values() for row in rows for each in _metrics_of(row)
        )

    @property
    def hardware(self) -> str:
        """Return the machine on which the run took its time, "" where that was not recorded."""
        return ""

    def values_by_image(self) -> Mapping[str, ImageValues]:
        """Return the values whose means are metrics, by the metric's name, so far as the run keeps
        them.
        """
        return {}

    def column(self, name: str) -> Column | None:
        """Return the column that declares a metric; None where there is no such metric."""
        declared = _declared(type(self))
        return next(
            (each for each in declared if MetricName(each.metric).parts(name) is not None), None
        )

    def better(self, name: str) -> Better | None:
        """Return the better direction of a metric; None where neither is, or there is no such
        metric.
        """
        column = self.column(name)
        return None if column is None else column.better

    def metric(self, name: str) -> Estimate:
        """Return one metric. Raises InputError where the run has none of that name."""
        found = self.metrics.get(name)
        if found is None:
            raise InputError(
                f"expected a metric {name!r} in {self.folder / RESULTS}, found none; {_AGAIN}"
            )
        return found

    @classmethod
    def contents(cls) -> Contents:
        """Return what the command writes: the patterns of its metrics, its tables and its
        arrays."""
        names = (
            MetricName(each.metric, tuple(each.keys()) if each.keys else ())
            for each in _declared(cls)
        )
        return Contents(tuple(dict.fromkeys(names)), _tables(cls), dict(_array_files(cls).values()))


@_once
def _tables(kind: type[Record]) -> Mapping[str, type]:
    """Return the row class of each table by the table's name, the field's."""
    hints = get_type_hints(kind)
    return {
        each.name: hints[each.name].__args__[0] for each in fields(kind) if _TABLE in each.metadata
    }


def _declared(kind: type[Record]) -> list[Column]:
    """Return the columns that are metrics."""
    return [each for row in _tables(kind).values() for each in columns(row).values() if each.metric]


@_once
def _array_files(kind: type[Record]) -> Mapping[str, tuple[str, Any]]:
    """Return the name of the file and the dataclass of arrays, by field."""
    hints = get_type_hints(kind)
    files = {each.name: each.metadata[_ARRAYS] for each in fields(kind) if _ARRAYS in each.metadata}
    return {
        name: (file, next(filter(dataclasses.is_dataclass, hints[name].__args__)))
        for name, file in files.items()
    }


def _metrics_of(row: Any) -> Iterator[tuple[str, Estimate]]:
    cells = {each.name: getattr(row, each.name) for each in fields(row)}
    for name, column in columns(type(row)).items():
        value = cells[name]
        kept = None if column.keys is None else column.keys()
        if not column.metric:
            continue
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if number is not None and (kept is None or key in kept):
                estimate = (
                    number
                    if isinstance(number, Estimate)
                    else Estimate(float(number), unit=column.unit)
                )
                yield column.metric.format(**cells, key=key), estimate


def written(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a record as it is written: metrics and tables as in results.json, and arrays by the
    name of their file.
    """
    metrics = {
        name: _without_none(msgspec.to_builtins(number)) for name, number in record.metrics.items()
    }
    tables = written_tables(record)
    files: dict[str, dict[str, Any]] = {}
    for each, (pattern, _) in _array_files(type(record)).items():
        value = getattr(record, each)
        if isinstance(value, Mapping):
            before, after = re.split(r"\{\w+\}", pattern)
            files |= {f"{before}{key}{after}": as_arrays(part) for key, part in value.items()}
        elif value is not None:
            files[pattern] = as_arrays(value)
    return metrics, tables, files


def written_tables(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of a record as they are in results.json."""
    return {name: [_as_json(row) for row in rows] for name, rows in record.tables.items()}


def _as_json(row: Any) -> dict[str, Any]:
    """Return a row as in results.json: without null, but for fields that have no default."""
    needed = {
        each.name
        for each in fields(row)
        if each.default is MISSING and each.default_factory is MISSING
    }
    cells: dict[str, Any] = msgspec.to_builtins(row)
    return {
        name: _without_none(cell)
        for name, cell in cells.items()
        if cell is not None or name in needed
    }


def _without_none(value: Any) -> Any:
    """Return a value of JSON without the entries of its objects that are null."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def read_record(kind: type[R], run: RunRecord) -> R:
    """Return the record of a run's folder. Raises InputError, one line, at the first value that
    does not fit.
    """
    path = run.folder / RESULTS
    tables = run.results["tables"]
    hints = get_type_hints(kind)
    again = _command_line(run.config)
    values: dict[str, Any] = {}
    for name in _tables(kind):
        values[name] = read_as(
            hints[name], tables.get(name, []), source=f"table {name!r} of {path}", hint=again
        )
    values["missing_tables"] = tuple(name for name in _tables(kind) if name not in tables)
    for name, (pattern, form) in _array_files(kind).items():
        found = {
            key: arrays_of(form, read_arrays(file), file)
            for key, file in _files(run.folder, pattern)
        }
        if "{" in pattern:
            values[name] = found
        elif found:
            values[name] = found[""]
    config = read_as(Config, run.config, source=str(run.folder / CONFIG), hint=_AGAIN)
    return kind(
        config=config,
        **values,
        folder=run.folder,
        status=run.status,
        seconds=float(run.results["seconds"]),
    )


def _files(folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a pattern, by the value of its placeholder ("" without one)."""
    place = inside(folder, "arrays")
    if "{" not in pattern:
        path = inside(folder, "arrays", named_file(pattern, ".npz"))
        yield from [("", path)] if path.is_file() else []
        return
    before, after = re.split(r"\{\w+\}", pattern)
    expression = re.compile(f"{re.escape(before)}(.+){re.escape(after)}")
    for path in sorted(place.glob("[!.]*.npz")) if place.is_dir() else ():
        match = expression.fullmatch(path.stem)
        if match:
            yield match[1], inside(folder, "arrays", path.name)


def joined(parts: Sequence[R]) -> R:
    """Several records of a command in one: the rows of all, and the arrays of all by their
    names."""
    tables: dict[str, Any] = {
        name: tuple(row for each in parts for row in each.tables[name]) for name in parts[0].tables
    }
    arrays: dict[str, Any] = {
        name: {key: value for part in parts for key, value in getattr(part, name).items()}
        for name, (pattern, _) in _array_files(type(parts[0])).items()
        if "{" in pattern
    }
    return dataclasses.replace(parts[0], **tables, **arrays)


def flat(row: Any) -> dict[str, Any]:
    """Return a row as the cells of a data frame or a CSV file: an interval takes three columns, a
    mapping one for each key.
    """
    found: dict[str, Any] = {}
    for each in fields(row):
        value = getattr(row, each.name)
        for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
            name = f"{each.name}_{key}" if key else each.name
            if isinstance(part, Estimate):
                found |= {
                    name: part.value,
                    f"{name}_low": part.low,
                    f"{name}_high": part.high,
                    f"{name}_n": part.n,
                }
            else:
                found[name] = part
    return found


def as_row(kind: type[T], result: Any) -> T:
    """Return the columns of a result that extends a row class, as a row of this class."""
    return kind(**{column.name: getattr(result, column.name) for column in fields(cast(Any, kind))})


head_name: Final = property(
    lambda row: f"L{row.layer}.H{row.head}", doc="A head as it is written, L3.H7."
)


def by(rows: Sequence[Any], name: str) -> Mapping[Any, tuple[Any, ...]]:
    """Rows by the value of a field, in the order of the first of each."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(getattr(row, name), []).append(row)
    return {key: tuple(own) for key, own in found.items()}
