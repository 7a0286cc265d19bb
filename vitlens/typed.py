"""Reads JSON as dataclasses, checked against their annotations by msgspec.

Files are untrusted: pickles are refused, and the size is bounded. A message has one line, with the
expected value and its place.
"""

import dataclasses
import json
import math
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

SIZE: Final = 64 << 20  # most bytes of a JSON text
_BYTES: Final = 200  # most bytes of a name in a path: file systems accept 255, with suffixes

T = TypeVar("T")


def between(low: float, high: float) -> msgspec.Meta:
    """Return the annotation of a number from low to high, both included."""
    return msgspec.Meta(ge=low, le=high)


def length(low: int, high: int) -> msgspec.Meta:
    """Return the annotation of a text, list or object with a length from low to high, included."""
    return msgspec.Meta(min_length=low, max_length=high)


Name: TypeAlias = Annotated[  # one that may be part of a path, see is_name
    str, msgspec.Meta(pattern=r"^[^.~/\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*\Z", max_length=_BYTES)
]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


def is_name(text: str) -> bool:
    """Return True if a text can be a name in a path.

    It is not empty or hidden, and has only printable characters without separators.
    """
    if not text or text[0] in ".~" or any(separator in text for separator in "/\\"):
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
    """Return the value in a JSON text (UTF-8).

    source: its name in messages.
    size: largest number of bytes.
    hint: what to type, at the end of a message.

    Raises `error` for anything but JSON, and for NaN and infinities.
    """
    end = f"; {hint}" if hint else ""
    if len(text) > size:
        raise error(
            f"expected at most {size:,} bytes of JSON in {source}, found {len(text):,}{end}"
        )
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise error(
            f"expected JSON in {source}, found JSON that is nested too deeply{end}"
        ) from None
    except ValueError as reason:
        raise error(
            f"expected JSON in {source}, found something else: {short(str(reason), 160)}{end}"
        ) from None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{short(text)}, which is no finite number")


def _finite(text: str) -> float:
    """Return a number of a JSON text. Raises ValueError for one beyond all floats (1e999)."""
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number


def read_as(
    kind: type[T],
    value: object,
    *,
    source: str,
    error: type[InputError] = InputError,
    hint: str = "",
) -> T:
    """Return a value from a file as a frozen dataclass; keys without a field are ignored.

    source: the file's name in messages.
    hint: what to type, at the end of a message.

    Raises `error` at the first value that does not fit its annotation, or that a dataclass itself
    refuses.
    """
    end = f"; {hint}" if hint else ""
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_path)
    except (msgspec.ValidationError, InputError) as fault:
        # a dataclass may refuse a value itself: its InputError arrives here, or is the cause of
        # msgspec's error
        refusal = fault if isinstance(fault, InputError) else fault.__cause__
        if isinstance(refusal, InputError):
            raise error(f"{refusal} (in {source}){end}") from fault
        message = re.sub(r"matching regex '.*'", "that can be part of a file name", str(fault))
        if "enum value" in message:
            _, _, place = message.rpartition(" - at ")
            valid = _choices(kind, place)
            message = message.replace("Invalid enum value", f"expected {valid}, found")
        raise error(f"expected valid values in {source}, found another: {message}{end}") from None


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")


def _field_annotation(annotation: Any, name: str) -> Any:
    """Return the annotation of a field of a dataclass, or None if there is none.

    The dataclass is the annotation, or is in it: "tuple[Recipe, ...]" or "Recipe | None".
    """
    for member in (annotation, *get_args(annotation)):
        if dataclasses.is_dataclass(member):
            return get_type_hints(member).get(name)
    return None


def _choices(kind: Any, place: str) -> str:
    """Return the values that a field may have, by its place: "$.recipe.schedule".

    kind: the type of the whole value, "$".
    """
    # "$.recipe.schedule": from Run to Recipe | None to Literal["cosine", "none"]
    annotation = kind
    for name in re.findall(r"\.(\w+)", place):
        annotation = _field_annotation(annotation, name)
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        members = (annotation,)
    values: list[str] = []
    for member in members:
        if get_origin(member) is Literal:
            values += map(repr, get_args(member))
    return " or ".join(values) or "another value"
