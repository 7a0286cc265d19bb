"""Data from files, read as types: JSON values to frozen dataclasses, by their annotations.

Files are untrusted: `read_as` checks every value against the annotation of its field, and raises one line with the
file, the place, what was expected and what was found.
`Length`, `Between` and `PathPart` in `Annotated` narrow a field.
"""

import dataclasses
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from vitlens.errors import InputError
from vitlens.strict_json import short

CHARACTERS: Final = 4096  # most of a text without a Length
ITEMS: Final = 1_000_000  # most of a list or an object without a Length
_SHOWN: Final = 60  # characters of a value in messages

T = TypeVar("T")


@dataclass(frozen=True)
class Between:
    """In Annotated: a number from low to high, both included."""

    low: int | float
    high: int | float


@dataclass(frozen=True)
class Length:
    """In Annotated: characters of a text, or items of a list or an object, from low to high, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class PathPart:
    """In Annotated: a text that may be part of a path: one name, without separators and control characters."""

    most: int = 200  # bytes: file systems accept 255, and suffixes are added


@dataclass(frozen=True)
class Untrusted:
    """In Annotated: an untrusted name (of a file, class, model or data set), which may hold any characters."""


@dataclass(frozen=True)
class Verbatim:
    """In Annotated: a text that is shown unchanged, in a code block."""


Name: TypeAlias = Annotated[str, PathPart()]
UntrustedName: TypeAlias = Annotated[str, Untrusted()]
Text: TypeAlias = Annotated[str, Length(0, 1 << 20)]
Count: TypeAlias = Annotated[int, Between(0, 2**53)]


def is_name(text: str, *, most: int = PathPart().most) -> bool:
    """Whether a text can be a name in a path: not empty, not hidden, no separators, only printable characters.

    most: bytes in UTF-8.
    """
    if not text or text[0] in ".~" or len(text) > most or any(mark in text for mark in "/\\"):
        return False
    return text.isprintable() and len(text.encode(errors="replace")) <= most


def read_as(
    kind: type[T],
    value: object,
    *,
    source: str,
    unknown: Literal["refuse", "ignore"] = "refuse",
    error: type[InputError] = InputError,
    hint: str = "",
) -> T:
    """A value from a file as a frozen dataclass, whose fields are read by their annotations.

    Supported in fields: str, int, float (finite), bool, Path, None, Literal, unions, tuple[X, ...], tuple[X, Y],
    list[X], Mapping[str, X], dataclasses, and object for anything. A missing field takes its default. source: the
    file's name in messages; unknown: how to treat keys without a field; hint: what to type, at the end of a message.
    Raises `error` at the first value that does not fit, or that a dataclass itself refuses.
    """
    try:
        typed: T = _Reader(unknown == "ignore").read(kind, value, "")
        return typed
    except _FaultError as fault:
        where = f" at {fault.place}" if fault.place else ""
        if fault.message:  # of a dataclass that refused its values
            message = f"{fault.message} (in {source}{where})"
        else:
            message = f"expected {fault.expected}{where} in {source}, found {fault.found}"
        raise error(f"{message}; {hint}" if hint else message) from None


class _FaultError(Exception):
    """One value that does not fit; message: of a dataclass that refused its values."""

    def __init__(self, place: str, expected: str, found: str, message: str = "") -> None:
        super().__init__(place, expected, found)
        self.place, self.expected, self.found, self.message = place, expected, found, message


@dataclass(frozen=True)
class _Reader:
    """Reads values by annotations; lenient: keys without a field are ignored."""

    lenient: bool

    def read(self, kind: Any, value: object, place: str, bounds: tuple[object, ...] = ()) -> Any:
        origin = get_origin(kind)
        if origin is Annotated:
            inner, *more = get_args(kind)
            return self.read(inner, value, place, (*more, *bounds))
        if kind is object or kind is Any:
            return value
        if origin is Literal:
            return self._literal(kind, value, place)
        if origin in (Union, types.UnionType):
            return self._union(kind, value, place, bounds)
        if kind is None or kind is type(None):
            return value if value is None else _refuse(place, "null", value)
        if kind in (str, int, float, bool):
            return _plain(kind, value, place, bounds)
        if kind is Path:
            return Path(str(_plain(str, value, place, bounds)))
        if origin in (tuple, list):
            return self._items(kind, value, place, bounds)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(kind, value, place, bounds)
        if dataclasses.is_dataclass(kind):
            return self._record(kind, value, place)
        raise TypeError(f"expected an annotation that JSON can be read as, found {kind!r}")

    def _literal(self, kind: Any, value: object, place: str) -> object:
        options = get_args(kind)
        if not any(type(value) is type(option) and value == option for option in options):
            _refuse(place, " or ".join(repr(option) for option in options), value)
        return value

    def _union(self, kind: Any, value: object, place: str, bounds: tuple[object, ...]) -> Any:
        faults = []
        for member in get_args(kind):
            try:
                return self.read(member, value, place, bounds)
            except _FaultError as fault:
                faults.append(fault)
        inner = max(faults, key=lambda fault: (len(fault.place), bool(fault.message)))
        if len(inner.place) > len(place) or inner.message:
            raise inner
        return _refuse(place, " or ".join(dict.fromkeys(fault.expected for fault in faults)), value)

    def _items(self, kind: Any, value: object, place: str, bounds: tuple[object, ...]) -> Any:
        if not isinstance(value, list | tuple):
            _refuse(place, "a list", value)
        inner, whole = get_args(kind), get_origin(kind) is tuple
        fixed = whole and not (len(inner) == 2 and inner[1] is Ellipsis)
        low, high = (len(inner), len(inner)) if fixed else _length(bounds, ITEMS)
        if not low <= len(value) <= high:
            _refuse(place, f"a list of {_range(low, high)}", value)
        kinds: Iterable[Any] = inner if fixed else (inner[0] for _ in value)
        items = [
            self.read(item_kind, item, f"{place}/{index}".lstrip("/"))
            for index, (item_kind, item) in enumerate(zip(kinds, value))
        ]
        return tuple(items) if whole else items

    def _mapping(self, kind: Any, value: object, place: str, bounds: tuple[object, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            _refuse(place, "an object", value)
        key_kind, item_kind = get_args(kind)
        low, high = _length(bounds, ITEMS)
        if not low <= len(value) <= high:
            _refuse(place, f"an object of {_range(low, high)}", value)
        return {
            self.read(key_kind, key, place): self.read(item_kind, item, f"{place}/{short(str(key), 40)}".lstrip("/"))
            for key, item in value.items()
        }

    def _record(self, kind: Any, value: object, place: str) -> Any:
        if not isinstance(value, dict):
            _refuse(place, "an object", value)
        hints = _hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        extra = [name for name in value if name not in fields]
        if extra and not self.lenient:
            raise _FaultError(place, f"the keys {', '.join(fields)}", repr(short(str(extra[0]), _SHOWN)))
        missing = [name for name, field in fields.items() if name not in value and _is_required(field)]
        if missing:
            raise _FaultError(place, f"the key{'s' * (len(missing) > 1)} {', '.join(missing)}", "none")
        values = {
            name: self.read(hints[name], value[name], f"{place}/{name}".lstrip("/")) for name in fields if name in value
        }
        try:
            return kind(**values)
        except InputError as error:  # the dataclass refuses its values
            raise _FaultError(place, "", "", str(error)) from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _plain(kind: Any, value: object, place: str, bounds: tuple[object, ...]) -> object:
    """A text, a number or a boolean; whole numbers are accepted as floats, booleans are not numbers."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if type(value) is not kind:
        names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        return _refuse(place, names[kind], value)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(place, "a finite number", value)
    if isinstance(value, str):
        words = next((bound for bound in bounds if isinstance(bound, PathPart)), None)
        low, high = _length(bounds, CHARACTERS)
        if words is not None and not is_name(value, most=words.most):
            _refuse(place, "a name that can be part of a file name", value)
        if not low <= len(value) <= high:
            _refuse(place, f"a text of {_range(low, high)} characters", f"{len(value):,} characters", is_text=True)
    for bound in bounds:
        if isinstance(bound, Between) and isinstance(value, int | float) and not bound.low <= value <= bound.high:
            _refuse(place, f"a number from {bound.low:g} to {bound.high:g}", value)
    return value


def _refuse(place: str, expected: str, value: object, *, is_text: bool = False) -> NoReturn:
    raise _FaultError(place, expected, str(value) if is_text else _shown(value))


def _shown(value: object) -> str:
    """A value, shortened for a message."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return f"an object of {len(value):,}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value):,}"
    return (
        str(value).lower() if isinstance(value, bool) else short(repr(value) if isinstance(value, str) else str(value))
    )


def _length(bounds: tuple[object, ...], most: int) -> tuple[int, int]:
    length = next((bound for bound in bounds if isinstance(bound, Length)), None)
    return (0, most) if length is None else (length.low, length.high)


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
