"""Data from files as types: JSON by the standard library, checked against the annotations of
dataclasses by msgspec.

Files are untrusted: no pickle, a bounded size, and one line that says what was expected and where.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from vitlens.errors import InputError

SIZE: Final = 64 << 20  # bytes of a JSON text
_BYTES: Final = 200  # of a name in a path: file systems accept 255, and suffixes are added

T = TypeVar("T")


def between(low: float, high: float) -> msgspec.Meta:
    """In Annotated: a number from low to high, both included."""
    return msgspec.Meta(ge=low, le=high)


def length(low: int, high: int) -> msgspec.Meta:
    """In Annotated: characters of a text, or items of a list or an object, from low to high, both
    included.
    """
    return msgspec.Meta(min_length=low, max_length=high)


Name: TypeAlias = Annotated[  # one that may be part of a path, see is_name
    str, msgspec.Meta(pattern=r"^[^.~/\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\Z", max_length=_BYTES)
]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


def is_name(text: str) -> bool:
    """Return True if a text can be a name in a path: not empty, not hidden, no separators, only
    printable characters.
    """
    if not text or text[0] in ".~" or any(mark in text for mark in "/\\"):
        return False
    return text.isprintable() and len(text.encode(errors="replace")) <= _BYTES


def short(text: str, most: int = 60) -> str:
    """Return a text shortened for a message."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def parse_json(
    text: str | bytes,
    *,
    source: str,
    size: int = SIZE,
    error: type[InputError] = InputError,
    hint: str = "",
) -> Any:
    """Return the value in a JSON text (UTF-8); source: its name in messages; size: bytes at most;
    hint: what to type, at the end of a message.

    Raises `error` for what is not JSON, and for NaN and infinities.
    """
    end = f"; {hint}" if hint else ""
    if len(text) > size:
        raise error(
            f"expected at most {size:,} bytes of JSON in {source}, found {len(text):,}{end}"
        )
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as reason:
        raise error(
            f"expected JSON in {source}, found something else: {short(str(reason), 160)}{end}"
        ) from None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no finite number")


def read_as(
    kind: type[T],
    value: object,
    *,
    source: str,
    error: type[InputError] = InputError,
    hint: str = "",
) -> T:
    """Return a value from a file as a frozen dataclass, whose fields are read by their annotations;
    other keys are ignored.

    source: the file's name in messages; hint: what to type, at the end of a message. Raises `error`
    at the first value that does not fit, or that a dataclass itself refuses.
    """
    end = f"; {hint}" if hint else ""
    try:
        return msgspec.convert(value, kind, dec_hook=_hook)
    except (msgspec.ValidationError, InputError) as fault:
        refused = fault if isinstance(fault, InputError) else fault.__cause__
        if isinstance(refused, InputError):  # by the dataclass itself
            raise error(f"{refused} (in {source}){end}") from fault
        words = re.sub(r"matching regex '.*'", "that can be part of a file name", str(fault))
        if "enum value" in words:
            valid = _choices(kind, words.rpartition(" - at ")[2])
            words = words.replace("Invalid enum value", f"expected {valid}, found")
        raise error(f"expected what fits {source}, found another value: {words}{end}") from None


def _hook(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")


def _choices(kind: Any, where: str) -> str:
    """Return the values that a field may have, by its place: "$.recipe.schedule"."""
    for name in re.findall(r"\.(\w+)", where):
        inner = [kind, *get_args(kind)]
        kind = next(
            (get_type_hints(each).get(name) for each in inner if dataclasses.is_dataclass(each)),
            None,
        )
    found = (
        [kind]
        if get_origin(kind) is Literal
        else [each for each in get_args(kind) if get_origin(each) is Literal]
    )
    return " or ".join(repr(value) for each in found for value in get_args(each)) or "another value"
