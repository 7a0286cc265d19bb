"""The record of a command: one class of row classes, whose columns are declared once.

    @dataclass(frozen=True)
    class AccuracyRow(OfModel):
        accuracy: Estimate = col("top-1 accuracy", better="higher", metric="accuracy/{model}")

    @dataclass(frozen=True, kw_only=True)
    class EvaluateRecord(Record):
        accuracy: tuple[AccuracyRow, ...] = table()
        predictions: Mapping[str, PredictionArrays] = arrays("predictions-{model}")

A column declares several things at once: the field in results.json, the name of the metric, the
heading of a table, the axis of a chart, the term in the glossary and the better direction. Files
are untrusted: they are read strictly, by the types of the fields.

Records live longer than the code that wrote them. Additions keep the schema: a table that a folder
lacks is empty, an unknown table is ignored, and a new column has a default for rows without it. If
a column is renamed or removed, or changes its meaning, the number of the schema rises. Folders of
another schema are refused.

Records are written and read in vitlens/record_files.py.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError
from vitlens.files import inside, named_file, read_json
from vitlens.names import FigureFormat, FigureWidth
from vitlens.typed import Count, Name, Text, between, length, read_as
from vitlens.uncertainty import Estimate

CONFIG: Final = "config.json"
RESULTS: Final = "results.json"
CHAPTERS_FOLDER: Final = "chapters"  # in a run's folder, the runs that it is made of
SCHEMA: Final = 3  # of results.json
Better = Literal["higher", "lower"]
_COLUMN: Final = "column"
_TABLE: Final = "table"
_ARRAYS: Final = "arrays"
AGAIN: Final = "run the command again"
# placeholders in names of metrics that stand for aliases of models
_ALIASES: Final = ("model", "made_for", "shown_to", "baseline")
_PAIR: Final = ("first", "second")  # these, too, in a metric without the placeholder {model}
R = TypeVar("R", bound="Record")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _once(function: F) -> F:
    """Return a cached function of the same type, which functools.cache would not keep."""
    return cast(F, cache(function))


@dataclass(frozen=True)
class ModelEntry:
    """A model in config.json.

    alias: its name in file names and in the report.
    name: its name as it was loaded.
    weights: the origin of its weights.
    sha256: the hash of the file of its weights.
    parameters: the number of its parameters.
    notes: remarks on how it was loaded.
    classes: the number of its classes.
    """

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
    """The images in config.json.

    title: the name of the data set.
    part: the part of the data set, "train" or "test".
    images: the number of images.
    classes: the number of classes.
    skipped: the images that were left out.
    notes: remarks on how the images were processed.
    size: the (height, width) of the images in px.
    """

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

    title: the title of the report.
    formats, width: the format and the width of figures.
    versions: the version of each library.
    command_line: the command as it was typed.
    device, precision, seed: the settings of the run.
    options: all options of the command.
    models: the models of the run.
    data: the images of the run.
    fingerprints: a SHA-256 of the images by part ("train", "test"), and of their labels ("test
        labels"). Empty in folders of earlier versions.
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
class VerdictEntry:
    """A verdict in results.json.

    question: what was judged ("calibration").
    subject: the model or the map that was judged.
    state: "pass", "warn", "fail", "inconclusive" or "not tested".
    because: the reason.
    limit: the limit by which it was judged in words, "" for none.
    """

    question: Text = ""
    subject: Text = ""
    state: Text = ""
    because: Text = ""
    limit: Text = ""


@dataclass(frozen=True)
class _Results:
    """results.json; the rows of its tables are declared by each command."""

    schema: int
    command: Name
    status: Literal["running", "done", "failed", "interrupted"]
    seconds: Annotated[float, between(0, 1e10)]
    metrics: Mapping[str, Estimate]
    tables: Mapping[str, tuple[Annotated[Mapping[str, Any], length(0, 1000)], ...]]
    verdicts: tuple[VerdictEntry, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """The output of a run: its folder, and the content of config.json and results.json."""

    folder: Path
    config: Mapping[str, object]
    results: Mapping[str, Any]

    @property
    def command(self) -> str:
        """Return the command of the run ("evaluate")."""
        return str(self.results["command"])

    @property
    def status(self) -> str:
        """Return "running", "done", "failed" or "interrupted"."""
        return str(self.results["status"])

    @property
    def verdicts(self) -> tuple[VerdictEntry, ...]:
        """Return the verdicts of the report; none of a run that is not finished."""
        source = str(self.folder / RESULTS)
        return read_as(_Results, self.results, source=source, hint=AGAIN).verdicts

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the command's options as they are in config.json."""
        options = self.config.get("options")
        return options if isinstance(options, Mapping) else {}


