"""Untrusted JSON, within bounds: size, depth, numbers, and no duplicate keys."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from vitlens.errors import InputError

DEPTH: Final = 64  # nested lists and objects
_INTEGERS: Final = 2**63  # bound of whole numbers, as in numpy and torch


@dataclass(frozen=True)
class Limit:
    """Limits of one JSON text: size in bytes, number of values (in lists and objects)."""

    size: int = 64 << 20
    values: int = 4_000_000


LIMIT: Final = Limit()


def parse_json(
    text: str | bytes, *, source: str, limit: Limit = LIMIT, error: type[InputError] = InputError, hint: str = ""
) -> Any:
    """The value in a JSON text (UTF-8); source: its name in messages; hint: what to type, at their end.

    Raises `error` for text that is not JSON, is larger than the limit or deeper than DEPTH, or has a duplicate key,
    NaN, an infinity, or an integer of more than 64 bits.
    """
    faults = _Faults(source, error, hint)
    if len(text) > limit.size:
        faults.refuse(f"expected at most {limit.size:,} bytes of JSON in {source}, found {len(text):,}")
    commas = text.count(",") if isinstance(text, str) else text.count(b",")
    opened = sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for mark in "[{")
    if commas + opened > limit.values:
        faults.refuse(f"expected at most {limit.values:,} values in {source}, found more")
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(
            plain, parse_int=_integer, parse_float=_number, parse_constant=_number, object_pairs_hook=_object
        )
        if "\\ud" in plain.lower():  # lone surrogates are refused, except for the bytes of file names
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except RecursionError:
        faults.refuse(f"expected JSON of at most {DEPTH} levels in {source}, found more")
    except UnicodeError as reason:
        faults.refuse(f"expected JSON in UTF-8 in {source}, found {reason.reason}")  # type: ignore[attr-defined]
    except ValueError as reason:
        faults.refuse(f"expected JSON in {source}, found something else: {short(str(reason), 160)}")
    if _too_deep(value):
        faults.refuse(f"expected JSON of at most {DEPTH} levels in {source}, found more")
    return value


@dataclass(frozen=True)
class _Faults:
    """Raises the errors of one text."""

    source: str
    error: type[InputError]
    hint: str

    def refuse(self, message: str) -> NoReturn:
        raise self.error(f"{message}; {self.hint}" if self.hint else message) from None


def short(text: str, most: int = 60) -> str:
    """A text shortened for a message."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _integer(text: str) -> int:
    if len(text) > 20 or not -_INTEGERS < (number := int(text)) < _INTEGERS:
        raise ValueError(f"a whole number of more than 64 bits, {short(text, 30)}")
    return number


def _number(text: str) -> float:
    """A finite number; NaN and Infinity are not JSON, and 1e999 overflows."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{short(text, 30)}, which is no finite number")
    return number


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(twice)!r} twice in one object")
    return members


def _too_deep(value: object) -> bool:
    """Whether lists and objects are nested deeper than DEPTH; level by level, without recursion."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, list | dict)
        ]
        if not level:
            return False
    return True
