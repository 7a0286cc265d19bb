"""One picture of a transformer: a row for each layer, a column for each kind of measurement."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import style
from vitlens.charts.layer_columns import layer_columns
from vitlens.charts.layer_layout import GAP, Column, Layout
from vitlens.charts.layer_views import LayerView
from vitlens.charts.overlay import Array, enlarged
from vitlens.charts.panels import Margins, area, without_frames

_TALL: Final = 4.4  # inch of all rows, which with titles and axes makes half a page
_LEAST_ROW: Final = 0.345  # inch, the least height of a row
_MOST_ROW: Final = 0.54  # inch, the most height of a row
_BETWEEN: Final = 0.2  # inch between two columns
_NAMES: Final = 0.52  # inch at the left for the names of stages and layers
_HEAD: Final = 0.52  # inch above the rows for the titles of the columns
_FOOT: Final = 0.4  # inch below the rows for the numbers of the axes
_LAYERS: Final = 24  # rows at most, in all blocks


@style.styled
def layers(
    rows: Sequence[LayerView], image: Array | None, chance: float | None, title: str
) -> Figure:
    """Draw a row for each layer, or for evenly spaced layers if there are too many.

    A column that is empty for all layers is left out.

    image: (3, height, width) in [0, 1], under the maps.
    chance: the accuracy of guessing.
    """
    blocks = 2 if style.in_column() else 1
    rows = _spaced_layers(rows, _LAYERS // blocks)
    row_height = float(np.clip(_TALL / len(rows), _LEAST_ROW, _MOST_ROW))
    _, title_height = style.wrapped_title(title, style.full_width())
    room = style.TALL - title_height - Margins().top
    row_height = min(row_height, (room / blocks - _HEAD - _FOOT) / len(rows))
    columns = layer_columns(rows, image, row_height - 2 * GAP, chance)
    column_groups = [columns]  # the columns of each block
    if blocks == 2:
        column_groups = [columns[:3], columns[3:]]  # of five columns at most
    column_groups = [group for group in column_groups if group]
    block_height = _HEAD + len(rows) * row_height + _FOOT
    board = area(
        title=title,
        wide=style.full_width() - 0.12,
        tall=len(column_groups) * block_height,
        margins=Margins(bottom=0.0),
    )
    for index, group in enumerate(column_groups):
        layout = Layout(board, rows, board.top + index * block_height + _HEAD, row_height)
        _name_rows(layout)
        if image is not None and index == 0:
            _draw_image(layout, image)
        _draw_columns(layout, group)
    return board.figure


def _draw_image(layout: Layout, image: Array) -> None:
    """Draw the image in the corner above the names of the layers."""
    side = _HEAD - 2 * GAP
    x = layout.board.left + _NAMES - side - GAP
    axes = layout.board.place(x, layout.top - _HEAD + GAP, side, side)
    axes.imshow(enlarged(np.asarray(image, float)))
    without_frames([axes])


def _spaced_layers(rows: Sequence[LayerView], most: int) -> Sequence[LayerView]:
    """Return at most `most` layers, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return rows
    indices = np.linspace(0, len(rows) - 1, most).round().astype(int)
    return [rows[index] for index in indices]


def _draw_columns(layout: Layout, columns: Sequence[Column]) -> None:
    """Draw columns side by side; those that grow share the room that is left."""
    left = layout.board.left + _NAMES
    room = (
        layout.board.right
        - left
        - sum(column.wide for column in columns)
        - _BETWEEN * (len(columns) - 1)
    )
    growing = sum(column.grows for column in columns)  # their number
    for column in columns:
        wide = column.wide
        if column.grows:
            wide += room / growing
            layout.write(left + wide / 2, layout.top - 0.06, column.title, va="bottom", ha="center")
        else:
            layout.write(left, layout.top - 0.06, column.title, va="bottom", ha="left")
        column.draw(layout, left, wide)
        left += wide + _BETWEEN


def _name_rows(layout: Layout) -> None:
    """Write the names of layers and of stages, and draw lines between them."""
    left = layout.board.left
    right = layout.board.right
    stages = [row.stage for row in layout.rows]
    for index, row in enumerate(layout.rows):
        layout.write(
            left + _NAMES - 0.08,
            layout.middle(index),
            f"L{row.layer}",
            ha="right",
            fontsize=style.SMALL,
        )
        upper_edge = layout.top + index * layout.height
        begins_stage = index == 0 or stages[index - 1] != row.stage
        if not begins_stage:
            layout.rule(upper_edge, left + 0.2, right, dark=False)
            continue
        layout.rule(upper_edge, left, right, dark=True)
        rows_of_stage = len(list(takewhile(row.stage.__eq__, stages[index:])))
        middle = layout.top + (index + rows_of_stage / 2) * layout.height
        layout.write(left + 0.09, middle, row.stage, rotation=90, ha="center", fontsize=style.SMALL)
    layout.rule(layout.top + len(layout.rows) * layout.height, left, right, dark=True)