def read_run(folder: Path) -> RunRecord:
    """Return the output of a run, read from its folder.

    Raises InputError unless it is the folder of a vitlens run with this schema and valid files.
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
    read_as(Config, config, source=str(folder / CONFIG), hint=AGAIN)
    read_as(_Results, results, source=str(folder / RESULTS), hint=AGAIN)
    return RunRecord(folder, config, results)


def _require_schema(folder: Path, config: object, results: object) -> None:
    """Raise InputError, with a remedy, for results of another schema."""
    schema = results.get("schema", SCHEMA) if isinstance(results, dict) else SCHEMA
    if schema == SCHEMA:
        return
    version = "another version"
    advice = f"make them again: {command_line(config)}"
    if isinstance(schema, int) and schema < SCHEMA:
        version = "an older version"
    elif isinstance(schema, int):
        version = "a newer version"
        advice = "read them with that version: pip install --upgrade vitlens"
    raise InputError(
        f"expected results of schema {SCHEMA} in {folder / RESULTS}, found schema "
        f"{schema!s:.40}, which {version} wrote; {advice}"
    )


def command_line(config: object) -> str:
    """Return the command that makes a run again, from its config.json."""
    line = config.get("command_line") if isinstance(config, dict) else None
    if not isinstance(line, str) or not line.startswith("vitlens "):
        return AGAIN
    return " ".join(line.split())


@dataclass(frozen=True)
class Column:
    """The description of a field of a row.

    title: its name in headings, axes and legends.
    unit: the unit of plain numbers; an Estimate has its unit. "points" writes a fraction in points,
        "text" marks words that tables do not shorten.
    term: its definition for the glossary, one sentence.
    better: the better direction, None for neither.
    metric: the name of its metric in results.json, "" if it is none. Fields of the row are in
        braces. {key} stands for the names in a field that holds several values by name.
    keys: returns the names in such a field that are metrics. None if all are.
    values: by field in the metric's name, returns the values that it can have. Others may have any.
    share: True if the metric is a share: from 0 to 1.

    With metric="{key}/{model}", `keys` returns the values of {key}. With
    metric="corruption_accuracy/{model}/{kind}/{severity}", values={"severity": severities} has the
    function that returns those of {severity}.
    """

    title: str
    unit: str = ""
    term: str = ""
    better: Better | None = None
    metric: str = ""
    keys: Callable[[], Collection[str]] | None = None
    values: Mapping[str, Callable[[], Collection[str]]] = field(default_factory=dict)
    share: bool = False


def col(title: str, *, default: Any = MISSING, **more: Any) -> Any:
    """Return a field of a row, declared as a `Column`.

    more: the other fields of Column.
    """
    return field(default=default, metadata={_COLUMN: Column(title, **more)})


@dataclass(frozen=True)
class OfModel:
    """A row about one model."""

    model: str = col("model")


def table() -> Any:
    """Return a field of a record: the rows of a table, by default none."""
    return field(default=(), metadata={_TABLE: True})


def arrays(name: str) -> Any:
    """Return a field of a record: the arrays of a file, from which figures are drawn.

    The field is a dataclass of arrays (vitlens/arrays.py) or None. If the name has a placeholder,
    the field is a Mapping from its values to such dataclasses.

    name: the name of the file, such as "offsets-{model}".
    """
    metadata = {_ARRAYS: name}
    if "{" in name:
        return field(default_factory=dict, metadata=metadata)
    return field(default=None, metadata=metadata)


@dataclass(frozen=True)
class MetricName:
    """The name of a metric, a path with placeholders.

    pattern: the name, such as "accuracy/{model}". The model's alias follows the first word.
    keys: the values of {key}, empty if they are unknown before the run.
    values: placeholders with the values that a run can write for them, as pairs.
    share: True if the metric is from 0 to 1.
    """

    pattern: str
    keys: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    share: bool = False

    def parts(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders in a name; None for the name of another metric."""
        match = _expression(self).fullmatch(name)
        return match.groupdict() if match else None

    def unknown_values(self, name: str) -> dict[str, str]:
        """Return the values in a name of this metric that no run writes, by placeholder."""
        parts = self.parts(name) or {}
        unknown = {}
        for placeholder, known_values in self.values:
            if placeholder in parts and parts[placeholder] not in known_values:
                unknown[placeholder] = parts[placeholder]
        return unknown

    def renamed(self, name: str, aliases: Mapping[str, str]) -> str:
        """Return the name of this metric for models with other aliases."""
        match = _expression(self).fullmatch(name)
        if match is None:
            return name
        # the (start, stop) of each alias in the name
        spans = sorted(match.span(placeholder) for placeholder in self._aliases)
        pieces = []
        end_of_last = 0
        for start, stop in spans:
            alias = name[start:stop]
            pieces += [name[end_of_last:start], aliases.get(alias, alias)]
            end_of_last = stop
        pieces.append(name[end_of_last:])
        return "".join(pieces)

    @property
    def _aliases(self) -> tuple[str, ...]:
        """Return the placeholders that stand for models."""
        placeholders = _expression(self).groupindex
        stand_for_models = _ALIASES if "model" in placeholders else (*_ALIASES, *_PAIR)
        return tuple(name for name in placeholders if name in stand_for_models)

    @property
    def compares_models(self) -> bool:
        """Return True for a metric of two models."""
        return len(self._aliases) > 1

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the pattern once for each of its keys, which replaces {key}."""
        return tuple(self.pattern.replace("{key}", key) for key in self.keys) or (self.pattern,)


@cache
def _expression(name: MetricName) -> "re.Pattern[str]":
    any_value = "[^/]+"
    expression = ""
    for text, placeholder, _, _ in Formatter().parse(name.pattern):
        expression += re.escape(text)
        value_pattern = any_value
        if placeholder == "key" and name.keys:
            value_pattern = "|".join(map(re.escape, name.keys))
        if placeholder:
            expression += f"(?P<{placeholder}>{value_pattern})"
    return re.compile(expression)


@dataclass(frozen=True)
class Contents:
    """The contents of a command's folder.

    metrics: the names of its metrics.
    tables: the row class of each table by name.
    arrays: the dataclass of each file of arrays by the pattern of its name.
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
    """Return the columns of a row class by field, with a default title for plain fields."""
    column_of_field = {}
    for row_field in fields(kind):
        default = Column(row_field.name.replace("_", " "))
        column_of_field[row_field.name] = row_field.metadata.get(_COLUMN, default)
    return column_of_field


