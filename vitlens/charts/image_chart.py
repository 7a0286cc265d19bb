"""The chart of images: photographs in rows and columns, with maps over them or without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from vitlens.charts import overlay, style
from vitlens.charts.panels import Board, area, without_frames
from vitlens.charts.picture_layout import (
    GAP,
    LARGEST_SIDE,
    LETTER,
    Blocks,
    Grid,
    blocks_of,
    column_titles,
    grid_of,
    margins_of,
    names_beside,
    texts_below,
)
from vitlens.charts.pictures import Picture, colour_values, scale_of
from vitlens.charts.values import Draw

# the unit of a map as `overlay.overlaid` draws it
_SHARE: Final = f"share of its {overlay.LARGEST}th percentile"

_Scales = Literal["own", "joint", "signed"]


@dataclass(frozen=True)
class _Colours:
    """The meaning of colours: their scale, the map of colours, and the label of the colour bar."""

    scale: overlay.Scale
    colormap: str | Colormap
    label: str = ""


def images(
    *,
    scale: _Scales = "own",
    label: str = "",
    smooth: bool = True,
    largest: float = LARGEST_SIDE,
    under: bool = False,
    dense: bool = False,
) -> Draw:
    """Return a chart of pictures by row and column.

    Its rows are objects of the class Picture. Columns that do not fit form further blocks below.

    scale: "own" for maps from 0 to their own maximum each, "joint" for one scale of all maps,
        "signed" for one that is symmetric around 0.
    label: the label of the colour bar. The bar is drawn for one scale, and with a label also for
        maps up to their own maximum.
    smooth: False to draw the cells of a map over an image as squares.
    largest: the greatest side of a picture, inch.
    under: True for names of rows below them.
    dense: True for as few blocks as make the pictures largest, however small.
    """

    @style.styled
    def draw(pictures: Sequence[Any], title: str) -> Figure:
        # In this order: margins have room for the names of rows, blocks fit between them, and
        # texts have lines that fit the pictures of the blocks.
        grid = grid_of(pictures)
        colours = _shared_colours(pictures, scale)
        legend = colours
        if colours is None and label:
            legend = _Colours(overlay.Scale(0.0, 1.0), style.MAGNITUDE)
        joint_scale = None
        if colours is not None and scale == "joint":
            joint_scale = colours.scale
        row_names = {}
        for (row, _), picture in zip(grid.places, pictures):
            if picture.row:
                row_names[row] = picture.row
        beside: dict[int, str] = {}
        if not under:
            beside = names_beside(pictures, row_names, joint_scale, dense=dense)
        margins = margins_of(beside, has_legend=legend is not None)
        room = style.full_width() - margins.left - margins.right
        blocks = blocks_of(pictures, grid, room, largest, dense=dense)
        below = texts_below(pictures, blocks.side)
        titles = column_titles(pictures, blocks.side, joint_scale)
        blocks = blocks.with_texts(below, titles, row_names_below=under)
        tall = blocks.height
        if not under:
            tall -= 0.05
        board = area(title=title, wide=blocks.width, tall=tall, margins=margins)

        def place(row: int, column: int) -> Axes:
            block, column_of_block = divmod(column, blocks.across)
            x = board.left + column_of_block * (blocks.side + GAP)
            y = blocks.y(board.top, block, row)
            return board.place(x, y, blocks.side, blocks.side * blocks.ratio)

        for picture, (row, column), text_below in zip(pictures, grid.places, below):
            axes = place(row, column)
            _fill(axes, picture, colours, smooth=smooth)
            if picture.below:
                axes.set_xlabel(text_below, fontsize=style.SMALL, labelpad=2)
            if row == 0 and picture.column:
                axes.set_title(titles[picture.column])
        for column, name in _columns_without_top(pictures, grid).items():
            axes = place(0, column)
            axes.set_axis_off()
            axes.set_title(titles[name])
        if under:
            _name_rows_below(board, blocks, row_names)
        else:
            _name_rows_beside(board, blocks, beside)
        if legend is not None:
            overlay.colour_bar(
                board.bar(),
                scale=legend.scale,
                label=label or legend.label,
                colours=legend.colormap,
                both=legend.colormap == style.SIGNED,
            )
        return board.figure

    return draw


def _columns_without_top(pictures: Sequence[Picture], grid: Grid) -> dict[int, str]:
    """Return the numbers and names of named columns that have no picture in the first row."""
    columns = dict[int, str]()
    with_top = set[int]()
    for picture, (row, column) in zip(pictures, grid.places):
        if picture.column:
            columns[column] = picture.column
        if row == 0:
            with_top.add(column)
    return {column: name for column, name in columns.items() if column not in with_top}


def _shared_colours(pictures: Sequence[Picture], scales: _Scales) -> _Colours | None:
    """Return what the colours of all maps mean, None if each map has its own scale."""
    signs = [picture.signed for picture in pictures if picture.signed is not None]
    if any(signs):
        scale = overlay.Scale(-1.0, 1.0, clipped=True)
        return _Colours(scale, style.SIGNED, _SHARE)
    if signs:
        scale = overlay.Scale(0.0, 1.0, clipped=True)
        return _Colours(scale, overlay.POSITIVE, _SHARE)
    # raveled, because their grids may differ
    maps = [np.ravel(picture.map) for picture in pictures if picture.map is not None]
    if not maps or scales == "own":
        return None
    values = np.concatenate(maps)
    if scales == "signed":
        return _Colours(overlay.clipped_scale(values), style.SIGNED)
    return _Colours(overlay.joint_scale(values), style.MAGNITUDE)


def _fill(axes: Axes, picture: Picture, colours: _Colours | None, *, smooth: bool) -> None:
    """Draw one picture with its map and the marks upon it."""
    without_frames([axes])
    if picture.image is None and picture.map is not None:
        if colours is None:
            colours = _Colours(scale_of(picture.map), style.MAGNITUDE)
        colormap = overlay.as_colormap(colours.colormap).with_extremes(bad="#D9D9D9")
        axes.imshow(picture.map, cmap=colormap, norm=colours.scale.norm)
    else:
        joint_scale = None if colours is None else colours.scale
        drawn = colour_values(picture, joint_scale, smooth=smooth)
        axes.imshow(drawn, interpolation="nearest")
    if picture.flaw:
        overlay.cross_out(axes, picture.flaw)
    if picture.mask is not None:
        overlay.outline(axes, np.asarray(picture.mask, float))
    if picture.map is not None and picture.hit is not None:
        overlay.mark_peak(axes, np.asarray(picture.map, float), hit=picture.hit)
    if picture.frame:
        axes.spines[:].set(visible=True, color=picture.frame, linewidth=2.0)


def _name_rows_below(board: Board, blocks: Blocks, names: Mapping[int, str]) -> None:
    width, height = board.figure.get_size_inches()
    for block, (row, name) in product(range(blocks.count), names.items()):
        words = style.shorten(name, int(blocks.width / LETTER))
        y = blocks.y(board.top, block, row) + blocks.side * blocks.ratio + 0.04
        board.figure.text(board.left / width, 1 - y / height, words, va="top", fontsize=style.SMALL)


def _name_rows_beside(board: Board, blocks: Blocks, texts: Mapping[int, str]) -> None:
    width, height = board.figure.get_size_inches()
    for block, (row, text) in product(range(blocks.count), texts.items()):
        y = blocks.y(board.top, block, row) + blocks.side * blocks.ratio / 2
        board.figure.text(
            (board.left - 0.05) / width, 1 - y / height, text, ha="right", va="center"
        )
