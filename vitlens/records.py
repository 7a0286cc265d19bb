"""The output of a run, as types: metrics with declared names, tables with one row type each, arrays of declared forms.

A command declares its output once (`commands/<word>/record.py`); it is written and read by that declaration:

    ACCURACY = MetricName("accuracy/{model}")
    IMAGES = TableOf("images", ImageRow)
    RECORD = Contents(metrics=(ACCURACY,), tables=(IMAGES,))

    folder.metric(ACCURACY(model="vit-digits"), estimate)       # while the command runs
    folder.write(IMAGES, [ImageRow(...)])
    record.metric(ACCURACY(model="vit-digits")).value           # in its report, and for anyone who reads the folder
    record.rows(IMAGES)[0].prediction
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form, require_forms
from vitlens.displayed import Displayed
from vitlens.errors import InputError
from vitlens.files import CONFIG, RESULTS, RunRecord, named_file, read_arrays
from vitlens.recorded import Config, ModelEntry
from vitlens.safe_paths import inside
from vitlens.schema import Untrusted, UntrustedName, read_as
from vitlens.uncertainty import Estimate

__all__ = [
    "ArraysOf",
    "ClassNames",
    "Columns",
    "Contents",
    "Masks",
    "MetricName",
    "Pixels",
    "Record",
    "TableOf",
    "UntrustedName",
    "arrays_of",
    "as_arrays",
    "as_row",
]  # fmt: skip

Row = TypeVar("Row")
ArrayType = TypeVar("ArrayType")

Pixels: TypeAlias = Annotated[NDArray[np.uint8], Form("u", (None, 3, None, None))]  # images, 0 to 255
Masks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None))]
ClassNames: TypeAlias = Annotated[NDArray[Any], Form("U", (None,)), Untrusted()]

_AGAIN = "run the command again"


@dataclass(frozen=True)
class MetricName:
    """The name of a metric, a path with placeholders: MetricName("accuracy/{model}")(model="vit-digits").

    The model's alias always follows the first word; for several models, their aliases.
    """

    pattern: str

    def __call__(self, **parts: str | int) -> str:
        """The name with its placeholders filled."""
        return self.pattern.format(**parts)

    @cached_property
    def _expression(self) -> "re.Pattern[str]":
        pieces = Formatter().parse(self.pattern)
        return re.compile(
            "".join(re.escape(text) + (f"(?P<{name}>[^/]+)" if name else "") for text, name, _, _ in pieces)
        )

    def parts(self, name: str) -> dict[str, str] | None:
        """The values of the placeholders in a name; None for the name of another metric."""
        match = self._expression.fullmatch(name)
        return None if match is None else match.groupdict()


@dataclass(frozen=True)
class Columns:
    """In Annotated: a mapping whose entries are columns of the table, by names from a registry. One per row type."""


@dataclass(frozen=True)
class TableOf(Generic[Row]):
    """A table by its name in results.json; row: the frozen dataclass of its rows.

    optional: whether it reads as empty where a folder lacks it, as folders of older versions do.
    """

    name: str
    row: type[Row]
    optional: bool = False


@dataclass(frozen=True)
class ArraysOf(Generic[ArrayType]):
    """Arrays by the name of their file, "predictions-{model}" for one file per model; kind: a frozen dataclass of them.

    Its fields are Annotated with a `Form`; one that is None is left out of the file. A Mapping[int, NDArray] holds
    several arrays of one form: "layer" those named layer0, layer1 ...; a Mapping[str, NDArray] "mean" holds those named
    mean_distance, mean_entropy ...
    """

    name: str
    kind: type[ArrayType]

    def __call__(self, **parts: str) -> str:
        """The name with its placeholders filled."""
        return self.name.format(**parts)


@dataclass(frozen=True)
class Contents:
    """All output of a command."""

    metrics: tuple[MetricName, ...] = ()
    tables: tuple[TableOf[Any], ...] = ()
    arrays: tuple[ArraysOf[Any], ...] = ()


def as_arrays(values: Any) -> dict[str, NDArray[np.generic]]:
    """The arrays of a dataclass that `ArraysOf` declares, by their names in the file, without those that are None."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for place in _places(type(values)):
        value = getattr(values, place.name)
        if place.keys is not None:
            arrays |= {f"{place.prefix}{key}": np.asarray(array) for key, array in value.items()}
        elif value is not None:
            arrays[place.name] = np.asarray(value)
    return arrays


def as_row(table: TableOf[Row], row: Row) -> dict[str, object]:
    """A row as in JSON. Raises TypeError for a row of another table."""
    if type(row) is not table.row:
        raise TypeError(f"expected rows of {table.row.__name__} in {table.name}, found {type(row).__name__}")
    cells: dict[str, object] = asdict(row)  # type: ignore[call-overload]
    kind: Any = table.row
    several: Any = cells.pop(_columns(kind) or "", {})
    return {**cells, **several}


@cache
def _columns(kind: Any) -> str | None:
    """The field of a row whose entries are columns of their own, or None."""
    hints = get_type_hints(kind, include_extras=True).items()
    return next((name for name, hint in hints if Columns() in getattr(hint, "__metadata__", ())), None)


def _by_field(kind: Any, cells: Mapping[str, object]) -> Mapping[str, object]:
    """The cells of a row by field: those without a field belong to the field of columns."""
    several = _columns(kind)
    if several is None:
        return cells
    field_names = {field.name for field in fields(kind)} - {several}
    known = {name: cell for name, cell in cells.items() if name in field_names}
    return {**known, several: {name: cell for name, cell in cells.items() if name not in field_names}}


