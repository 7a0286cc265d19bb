"""Panels in rows and columns at exact sizes in inches: fast also for a hundred panels, and nothing
is cut off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from vitlens.charts.style import HALF, TITLE, DisplayedFigure, full_width, wrapped_title

BAR_ROOM: Final = 0.98  # inch at the right for a colour bar with its numbers and label
_LEAST: Final = 1.3  # inch of height, for the label of a colour bar: 20 letters


@dataclass(frozen=True)
class Margins:
    """Room in inches around the panels, for titles, labels and bars."""

    left: float = 0.06
    right: float = 0.06
    top: float = 0.05
    bottom: float = 0.06


@dataclass(frozen=True)
class Board:
    """A figure, its panels row by row, and the edges of their area, in inches from the figure's
    left and top.
    """

    figure: Figure
    panels: list[Axes]
    left: float
    top: float
    right: float
    bottom: float

    def place(self, x: float, y: float, width: float, height: float) -> Axes:
        """Add axes; x, y: inches from the figure's left and top edge."""
        across, down = self.figure.get_size_inches()
        return self.figure.add_axes(
            (x / across, 1 - (y + height) / down, width / across, height / down)
        )

    def bar(self) -> Axes:
        """Add axes for a colour bar in the right margin, which has BAR_ROOM, one to three inches
        high.
        """
        tall = self.bottom - self.top
        long = min(max(tall, _LEAST), 3.0)
        x = self.figure.get_figwidth() - (BAR_ROOM - 0.14)
        return self.place(x, self.top + max(0.0, (tall - long) / 2), 0.11, long)


def area(*, title: str, wide: float, tall: float, margins: Margins) -> Board:
    """Return a figure, at least half a page wide, with a title and an area of this size in inches
    without panels.
    """
    needed = margins.left + wide + margins.right
    width = max(min(HALF, full_width()), needed)
    left = margins.left + (width - needed) / 2
    text, head = wrapped_title(title, width)
    top = head + margins.top
    figure: Figure = DisplayedFigure(
        figsize=(width, top + max(tall + margins.bottom, _LEAST + 0.1))
    )
    figure.suptitle(text, fontsize=TITLE, y=1 - 0.06 / figure.get_figheight(), va="top")
    return Board(figure, [], left, top, left + wide, top + tall)


def board(
    *,
    title: str,
    count: int,
    across: int,
    panel: tuple[float, float],
    gap: tuple[float, float],
    margins: Margins,
) -> Board:
    """Return a figure of count panels, `across` of them in a row; panel, gap: (width, height) in
    inches.
    """
    step_right = panel[0] + gap[0]
    step_down = panel[1] + gap[1]
    rows = -(-count // across)
    figure = area(
        title=title,
        wide=across * step_right - gap[0],
        tall=rows * step_down - gap[1],
        margins=margins,
    )
    for index in range(count):
        row, column = divmod(index, across)
        axes = figure.place(figure.left + column * step_right, figure.top + row * step_down, *panel)
        figure.panels.append(axes)
    return figure


def without_frames(panels: Iterable[Axes]) -> None:
    """Remove ticks and frames from panels that show an image."""
    for axes in panels:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)


def size_of(axes: Axes) -> tuple[float, float]:
    """Return the width and height of axes in inches."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    wide, tall = np.asarray(axes.get_position().size * figure.get_size_inches()).tolist()
    return wide, tall


def name_heads(axes: Axes, shape: tuple[int, ...]) -> None:
    """Label layers (down) and heads (across) from 0, as many as there is room for."""
    wide, tall = size_of(axes)
    _number(axes.yaxis, shape[0], tall / 0.16)
    _number(axes.xaxis, shape[1], wide / 0.2)
    axes.set(xlabel="head", ylabel="layer")


def _number(axis: Axis, count: int, room: float) -> None:
    places = range(0, count, -(-count // max(1, int(room))))
    axis.set_ticks(places, labels=[str(place) for place in places])
