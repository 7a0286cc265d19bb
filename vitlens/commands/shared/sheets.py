"""Which of many images figures draw, on how many sheets, and the note on those that they leave out."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

EACH: Final = 6  # images on a sheet, and in all those drawn of a data set
DRAWN: Final = 24  # images of --images that are drawn, unless --limit asks for fewer or more


def evenly(count: int, most: int) -> list[int]:
    """At most so many numbers below a count, evenly spaced, with the first and the last."""
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, most))})


def file_names(files: Sequence[str]) -> list[str]:
    """Images by the names of their files, with a number where these repeat."""
    names = [Path(file).name for file in files]
    return [f"{at}: {name}" if names.count(name) > 1 else name for at, name in enumerate(names)]


def left_out_words(drawn: int, total: int) -> Iterator[str]:
    """Yield a note that some images are not drawn, where that is so."""
    if drawn < total:
        yield f"Figures draw {drawn} of the {total:,} images"


def print_left_out(drawn: int, total: int, *, quiet: bool, more: str) -> None:
    """Print the same on standard error; more: how to draw more of them."""
    if not quiet:
        for words in left_out_words(drawn, total):
            print(f"{words}; {more}", file=sys.stderr)  # noqa: T201
