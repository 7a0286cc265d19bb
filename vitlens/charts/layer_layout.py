"""Rows and columns of the picture of a transformer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from matplotlib.lines import Line2D

from vitlens.charts import style
from vitlens.charts.fitted_text import SMALLEST
from vitlens.charts.layer_views import LayerView
from vitlens.charts.panels import Board

GAP: Final = 0.04  # inch between two thumbnails


@dataclass(frozen=True)
class Layout:
    """The rows of one block of a figure.

    board: the figure.
    rows: the layers, one per row.
    top: the y of the first row, inch.
    height: the height of each row, inch.
    """

    board: Board
    rows: Sequence[LayerView]
    top: float
    height: float

    @property
    def side(self) -> float:
        """Return the side of a picture in a row."""
        return self.height - 2 * GAP

    def middle(self, index: int) -> float:
        """Return the middle of a row."""
        return self.top + (index + 0.5) * self.height

    def write(self, x: float, y: float, words: str, **more: Any) -> None:
        """Write a text at a place in inches from the left and the top."""
        wide, tall = self.board.figure.get_size_inches()
        self.board.figure.text(
            x / wide, 1 - y / tall, words, **{"fontsize": SMALLEST, "va": "center", **more}
        )

    def rule(self, y: float, left: float, right: float, *, dark: bool) -> None:
        """Draw a horizontal line between two rows."""
        wide, tall = self.board.figure.get_size_inches()
        colour = style.GREY if dark else "#DDDDDD"
        across = (left / wide, right / wide)
        height = 1 - y / tall
        self.board.figure.add_artist(
            Line2D(across, (height, height), color=colour, linewidth=0.6, zorder=0)
        )


Draw: TypeAlias = Callable[[Layout, float, float], None]  # layout, left edge and width, inch


@dataclass(frozen=True)
class Column:
    """A column of a block.

    wide: its least width, inch.
    draw: draws its cells in all rows.
    grows: True if it also takes the room that is left.
    """

    title: str
    wide: float
    draw: Draw
    grows: bool = False
