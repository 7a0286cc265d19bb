"""The style of every figure: fonts, sizes, colours, and the decorator that applies them.

Figures are made with matplotlib's object interface, never pyplot, so none has to be closed. They
are as wide as a page, or within `of_width` as a column of a paper, in which panels lie below one
another. Texts are drawn literally: no formulas from a `$` in a name, no character without a glyph.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from io import BytesIO
from threading import RLock
from typing import Any, Final, ParamSpec

import matplotlib.style
from matplotlib import font_manager, rc_context
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from vitlens.display import escape, unprotected, visible
from vitlens.errors import UnknownNameError
from vitlens.names import FigureWidth

WIDTHS: Final[Mapping[FigureWidth, float]] = {"page": 7.2, "column": 3.3}  # inch
HALF: Final = 3.5  # inch
TALL: Final = 9.6  # inch, the most that leaves room for a caption

MAGNITUDE: Final = "viridis"  # from the least value to the greatest
SIGNED: Final = "RdBu_r"  # centred at 0
COUNTS: Final = "Blues"  # from white at 0, for matrices of counts and shares

# Okabe and Ito's colours, which can be distinguished with colour vision deficiencies.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#666666"
SERIES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
RIGHT = BLUE
WRONG = VERMILLION
RIGHT_SYMBOL = "✓"
WRONG_SYMBOL = "✗"

# points
TITLE = 9.5
LABEL = 8.5
SMALL = 7.5

_DEFAULT_FONT: Final = "DejaVu Sans"  # ships with matplotlib
_MORE_FONTS: Final = (  # for characters that it lacks, where installed
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Noto Sans SC",
    "WenQuanYi Zen Hei",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Sans Symbols2",
    "Segoe UI Symbol",
)
_INSTALLED: Final = frozenset(font.name for font in font_manager.fontManager.ttflist)
FAMILIES: Final = (_DEFAULT_FONT, *(name for name in _MORE_FONTS if name in _INSTALLED))

STYLE: Final = {
    "font.family": list(FAMILIES),
    "font.size": LABEL,
    "figure.titlesize": TITLE,
    "figure.dpi": 100,
    "axes.titlesize": LABEL,
    "axes.labelsize": LABEL,
    "axes.titlepad": 4.0,
    "axes.labelpad": 3.0,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": "#D9D9D9",
    "lines.linewidth": 1.5,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.04,
}

# Publishers refuse fonts of type 3, matplotlib's default. Text in an svg can then be searched.
EMBEDDED: Final[dict[Any, Any]] = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}

_P = ParamSpec("_P")
_LOCK = RLock()  # matplotlib's settings are one per process
_width: ContextVar[FigureWidth] = ContextVar("width", default="page")


@contextmanager
def of_width(width: FigureWidth) -> Iterator[None]:
    """Make figures as wide as a page or a column inside the block.

    Raises UnknownNameError for another word.
    """
    if width not in WIDTHS:
        raise UnknownNameError("width of figures", width, WIDTHS)
    before = _width.set(width)
    try:
        yield
    finally:
        _width.reset(before)


def full_width() -> float:
    """Return the width of a figure, inch."""
    return WIDTHS[_width.get()]


def in_column() -> bool:
    """Return True if figures are as wide as a column."""
    return _width.get() == "column"


def abreast(panels: int) -> int:
    """Return how many panels lie in a row if a page has `panels` in a row: half in a column."""
    if in_column():
        return max(1, panels // 2)
    return panels


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Make a figure function run in STYLE, whatever the user's own settings, which are restored."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with _LOCK, matplotlib.style.context(STYLE, after_reset=True):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:  # ticks are made when the figure is saved, after this context
                axes.tick_params(labelsize=SMALL, width=0.6, length=2.5, pad=2)
            make_drawable(figure)
            return figure

    return drawn


class DisplayedFigure(Figure):
    """A figure that a notebook displays by itself.

    IPython knows how to draw matplotlib's own Figure only once pyplot is imported, which vitlens
    never does.
    """

    def _repr_png_(self) -> bytes:
        drawn = BytesIO()
        self.savefig(drawn, format="png", metadata={"Software": None})
        return drawn.getvalue()

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Save as matplotlib does, with fonts embedded as TrueType, and text as text in an svg."""
        with rc_context(EMBEDDED):
            super().savefig(*args, **kwargs)


