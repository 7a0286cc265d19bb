"""Which images figures draw, and notes about images that they leave out."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

EACH: Final = 6  # images on a sheet; of a data set, one sheet is drawn
DRAWN: Final = 24  # images of --images that are drawn, unless --limit asks for fewer or more


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` indices below a count, evenly spaced, with the first and the last."""
    positions = np.linspace(0, count - 1, min(count, most))
    return sorted({round(position) for position in positions})


def file_names(files: Sequence[str]) -> list[str]:
    """Return the names of files, with a number before names that occur more than once."""
    names = [Path(file).name for file in files]
    counts = Counter(names)
    unique = []
    for index, name in enumerate(names):
        unique.append(f"{index}: {name}" if counts[name] > 1 else name)
    return unique


def left_out_words(drawn: int, total: int) -> Iterator[str]:
    """Yield a note about images left out of the figures; nothing if all are drawn."""
    if drawn < total:
        yield f"Figures draw {drawn} of the {total:,} images"


def unmeasured_words(measured: int, total: int) -> Iterator[str]:
    """Yield a note about images that are not measured at all; nothing if all are."""
    if measured < total:
        are = "is" if measured == 1 else "are"
        yield f"Only {measured} of the {total:,} images {are} measured"


def print_left_out(words: Iterable[str], *, quiet: bool, more: str) -> None:
    """Print the notes about images left out on standard error.

    words: the notes, as of `left_out_words` or `unmeasured_words`.
    more: what a user does to get more of them, in words.
    """
    if quiet:
        return
    for note in words:
        print(f"{note}; {more}", file=sys.stderr)  # noqa: T201