class Record:
    """The output of a run, read as the types that its command declares; escaped: names in it are so for display.

    Tables are read when the record is opened, arrays on request. Raises InputError, one line, at the first value that
    does not fit. In a run that did not finish, a table that is not written yet is empty.
    """

    def __init__(self, run: RunRecord, contents: Contents, *, escaped: bool = True) -> None:
        self.folder, self.command, self.status = run.folder, run.command, run.status
        self._run, self._contents = run, contents
        results = run.folder / RESULTS
        config = read_as(Config, run.config, source=str(run.folder / CONFIG), unknown="ignore", hint=_AGAIN)
        tables: Any = run.results["tables"]
        read: dict[str, tuple[Any, ...]] = {}
        for table in contents.tables:
            if table.name not in tables and run.status == "done" and not table.optional:
                raise InputError(f"expected a table {table.name!r} in {results}, found none; {_AGAIN}")
            rows = tables.get(table.name, ())
            source = f"table {table.name!r} of {results}"
            read[table.name] = tuple(
                read_as(table.row, _by_field(table.row, row), source=source, hint=_AGAIN) for row in rows
            )
        self._displayed: Callable[[Any], Any] = Displayed((config, read)) if escaped else _unchanged
        self.config: Config = self._displayed(config)
        self._tables = {name: tuple(map(self._displayed, rows)) for name, rows in read.items()}
        self.metrics: Mapping[str, Estimate] = MappingProxyType(dict(_metrics(run)))

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        """The models, in the order in which they were given."""
        return self.config.models

    @property
    def aliases(self) -> tuple[str, ...]:
        """Their aliases."""
        return tuple(model.alias for model in self.models)

    def rows(self, table: TableOf[Row]) -> tuple[Row, ...]:
        """The rows of a table that the command declares."""
        return self._tables[table.name]

    def metric(self, name: str) -> Estimate:
        """One metric. Raises InputError where the run has none of that name."""
        if name not in self.metrics:
            raise InputError(f"expected a metric {name!r} in {self.folder / RESULTS}, found none; {_AGAIN}")
        return self.metrics[name]

    def all(self, metric: MetricName) -> Iterator[tuple[dict[str, str], Estimate]]:
        """Every metric of a declared name: the values of its placeholders, and the metric."""
        for name, estimate in self.metrics.items():
            parts = metric.parts(name)
            if parts is not None:
                yield parts, estimate

    def options(self, kind: type[Row]) -> Row:
        """The options of the command, as its dataclass."""
        return self.section("options", kind)

    def section(self, name: str, kind: type[Row]) -> Row:
        """A section of config.json that only this command writes, as the dataclass that was written."""
        source = f"{name} of {self.folder / CONFIG}"
        section: Row = self._displayed(read_as(kind, self._run.config.get(name), source=source, hint=_AGAIN))
        return section

    @property
    def tables(self) -> Mapping[str, tuple[Any, ...]]:
        """The rows of every table that the command declares."""
        return MappingProxyType(self._tables)

    def has(self, arrays: ArraysOf[Any], **parts: str) -> bool:
        """Whether the run wrote these arrays."""
        return inside(self.folder, "arrays", named_file(arrays(**parts), ".npz")).is_file()

    def arrays(self, arrays: ArraysOf[ArrayType], **parts: str) -> ArrayType:
        """The arrays of a file that the command declares. Raises InputError where they are missing or damaged."""
        path = inside(self.folder, "arrays", named_file(arrays(**parts), ".npz"))
        read: ArrayType = self._displayed(arrays_of(arrays, read_arrays(path), path))
        return read


def arrays_of(arrays: ArraysOf[ArrayType], stored: Mapping[str, NDArray[np.generic]], path: Path) -> ArrayType:
    """The arrays of a file, which lies at `path`, as their dataclass. Raises InputError where they do not fit it."""
    forms: dict[str, Form] = {}
    values: dict[str, Any] = {}
    for place in _places(arrays.kind):
        names = place.names(stored)
        forms |= dict.fromkeys(names.values(), place.form)
        values[place.name] = (
            stored.get(place.name) if place.keys is None else {key: stored[name] for key, name in names.items()}
        )
    require_forms(stored, forms, path, hint=_AGAIN)
    return arrays.kind(**values)


def _unchanged(value: Any) -> Any:
    return value


def _metrics(run: RunRecord) -> Iterator[tuple[str, Estimate]]:
    measured: Any = run.results["metrics"]
    for name, values in measured.items():
        yield name, Estimate(**{"unit": "", **values})


@dataclass(frozen=True)
class _Place:
    """One field of a dataclass of arrays. keys: int or str where it holds several arrays, by number or by name."""

    name: str
    form: Form
    optional: bool
    keys: type[int] | type[str] | None

    @property
    def prefix(self) -> str:
        """The part of the name before the key, for several arrays."""
        return f"{self.name}_" if self.keys is str else self.name

    def names(self, stored: Collection[str]) -> dict[int | str, str]:
        """The names of this field's arrays in a file, by key (0 for a single array, which is required)."""
        if self.keys is None:
            return {} if self.optional and self.name not in stored else {0: self.name}
        expression = re.escape(self.prefix) + (r"(\d{1,6})" if self.keys is int else "(.+)")
        matches = (re.fullmatch(expression, name) for name in stored)
        return {self.keys(match[1]): match[0] for match in matches if match}


def _places(kind: Any) -> Iterator[_Place]:
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        members = (annotation,) if get_origin(annotation) is Annotated else get_args(annotation)
        marks = [mark for member in members for mark in getattr(member, "__metadata__", ())]
        inner = [get_args(member)[0] for member in members if get_origin(member) is Annotated]
        keys = next((get_args(member)[0] for member in inner if get_origin(member) is Mapping), None)
        yield _Place(name, next(mark for mark in marks if isinstance(mark, Form)), type(None) in members, keys)
