"""Values that are more than one word: comma-separated lists, three channels, height by width."""

import math
from typing import TypeVar

from vitlens.errors import InputError, UnknownNameError

Word = TypeVar("Word", bound=str)


def one_of(option: str, text: str, known: tuple[Word, ...]) -> tuple[Word, ...]:
    """The words of a comma-separated list, each once and each known.

    Raises InputError for an empty list, UnknownNameError for a word that is not in known.
    """
    words = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise InputError(f"expected {option} with at least one of {', '.join(known)}, found {text!r}")
    found = {str(word): word for word in known}
    for word in words:
        if word not in found:
            raise UnknownNameError(f"{option} value", word, known)
    return tuple(found[word] for word in words)


def numbers(option: str, text: str) -> tuple[float, float, float]:
    """Three channels "R,G,B" in [0, 1]; one number stands for all three. Raises InputError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) == 1:
        values *= 3
    if len(values) != 3 or not all(math.isfinite(value) and 0 <= value <= 1 for value in values):
        raise InputError(
            f"expected {option} R,G,B with three numbers from 0 to 1, found {text!r}; e.g. {option} 0.5,0.5,0.5"
        )
    red, green, blue = values
    return red, green, blue


def two_counts(option: str, text: str, metavar: str) -> tuple[int, int]:
    """Two whole numbers from 0, "3,4": a patch's row and column, or a layer and its head. Raises InputError.

    metavar: what the two are called in the option's help ("ROW,COL").
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise InputError(
            f"expected {option} {metavar} with two whole numbers from 0, found {text!r}; e.g. {option} 3,4"
        )
    return int(parts[0]), int(parts[1])


def side_lengths(option: str, text: str) -> tuple[int, int]:
    """Pixels (height, width) of "224" or "224x160". Raises InputError."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"expected {option} N or HEIGHTxWIDTH in pixels, found {text!r}; e.g. {option} 224")
    return int(parts[0]), int(parts[-1])
