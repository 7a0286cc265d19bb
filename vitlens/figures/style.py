"""The one style of every figure: font, sizes, colours, and the context that applies them.

Figures are made with matplotlib's object interface, never pyplot, so none has to be closed. Widths are for paper: a
page is WIDE, half of it is HALF.
"""

import textwrap
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Final, ParamSpec

import matplotlib.style
from matplotlib.figure import Figure

from vitlens.figures.lettering import FAMILIES, drawable, letter

WIDE: Final = 7.2  # inch
HALF: Final = 3.5  # inch
TALL: Final = 9.6  # inch, the most that leaves room for a caption

MAGNITUDE: Final = "viridis"  # nothing to much
SIGNED: Final = "RdBu_r"  # centred at 0
COUNTS: Final = "Blues"  # white paper to much ink, for tables in colour

# Okabe and Ito's colours, told apart with any common colour vision.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#666666"
SERIES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
RIGHT, WRONG = BLUE, VERMILLION
RIGHT_SYMBOL, WRONG_SYMBOL = "✓", "✗"

TITLE, LABEL, SMALL = 9.5, 8.5, 7.5  # points

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

_P = ParamSpec("_P")
_LOCK = RLock()  # matplotlib's settings are one per process


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Make a figure function run in STYLE, whatever the user's own settings, and leave those as they were."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with _LOCK, matplotlib.style.context(STYLE, after_reset=True):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:  # ticks are made when the figure is saved, after this context
                axes.tick_params(labelsize=SMALL, width=0.6, length=2.5, pad=2)
            letter(figure)
            return figure

    return drawn


def sheet(width: float, height: float) -> Figure:
    """An empty figure for charts, of that size in inches, laid out so that nothing overlaps."""
    return Figure(figsize=(width, height), layout="constrained")


def broken(title: str, width: float) -> tuple[str, float]:
    """A title in lines that fit a figure's width in inches, and the height in inches that they need."""
    lines = textwrap.wrap(drawable(title), max(20, int(width * 13)))
    return "\n".join(lines), 0.1 + 0.17 * len(lines)


def heading(figure: Figure, title: str) -> None:
    """The title of a chart; the figure grows by its height, so that panels keep theirs."""
    text, height = broken(title, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + height)
    figure.suptitle(text, fontsize=TITLE)


def shortened(name: str, length: int = 18) -> str:
    """A name cut to at most that many characters, the cut shown."""
    name = drawable(name)
    return name if len(name) <= length else name[: length - 1].rstrip() + "…"
