"""Parsers of typed values that Typer cannot read: lists, channels, sizes, numbers by name.

Each function takes the text that a user typed, most also the name of the option for their messages.
They are the `parse` of an option (flags.py).
"""

import math
from collections.abc import Sequence
from typing import TypeVar

from vitlens.errors import InputError, UnknownNameError

Word = TypeVar("Word", bound=str)


def one_of(option: str, text: str, allowed: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the words of a comma-separated list, each once and each allowed.

    Raises InputError for an empty list, UnknownNameError for a word that is not allowed.
    """
    words = dict.fromkeys(_parts(text))
    if not words:
        raise InputError(
            f"expected {option} with at least one of {', '.join(allowed)}, found {text!r}"
        )
    by_text = {str(word): word for word in allowed}
    for word in words:
        if word not in by_text:
            raise UnknownNameError(f"{option} value", word, allowed)
    return tuple(by_text[word] for word in words)


def names_of(option: str, text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list, each once.

    Raises InputError for an empty list.
    """
    names = tuple(dict.fromkeys(_parts(text)))
    if not names:
        raise InputError(f"expected {option} with at least one name, found {text!r}")
    return names


def numbers(option: str, text: str) -> tuple[float, float, float]:
    """Return one number for each channel of "0.5,0.4,0.4", in [0, 1]; "0.5" stands for all three.

    Raises InputError.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) == 1:
        values *= 3
    if len(values) != 3 or not all(0 <= value <= 1 for value in values):
        raise InputError(
            f"expected {option} R,G,B with three numbers from 0 to 1, found {text!r}; e.g. "
            f"{option} 0.5,0.5,0.5"
        )
    red, green, blue = values
    return red, green, blue


def two_counts(option: str, text: str) -> tuple[int, int]:
    """Return two whole numbers from 0, "3,4": a patch's row and column. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(_is_whole(part) for part in parts):
        raise InputError(
            f"expected {option} ROW,COL with two whole numbers from 0, found {text!r}; e.g. "
            f"{option} 3,4"
        )
    return int(parts[0]), int(parts[1])


def side_lengths(
    option: str, text: str, *, unit: str = "pixels", example: int = 224
) -> tuple[int, int]:
    """Return height and width, of "224" or "224x160", in pixels or another unit.

    Raises InputError.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(map(_is_positive, parts)):
        raise InputError(
            f"expected {option} N or HEIGHTxWIDTH in {unit}, found {text!r}; e.g. {option} "
            f"{example}"
        )
    height = int(parts[0])
    width = int(parts[-1])  # of one part, the height
    return height, width


def many_side_lengths(option: str, text: str) -> tuple[tuple[int, int], ...]:
    """Return heights and widths in pixels, of "224,32x48", each once. Raises InputError."""
    parts = _parts(text)
    if not parts:
        raise InputError(
            f"expected {option} with sizes in pixels, found {text!r}; e.g. {option} 16,32"
        )
    return tuple(dict.fromkeys(side_lengths(option, part) for part in parts))


def counts(option: str, text: str) -> tuple[int, ...]:
    """Return whole numbers from 1, of "1,2,4", each once, in rising order. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_positive, parts)):
        raise InputError(
            f"expected {option} with whole numbers from 1, found {text!r}; e.g. {option} 1,2,4"
        )
    return tuple(sorted(set(map(int, parts))))


def layers_of(option: str, text: str) -> tuple[int, ...]:
    """Return layers, counted from 0, of "0,4,5", each once, in rising order. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_whole, parts)):
        raise InputError(
            f"expected {option} with layers from 0, found {text!r}; e.g. {option} 0,4,5"
        )
    return tuple(sorted(set(map(int, parts))))


def latents_of(option: str, text: str) -> tuple[int, ...]:
    """Return latents, counted from 0, of "5,17,123", each once, in order. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_whole, parts)):
        raise InputError(
            f"expected {option} with latents from 0, found {text!r}; e.g. {option} 5,17,123"
        )
    return tuple(sorted(set(map(int, parts))))


def amounts(option: str, text: str) -> tuple[float, ...]:
    """Return finite numbers, of "0,0.5,1", each once, in rising order. Raises InputError."""
    try:
        values = sorted(set(map(float, _parts(text))))
    except ValueError:
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise InputError(f"expected {option} with numbers, found {text!r}; e.g. {option} 0.5,1,2")
    return tuple(values)


def count_or_counts(option: str, text: str | None) -> int | dict[str, int] | None:
    """Return a whole number, of "20", or one for each name of "pgd=20,cw=50"; None for None.

    Raises InputError.
    """
    if text is None:
        return None
    if _is_whole(text.strip()):
        return int(text)
    counts_by_name = {}
    for name, value in _pairs(text):
        if not name or not _is_whole(value):
            raise InputError(
                f"expected {option} N or NAME=N,NAME=N with whole numbers, found {text!r}; e.g. "
                f"{option} pgd=20,cw=50"
            )
        counts_by_name[name] = int(value)
    return counts_by_name


def named_amounts(option: str, text: str) -> dict[str, float]:
    """Return a number for each name of "pgd=8,bim=0.5". Raises InputError."""
    numbers_by_name = {}
    for name, value in _pairs(text):
        if not name or not value:
            raise InputError(
                f"expected {option} NAME=NUMBER,NAME=NUMBER, found {text!r}; e.g. {option} "
                "low-frequency=8"
            )
        numbers_by_name[name] = amounts(option, value)[0]
    return numbers_by_name


def recipe_settings(texts: Sequence[str]) -> dict[str, object]:
    """Return the settings of --set NAME=VALUE, with values read as words, numbers or lists.

    texts: each NAME=VALUE or NAME=VALUE,VALUE. Raises InputError.
    """
    settings: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise InputError(f"expected --set NAME=VALUE, found {text!r}; e.g. --set mixup=0.8")
        values = [_read(part.strip()) for part in value.split(",")]
        field = name.strip().replace("-", "_")
        settings[field] = values[0] if len(values) == 1 else tuple(values)
    return settings


def _parts(text: str) -> list[str]:
    """Return the parts of a comma-separated list that are not empty."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return the names and values of "NAME=VALUE,NAME=VALUE"; "" for what is missing."""
    pairs = []
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        pairs.append((name, value))
    return pairs


def _is_whole(text: str) -> bool:
    """Return True if a text is a whole number from 0 that fits 64 bits."""
    return text.isdecimal() and len(text) < 19  # 2**63 has 19 digits


def _is_positive(text: str) -> bool:
    return _is_whole(text) and int(text) > 0


def _read(text: str) -> object:
    """Return the number or truth value that a text says, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text
