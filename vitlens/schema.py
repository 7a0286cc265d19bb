"""Data from files, read as types: frozen dataclasses from what `strict_json` gives, by their annotations.

A file of another's is data, never trusted: `read_as` checks every value against the annotation of the field that it
goes into, and says what is wrong in one line that names the file, the place, what was expected and what was found.
`Length`, `Between` and `Words` in `Annotated` narrow a field.
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

CHARACTERS: Final = 4096  # of a text whose annotation gives no Length
ITEMS: Final = 1_000_000  # of a list or an object whose annotation gives no Length
_SHOWN: Final = 60  # characters of what was found

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
class Words:
    """In Annotated: a text that may become part of a path: one name, without separators and control characters."""

    most: int = 200  # bytes: a file system takes 255, and names get endings


@dataclass(frozen=True)
class Given:
    """In Annotated: the name of a file, class, model or data set, which anybody may have chosen."""


@dataclass(frozen=True)
class Verbatim:
    """In Annotated: a text that is shown as it stands, in a block of code."""


Name: TypeAlias = Annotated[str, Words()]
# a name of a file, class or data set that somebody outside gave: reports make it visible and cut it to its length
GivenName: TypeAlias = Annotated[str, Given()]
Text: TypeAlias = Annotated[str, Length(0, 1 << 20)]
Count: TypeAlias = Annotated[int, Between(0, 2**53)]
Positive: TypeAlias = Annotated[float, Between(1e-12, 1e12)]


def is_name(text: str, *, most: int = Words().most) -> bool:
    """Whether a text is one name that can be part of a path: not empty, not hidden, no separator, nothing unprintable.

    most: bytes in UTF-8.
    """
    if not text or text[0] in ".~" or len(text) > most or any(mark in text for mark in "/\\"):
        return False
    return text.isprintable() and len(text.encode(errors="replace")) <= most


def read_as(
    kind: type[T],
    found: object,
    *,
    source: str,
    unknown: Literal["refuse", "ignore"] = "refuse",
    error: type[InputError] = InputError,
    hint: str = "",
) -> T:
    """What was found in a file as a frozen dataclass, whose fields are read by their annotations.

    Understood in fields: str, int, float (finite), bool, Path, None, Literal, unions, tuple[X, ...], tuple[X, Y],
    list[X], Mapping[str, X], dataclasses, and object for anything. A field that is missing takes its default. source:
    the file's name in messages; unknown: what to do with keys that no field has; hint: what to type, at the end of a
    message. Raises `error` at the first place that does not fit, or that a dataclass refuses itself.
    """
    try:
        made: T = _Reader(unknown == "ignore").read(kind, found, "")
        return made
    except _FaultError as fault:
        where = f" at {fault.place}" if fault.place else ""
        said = fault.said or f"expected {fault.expected}{where} in {source}, found {fault.found}"
        message = f"{said} (in {source}{where})" if fault.said else said
        raise error(f"{message}; {hint}" if hint else message) from None


class _FaultError(Exception):
    """One place that does not fit; said: what a dataclass itself said of its values."""

    def __init__(self, place: str, expected: str, found: str, said: str = "") -> None:
        super().__init__(place, expected, found)
        self.place, self.expected, self.found, self.said = place, expected, found, said


@dataclass(frozen=True)
class _Reader:
    """Reads values by annotations; lenient: keys that no field has are passed over."""

    lenient: bool

    def read(self, kind: Any, found: object, place: str, bounds: tuple[object, ...] = ()) -> Any:
        origin = get_origin(kind)
        if origin is Annotated:
            inner, *more = get_args(kind)
            return self.read(inner, found, place, (*more, *bounds))
        if kind is object or kind is Any:
            return found
        if origin is Literal:
            return self._literal(kind, found, place)
        if origin in (Union, types.UnionType):
            return self._union(kind, found, place, bounds)
        if kind is None or kind is type(None):
            return found if found is None else _refuse(place, "null", found)
        if kind in (str, int, float, bool):
            return _plain(kind, found, place, bounds)
        if kind is Path:
            return Path(str(_plain(str, found, place, bounds)))
        if origin in (tuple, list):
            return self._items(kind, found, place, bounds)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(kind, found, place, bounds)
        if dataclasses.is_dataclass(kind):
            return self._record(kind, found, place)
        raise TypeError(f"expected an annotation that JSON can be read as, found {kind!r}")

    def _literal(self, kind: Any, found: object, place: str) -> object:
        options = get_args(kind)
        if not any(type(found) is type(option) and found == option for option in options):
            _refuse(place, " or ".join(repr(option) for option in options), found)
        return found

    def _union(self, kind: Any, found: object, place: str, bounds: tuple[object, ...]) -> Any:
        faults = []
        for member in get_args(kind):
            try:
                return self.read(member, found, place, bounds)
            except _FaultError as fault:
                faults.append(fault)
        inner = max(faults, key=lambda fault: (len(fault.place), bool(fault.said)))
        if len(inner.place) > len(place) or inner.said:
            raise inner
        return _refuse(place, " or ".join(dict.fromkeys(fault.expected for fault in faults)), found)

    def _items(self, kind: Any, found: object, place: str, bounds: tuple[object, ...]) -> Any:
        if not isinstance(found, list | tuple):
            _refuse(place, "a list", found)
        inner, whole = get_args(kind), get_origin(kind) is tuple
        fixed = whole and not (len(inner) == 2 and inner[1] is Ellipsis)
        low, high = (len(inner), len(inner)) if fixed else _length(bounds, ITEMS)
        if not low <= len(found) <= high:
            _refuse(place, f"a list of {_range(low, high)}", found)
        kinds: Iterable[Any] = inner if fixed else (inner[0] for _ in found)
        made = [
            self.read(one, value, f"{place}/{index}".lstrip("/"))
            for index, (one, value) in enumerate(zip(kinds, found))
        ]
        return tuple(made) if whole else made

    def _mapping(self, kind: Any, found: object, place: str, bounds: tuple[object, ...]) -> dict[str, Any]:
        if not isinstance(found, dict):
            _refuse(place, "an object", found)
        key, value = get_args(kind)
        low, high = _length(bounds, ITEMS)
        if not low <= len(found) <= high:
            _refuse(place, f"an object of {_range(low, high)}", found)
        return {
            self.read(key, name, place): self.read(value, one, f"{place}/{short(str(name), 40)}".lstrip("/"))
            for name, one in found.items()
        }

    def _record(self, kind: Any, found: object, place: str) -> Any:
        if not isinstance(found, dict):
            _refuse(place, "an object", found)
        hints = _hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        extra = [name for name in found if name not in fields]
        if extra and not self.lenient:
            raise _FaultError(place, f"the keys {', '.join(fields)}", repr(short(str(extra[0]), _SHOWN)))
        missing = [name for name, field in fields.items() if name not in found and _is_required(field)]
        if missing:
            raise _FaultError(place, f"the key{'s' * (len(missing) > 1)} {', '.join(missing)}", "none")
        values = {
            name: self.read(hints[name], found[name], f"{place}/{name}".lstrip("/")) for name in fields if name in found
        }
        try:
            return kind(**values)
        except InputError as error:  # what the class itself refuses
            raise _FaultError(place, "", "", str(error)) from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _plain(kind: Any, found: object, place: str, bounds: tuple[object, ...]) -> object:
    """A text, a number or a truth value; whole numbers serve as floats, truth values as no number."""
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        found = float(found) if abs(found) < 2**63 else math.inf
    if type(found) is not kind:
        names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        return _refuse(place, names[kind], found)
    if isinstance(found, float) and not math.isfinite(found):
        _refuse(place, "a finite number", found)
    if isinstance(found, str):
        words = next((bound for bound in bounds if isinstance(bound, Words)), None)
        low, high = _length(bounds, CHARACTERS)
        if words is not None and not is_name(found, most=words.most):
            _refuse(place, "a name that can be part of a file name", found)
        if not low <= len(found) <= high:
            _refuse(place, f"a text of {_range(low, high)} characters", f"{len(found):,} characters", said=True)
    for bound in bounds:
        if isinstance(bound, Between) and isinstance(found, int | float) and not bound.low <= found <= bound.high:
            _refuse(place, f"a number from {bound.low:g} to {bound.high:g}", found)
    return found


def _refuse(place: str, expected: str, found: object, *, said: bool = False) -> NoReturn:
    raise _FaultError(place, expected, str(found) if said else _shown(found))


def _shown(found: object) -> str:
    """What was found, in a few words."""
    if found is None:
        return "null"
    if isinstance(found, dict):
        return f"an object of {len(found):,}"
    if isinstance(found, list | tuple):
        return f"a list of {len(found):,}"
    return (
        str(found).lower() if isinstance(found, bool) else short(repr(found) if isinstance(found, str) else str(found))
    )


def _length(bounds: tuple[object, ...], most: int) -> tuple[int, int]:
    given = next((bound for bound in bounds if isinstance(bound, Length)), None)
    return (0, most) if given is None else (given.low, given.high)


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
