"""What a figure can write: no formula of a name's `$`, no character that its fonts lack."""

from collections.abc import Iterator
from functools import cache
from typing import Final

from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from vitlens.display import escape, visible

_OWN: Final = "DejaVu Sans"  # ships with matplotlib
_OTHERS: Final = (  # for what it lacks, where they are installed
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "WenQuanYi Zen Hei", "Hiragino Sans",
    "Apple SD Gothic Neo", "Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS", "Noto Sans Devanagari",
    "Noto Sans Thai", "Noto Sans Symbols2", "Segoe UI Symbol",
)  # fmt: skip
_INSTALLED: Final = frozenset(font.name for font in font_manager.fontManager.ttflist)
FAMILIES: Final = (_OWN, *(name for name in _OTHERS if name in _INSTALLED))


def drawable(text: str) -> str:
    """A text of which every character has a glyph: one without, or that is not seen, is written as its escape."""
    lines = (visible(line) for line in text.split("\n"))
    return "\n".join("".join(one if _has_glyph(one) else escape(one) for one in line) for line in lines)


def letter(figure: Figure) -> None:
    """Make every text of a figure drawable and literal; numbers at the ticks stay as matplotlib writes them."""
    for text in _texts(figure):
        text.set_parse_math(False)
        if (shown := drawable(text.get_text())) != text.get_text():
            text.set_text(shown)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axes.get_visible() and isinstance(axis.get_major_locator(), FixedLocator):
                _letter_ticks(axis)


def _texts(artist: Artist) -> Iterator[Text]:
    """The texts of an artist and all in it, without those of ticks, which are made when the figure is drawn."""
    if isinstance(artist, Text):
        yield artist
    for child in (artist.label,) if isinstance(artist, Axis) else artist.get_children():
        yield from _texts(child)


def _letter_ticks(axis: Axis) -> None:
    """Names at ticks. Their labels are written anew when the figure is drawn, so a `$` has to be marked as literal."""
    if isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
        names = [label.get_text() for label in axis.get_majorticklabels()]
        shown = [drawable(name).replace("$", r"\$") for name in names]
        if shown != names:
            axis.set_ticklabels(shown)


@cache
def _has_glyph(character: str) -> bool:
    return character.isascii() or any(font.get_char_index(ord(character)) for font in _fonts())


@cache
def _fonts() -> tuple[FT2Font, ...]:
    return tuple(FT2Font(font_manager.findfont(FontProperties(family=name))) for name in FAMILIES)
