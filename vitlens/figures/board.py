"""Panels in rows and columns at exact sizes in inches: fast also for a hundred panels, and nothing is cut off."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlens.figures.style import HALF, TITLE, DisplayedFigure, wrapped_title

PHOTOGRAPHS: Final = 22.0  # square inches of photographs, 200 dots an inch, that a PNG of 1.5 MB holds
BAR_ROOM: Final = 0.98  # inch at the right for a colour bar with its numbers and label
_LEAST = 1.3  # inch of height, for the label of a colour bar: 20 letters


@dataclass(frozen=True)
class Margins:
    """Room in inches around the panels, for titles, labels and bars."""

    left: float = 0.06
    right: float = 0.06
    top: float = 0.05
    bottom: float = 0.06


@dataclass(frozen=True)
class Board:
    """A figure, its panels row by row, and the edges of their area, in inches from the figure's left and top."""

    figure: Figure
    panels: list[Axes]
    left: float
    top: float
    right: float
    bottom: float

    def place(self, x: float, y: float, width: float, height: float) -> Axes:
        """Further axes; x, y: inches from the figure's left and top edge."""
        return _placed(self.figure, x, y, width, height)

    def bar(self) -> Axes:
        """Axes for a colour bar in the BAR_ROOM that the right margin holds, one to three inches high."""
        tall = self.bottom - self.top
        long = min(max(tall, _LEAST), 3.0)
        x = self.figure.get_figwidth() - (BAR_ROOM - 0.14)
        return self.place(x, self.top + max(0.0, (tall - long) / 2), 0.11, long)


def board(
    *, title: str, count: int, across: int, panel: tuple[float, float], gap: tuple[float, float], margins: Margins
) -> Board:
    """A figure of count panels, `across` of them in a row, below a title wrapped to its width.

    panel, gap: (width, height) in inches. The figure is at least half a page wide.
    """
    down = -(-count // across)
    wide, tall = across * (panel[0] + gap[0]) - gap[0], down * (panel[1] + gap[1]) - gap[1]
    needed = margins.left + wide + margins.right
    width = max(HALF, needed)
    left = margins.left + (width - needed) / 2
    text, head = wrapped_title(title, width)
    top = head + margins.top
    figure: Figure = DisplayedFigure(figsize=(width, top + max(tall + margins.bottom, _LEAST + 0.1)))
    figure.suptitle(text, fontsize=TITLE, y=1 - 0.06 / figure.get_figheight(), va="top")
    places = [divmod(index, across) for index in range(count)]
    panels = [_placed(figure, left + x * (panel[0] + gap[0]), top + y * (panel[1] + gap[1]), *panel) for y, x in places]
    return Board(figure, panels, left, top, left + wide, top + tall)


def _placed(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    across, down = figure.get_size_inches()
    return figure.add_axes((x / across, 1 - (y + height) / down, width / across, height / down))


def without_frames(panels: Iterable[Axes]) -> None:
    """Remove ticks and frames from panels that show an image."""
    for axes in panels:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
