"""Panels in rows and columns at exact sizes in inches.

They are placed without matplotlib's layout engines, so a hundred panels are fast, too. Margins and
gaps have room for all texts, so nothing is cut off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from vitlens.charts.style import HALF, TITLE, DisplayedFigure, full_width, wrapped_title

BAR_ROOM: Final = 0.98  # inch at the right for a colour bar with its numbers and label
# inch of a figure's height, and of its colour bar, at least: the bar's label has 20 letters
_LEAST: Final = 1.3
_MOST_BAR: Final = 3.0  # inch of the height of a colour bar
_ROW_ROOM: Final = 0.16  # inch between the numbers of two rows
_COLUMN_ROOM: Final = 0.2  # inch between the numbers of two columns


@dataclass(frozen=True)
class Margins:
    """Room in inches around the panels, for titles, labels and bars."""

    left: float = 0.06
    right: float = 0.06
    top: float = 0.05
    bottom: float = 0.06


@dataclass(frozen=True)
class Board:
    """A figure with an area for panels.

    panels: the panels, row by row.
    left, right: the edges of the area, inches from the figure's left edge.
    top, bottom: the edges of the area, inches from the figure's top.
    """

    figure: Figure
    panels: list[Axes]
    left: float
    top: float
    right: float
    bottom: float

    def place(self, x: float, y: float, width: float, height: float) -> Axes:
        """Add axes of this size; x, y: inches from the figure's left and top edge."""
        across, down = self.figure.get_size_inches()
        return self.figure.add_axes(
            (x / across, 1 - (y + height) / down, width / across, height / down)
        )

    def bar(self) -> Axes:
        """Add axes for a colour bar in the right margin, which must be BAR_ROOM wide."""
        tall = self.bottom - self.top
        bar_height = min(max(tall, _LEAST), _MOST_BAR)
        x = self.figure.get_figwidth() - (BAR_ROOM - 0.14)
        y = self.top + max(0.0, (tall - bar_height) / 2)  # centred, if there is room
        return self.place(x, y, width=0.11, height=bar_height)


def area(*, title: str, wide: float, tall: float, margins: Margins) -> Board:
    """Return a figure with a title and an area of this size in inches, without panels.

    It is at least half a page wide.
    """
    needed = margins.left + wide + margins.right
    width = max(min(HALF, full_width()), needed)
    left = margins.left + (width - needed) / 2
    text, title_height = wrapped_title(title, width)
    top = title_height + margins.top
    height = top + max(tall + margins.bottom, _LEAST + 0.1)
    figure: Figure = DisplayedFigure(figsize=(width, height))
    figure.suptitle(text, fontsize=TITLE, y=1 - 0.06 / height, va="top")
    return Board(figure, [], left=left, top=top, right=left + wide, bottom=top + tall)


def board(
    *,
    title: str,
    count: int,
    across: int,
    panel: tuple[float, float],
    gap: tuple[float, float],
    margins: Margins,
) -> Board:
    """Return a figure of panels in rows.

    count: the number of panels.
    across: the number of panels in a row.
    panel: the (width, height) of a panel, inch.
    gap: the (width, height) between two panels, inch.
    """
    width, height = panel
    gap_right, gap_down = gap
    rows = ceil(count / across)
    drawn = area(
        title=title,
        wide=across * (width + gap_right) - gap_right,
        tall=rows * (height + gap_down) - gap_down,
        margins=margins,
    )
    for index in range(count):
        row, column = divmod(index, across)
        x = drawn.left + column * (width + gap_right)
        y = drawn.top + row * (height + gap_down)
        drawn.panels.append(drawn.place(x, y, width, height))
    return drawn


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
    """Label layers (down) and heads (across) from 0, as many as there is room for.

    shape: (layers, heads).
    """
    wide, tall = size_of(axes)
    layers = shape[0]
    heads = shape[1]
    _number(axes.yaxis, layers, most=int(tall / _ROW_ROOM))
    _number(axes.xaxis, heads, most=int(wide / _COLUMN_ROOM))
    axes.set(xlabel="head", ylabel="layer")


def _number(axis: Axis, count: int, *, most: int) -> None:
    """Write numbers from 0 along an axis of `count` rows or columns, at most `most` of them."""
    step = ceil(count / max(1, most))
    places = range(0, count, step)
    axis.set_ticks(places, labels=[str(place) for place in places])
