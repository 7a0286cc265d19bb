"""JSON of others, within bounds: size, depth, numbers, and no key twice."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from vitlens.errors import InputError

DEPTH: Final = 64  # lists and objects within each other
_INTEGERS: Final = 2**63  # whole numbers must be smaller than this, as numpy's and torch's are


@dataclass(frozen=True)
class Limit:
    """How much one JSON text may hold: size in bytes, values (of lists and objects) in all."""

    size: int = 64 << 20
    values: int = 4_000_000


LIMIT: Final = Limit()


def parse_json(
    text: str | bytes, *, source: str, limit: Limit = LIMIT, error: type[InputError] = InputError, hint: str = ""
) -> Any:
    """The value in a JSON text (UTF-8); source: its name in messages; hint: what to type, at their end.

    Raises `error` for what is no JSON, is larger than the limit or deeper than DEPTH, names a key twice, or has NaN,
    an infinity, or an integer of more than 64 bits.
    """
    told = _Told(source, error, hint)
    if len(text) > limit.size:
        told.fault(f"expected at most {limit.size:,} bytes of JSON in {source}, found {len(text):,}")
    commas = text.count(",") if isinstance(text, str) else text.count(b",")
    opened = sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for mark in "[{")
    if commas + opened > limit.values:
        told.fault(f"expected at most {limit.values:,} values in {source}, found more")
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        found = json.loads(
            plain, parse_int=_integer, parse_float=_number, parse_constant=_number, object_pairs_hook=_object
        )
        if "\\ud" in plain.lower():  # half of a surrogate pair is no character, but for a byte of a file's name
            json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")
    except RecursionError:
        told.fault(f"expected JSON of at most {DEPTH} levels in {source}, found more")
    except UnicodeError as reason:
        told.fault(f"expected JSON in UTF-8 in {source}, found {reason.reason}")  # type: ignore[attr-defined]
    except ValueError as reason:
        told.fault(f"expected JSON in {source}, found something else: {short(str(reason), 160)}")
    if _too_deep(found):
        told.fault(f"expected JSON of at most {DEPTH} levels in {source}, found more")
    return found


@dataclass(frozen=True)
class _Told:
    source: str
    error: type[InputError]
    hint: str

    def fault(self, message: str) -> NoReturn:
        raise self.error(f"{message}; {self.hint}" if self.hint else message) from None


def short(text: str, most: int = 60) -> str:
    """A text for a message: at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _integer(text: str) -> int:
    if len(text) > 20 or not -_INTEGERS < (number := int(text)) < _INTEGERS:
        raise ValueError(f"a whole number of more than 64 bits, {short(text, 30)}")
    return number


def _number(text: str) -> float:
    """A finite number; NaN and Infinity are no JSON, and 1e999 is no number that a computer has."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{short(text, 30)}, which is no finite number")
    return number


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(twice)!r} twice in one object")
    return made


def _too_deep(found: object) -> bool:
    """Whether lists and objects lie deeper within each other than DEPTH; level by level, without recursion."""
    level = [found] if isinstance(found, list | dict) else []
    for _ in range(DEPTH):
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, list | dict)
        ]
        if not level:
            return False
    return True