@dataclass(frozen=True)
class ImageValues:
    """The values of a metric on each image.

    values (n,): the values in the order of the images.
    groups (n,): the group of each image in a Split with groups, or None.
    """

    values: NDArray[np.floating[Any]]
    groups: NDArray[np.integer[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """The output of a run.

    config: its settings and models.
    folder: the folder from which it was read.
    status: "running", "done", "failed" or "interrupted".
    seconds: its duration.
    missing_tables: the names of tables that its folder lacks. They are empty here.
    tables_folder: the folder within it of its CSV files.
    """

    tables_folder: ClassVar[str] = "tables"

    config: Config = field(default_factory=Config)
    folder: Path = field(default_factory=Path)
    status: str = "done"
    seconds: float = 0.0
    missing_tables: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Return the word of the command, from the name of the record class."""
        return type(self).__name__.removesuffix("Record").lower()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the models' aliases, in the order of the command line."""
        return tuple(model.alias for model in self.config.models)

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the command's options as they are in config.json."""
        return self.config.options

    @property
    def images(self) -> int:
        """Return the number of measured images; 0 for a command without images."""
        return self.config.data.images if self.config.data else 0

    @property
    def images_of_parts(self) -> Mapping[str, int]:
        """Return the number of images of each part, in words, if parts use other ones."""
        return {}

    @property
    def tables(self) -> Mapping[str, tuple[Any, ...]]:
        """Return the rows of every table by its name."""
        return {name: getattr(self, name) for name in table_classes(type(self))}

    def table_file(self, name: str) -> str:
        """Return the path of a table's CSV file within the folder."""
        return f"{self.tables_folder}/{named_file(name, '.csv')}"

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """Return the numbers in columns that are metrics, by the name of the metric."""
        metrics: dict[str, Estimate] = {}
        for rows in self.tables.values():
            for row in rows:
                metrics.update(_metrics_of(row))
        return metrics

    @property
    def hardware(self) -> str:
        """Return the machine of the run's timings, "" if it was not recorded."""
        return ""

    def values_by_image(self) -> Mapping[str, ImageValues]:
        """Return the recorded values whose means are metrics, by the metric's name."""
        return {}

    def column(self, name: str) -> Column | None:
        """Return the column that declares a metric; None for an unknown metric."""
        for column in _metric_columns(type(self)):
            if MetricName(column.metric).parts(name) is not None:
                return column
        return None

    def better(self, name: str) -> Better | None:
        """Return the better direction of a metric; None for neither, and for an unknown metric."""
        column = self.column(name)
        return None if column is None else column.better

    def metric(self, name: str) -> Estimate:
        """Return one metric. Raises InputError for a name that the run does not have."""
        metrics = self.metrics
        if name not in metrics:
            raise InputError(
                f"expected a metric {name!r} in {self.folder / RESULTS}, found none; {AGAIN}"
            )
        return metrics[name]

    @classmethod
    def contents(cls) -> Contents:
        """Return the names of the command's metrics, and its tables and arrays."""
        names: dict[MetricName, None] = {}  # in order, without repetition
        for column in _metric_columns(cls):
            keys = tuple(column.keys()) if column.keys else ()
            values = tuple((name, tuple(known())) for name, known in column.values.items())
            names[MetricName(column.metric, keys, values, column.share)] = None
        return Contents(tuple(names), table_classes(cls), dict(array_files(cls).values()))


@_once
def table_classes(kind: type[Record]) -> Mapping[str, type]:
    """Return the row class of each table by the name of its field."""
    hints = get_type_hints(kind)
    classes = {}
    for record_field in fields(kind):
        if _TABLE in record_field.metadata:
            row_class, _ = hints[record_field.name].__args__  # of tuple[ROW, ...]
            classes[record_field.name] = row_class
    return classes


def _metric_columns(kind: type[Record]) -> list[Column]:
    """Return the columns that are metrics."""
    metric_columns = []
    for row_class in table_classes(kind).values():
        metric_columns += [column for column in columns(row_class).values() if column.metric]
    return metric_columns


@_once
def array_files(kind: type[Record]) -> Mapping[str, tuple[str, Any]]:
    """Return the name of the file and the dataclass of arrays, by field."""
    hints = get_type_hints(kind)
    files = {}
    for record_field in fields(kind):
        if _ARRAYS in record_field.metadata:
            # of Mapping[str, ARRAYS], or of ARRAYS | None
            members = hints[record_field.name].__args__
            (array_class,) = filter(dataclasses.is_dataclass, members)
            files[record_field.name] = (record_field.metadata[_ARRAYS], array_class)
    return files


def _metrics_of(row: Any) -> Iterator[tuple[str, Estimate]]:
    """Yield the metrics of a row, with their names."""
    cells = {row_field.name: getattr(row, row_field.name) for row_field in fields(row)}
    for name, column in columns(type(row)).items():
        if not column.metric:
            continue
        metric_keys = None if column.keys is None else column.keys()  # None: all keys
        value = cells[name]
        numbers = value if isinstance(value, Mapping) else {"": value}
        for key, number in numbers.items():
            if number is None or (metric_keys is not None and key not in metric_keys):
                continue
            if not isinstance(number, Estimate):
                number = Estimate(float(number), unit=column.unit)
            yield column.metric.format(**cells, key=key), number


def as_row(kind: type[T], result: Any) -> T:
    """Return a row with the columns of a result, which extends the class of the row."""
    return kind(**{column.name: getattr(result, column.name) for column in fields(cast(Any, kind))})


# for row classes with the fields layer and head
head_name: Final = property(
    lambda row: f"L{row.layer}.H{row.head}", doc="A head as it is written, L3.H7."
)


def by(rows: Sequence[Any], name: str) -> Mapping[Any, tuple[Any, ...]]:
    """Return rows by the value of a field, in the order of the first row of each value."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(getattr(row, name), []).append(row)
    return {value: tuple(group) for value, group in groups.items()}
