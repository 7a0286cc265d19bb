"""Text of the smallest size that is cut to fit a width."""

from functools import cache
from typing import Final

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from vitlens.charts import style

SMALLEST: Final = 7.0  # points
_POINTS: Final = 72  # of an inch


def fit(text: str, wide: float, *, lines: int) -> list[str]:
    """Break a text into at most `lines` lines of this width in inches.

    The last one is shortened.
    """
    broken = [""]
    for word in style.drawable(text).split():
        longer = f"{broken[-1]} {word}".strip()
        if not broken[-1] or text_width(longer) <= wide:
            broken[-1] = longer
        else:
            broken.append(word)
    if len(broken) > lines:  # the last line takes all words that are left
        broken[lines - 1 :] = [" ".join(broken[lines - 1 :])]
    return [_shorten(line, wide) for line in broken]


def _shorten(line: str, wide: float) -> str:
    """Return a line cut to a width in inches, ending in an ellipsis."""
    if not line:
        return line
    length = len(line)
    while length > 1 and text_width(style.shorten(line, length)) > wide:
        length -= 1
    return style.shorten(line, length)


def text_width(text: str) -> float:
    """Return the width of the smallest text, inch."""
    return sum(map(_letter_width, text))


@cache
def _letter_width(letter: str) -> float:
    """Return the width of a letter of the smallest text, inch, with the space around it."""
    font = FontProperties(family=list(style.FAMILIES), size=SMALLEST)
    with_letter = TextPath((0, 0), f"|{letter}|", prop=font).get_extents().width
    without_letter = TextPath((0, 0), "||", prop=font).get_extents().width
    return float(with_letter - without_letter) / _POINTS