def sheet(width: float, height: float) -> Figure:
    """Return an empty figure for charts, of this size in inches, with constrained layout."""
    return DisplayedFigure(figsize=(width, height), layout="constrained")


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from low to high, at least two and at most `most`.

    They are multiples of a step of 1, 2 or 5 times a power of ten. Steps are tried from fine to
    coarse. The first is taken that has at most `most` ticks: one at each end and one between. If
    there is none, it is the finest with at most `most` ticks. [low] is returned if both ends are
    equal.

    most: five or more.
    """
    if not high > low:
        return [low]
    tolerance = 1e-6 * (high - low)  # of rounding errors
    finest: list[float] = []
    for step in _round_steps((high - low) / most):
        first = math.ceil((low - tolerance) / step)
        last = math.floor((high + tolerance) / step)
        too_many = last - first + 1 > most
        if too_many:
            continue
        ticks = [float(f"{count * step:.12g}") for count in range(first, last + 1)]
        largest_gap = max(first * step - low, high - last * step)  # between an end and its tick
        has_both_ends = largest_gap < 2 * tolerance
        if has_both_ends and len(ticks) > 2:
            return ticks
        if not finest:
            finest = ticks
    return finest


def _round_steps(least: float) -> Iterator[float]:
    """Yield 1, 2 and 5 times the power of ten at or below a number, and times the next power."""
    power = math.floor(math.log10(least))
    for exponent in (power, power + 1):
        for factor in (1, 2, 5):
            yield factor * 10.0**exponent


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Return the numbers at round ticks, all with as many decimals as the one that needs most."""
    words = [f"{tick:.12g}" for tick in ticks]
    if any("e" in word for word in words):
        return words
    decimals = max(len(word.partition(".")[2]) for word in words)
    return ["0" if tick == 0 else f"{tick:.{decimals}f}" for tick in ticks]


def wrapped_title(title: str, width: float) -> tuple[str, float]:
    """Return a title wrapped to a figure's width in inches, and the height of its lines, inch."""
    lines = textwrap.wrap(drawable(title), max(20, int(width * 13)))
    return "\n".join(lines), 0.1 + 0.17 * len(lines)


def heading(figure: Figure, title: str) -> None:
    """Add a title; the figure grows by its height, so that panels keep theirs."""
    text, height = wrapped_title(title, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + height)
    figure.suptitle(text, fontsize=TITLE)


def shorten(name: str, length: int = 18) -> str:
    """Return a name truncated to at most that many characters, ending in an ellipsis."""
    name = drawable(name)
    if len(name) <= length:
        return name
    return name[: length - 1].rstrip() + "…"


def drawable(text: str) -> str:
    """Return a text with escapes in place of invisible characters and of those without a glyph.

    Escapes of asterisks and backticks, which only markdown needs, are removed.
    """
    lines = [_drawable_line(visible(line)) for line in unprotected(text).split("\n")]
    return "\n".join(lines)


def _drawable_line(line: str) -> str:
    characters = [character if _has_glyph(character) else escape(character) for character in line]
    return "".join(characters)


def make_drawable(figure: Figure) -> None:
    """Make every text of a figure drawable and literal.

    Numbers at ticks stay as matplotlib formats them.
    """
    for text in _texts(figure):
        text.set_parse_math(False)
        words = drawable(text.get_text())
        if words != text.get_text():
            text.set_text(words)
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), FixedLocator):
                _make_ticks_drawable(axis)


def _texts(artist: Artist) -> Iterator[Text]:
    """Yield the texts of an artist and of its children.

    Those of ticks are left out, because a figure makes them when it is drawn.
    """
    if isinstance(artist, Axis):
        yield artist.label
        return
    if isinstance(artist, Text):
        yield artist
    for child in artist.get_children():
        yield from _texts(child)


def _make_ticks_drawable(axis: Axis) -> None:
    """Make names at ticks drawable.

    Their labels are set again when the figure is drawn, so each `$` is escaped.
    """
    if isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
        names = [label.get_text() for label in axis.get_majorticklabels()]
        drawable_names = [drawable(name).replace("$", r"\$") for name in names]
        if drawable_names != names:
            axis.set_ticklabels(drawable_names)


@cache
def _has_glyph(character: str) -> bool:
    return character.isascii() or any(font.get_char_index(ord(character)) for font in _fonts())


@cache
def _fonts() -> tuple[FT2Font, ...]:
    return tuple(FT2Font(font_manager.findfont(FontProperties(family=name))) for name in FAMILIES)
