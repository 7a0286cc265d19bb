"""The layout of a chart of pictures: their places, the blocks of rows, and the texts around them.

Columns that do not fit the width of a page form further blocks below. All sizes are in inches.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

import numpy as np

from vitlens.charts import style
from vitlens.charts.overlay import Scale
from vitlens.charts.panels import BAR_ROOM, Margins
from vitlens.charts.pictures import Picture

LARGEST_SIDE: Final = 1.35  # of a picture
LETTER: Final = 0.065  # of a letter below a picture
GAP: Final = 0.06  # between two pictures
_LEAST_MAP: Final = 0.2  # of a map without its image
_LEAST_IMAGE: Final = 0.62  # of an image
_TALL: Final = 6.0  # of all rows of a block, if a chart may have larger pictures
_NARROW: Final = 0.6  # of a picture, below which a number above it takes a line
_IN_A_ROW: Final = 6  # pictures without names of rows and columns
_DARK: Final = 0.25  # share of a scale up to which all colours are dark
_NAME_LETTERS: Final = 14  # of a line of a row's name
_DENSE_LINES: Final = 2  # of a row's name in a dense figure


@dataclass(frozen=True)
class Grid:
    """The rows and columns of a chart.

    places: the (row, column) of each picture.
    down: the number of rows.
    across: the number of columns.
    """

    places: Sequence[tuple[int, int]]
    down: int
    across: int


@dataclass(frozen=True)
class Blocks:
    """Blocks of pictures below one another.

    count: the number of blocks.
    across: the number of columns of each.
    down: the number of rows of each.
    side: the width of a picture.
    ratio: the height of a picture as a share of its width.
    above: the height of the titles of columns.
    text: the height of the texts below a row of pictures.
    """

    count: int
    across: int
    down: int
    side: float
    ratio: float
    above: float = 0.0
    text: float = 0.0

    def with_texts(
        self, below: Sequence[str], column_titles: Mapping[str, str], *, row_names_below: bool
    ) -> "Blocks":
        """Return the blocks with room for the texts below pictures and above columns.

        column_titles: by the names of the columns; a chart without columns has only the name "".
        """
        text = 0.05 + 0.14 * max(map(_count_lines, below))
        if row_names_below:
            text += 0.16
        above = 0.05
        if any(column_titles):  # any name that is not ""
            above = 0.1 + 0.14 * max(map(_count_lines, column_titles.values()))
        return replace(self, above=above, text=text)

    @property
    def width(self) -> float:
        """Return the width of all pictures of a row."""
        return self.across * (self.side + GAP) - GAP

    @property
    def height(self) -> float:
        """Return the height of all blocks."""
        return self.count * self._block_height

    @property
    def _row_height(self) -> float:
        return self.side * self.ratio + self.text

    @property
    def _block_height(self) -> float:
        return self.above + self.down * self._row_height

    def y(self, top: float, block: int, row: int) -> float:
        """Return the upper edge of a row of pictures.

        top: the upper edge of all blocks.
        """
        return top + block * self._block_height + self.above + row * self._row_height


def grid_of(pictures: Sequence[Picture]) -> Grid:
    """Return the places of pictures by the names of their rows and columns.

    Pictures without names fill rows of at most six. In a chart with names of rows only, the
    pictures of a row lie next to one another.
    """
    row_names = list(dict.fromkeys(picture.row for picture in pictures))
    column_names = list(dict.fromkeys(picture.column for picture in pictures))
    if len(row_names) == 1 and len(column_names) == 1:
        down = ceil(len(pictures) / _IN_A_ROW)
        across = ceil(len(pictures) / down)
        places = [divmod(index, across) for index in range(len(pictures))]
        return Grid(places, down, across)
    if column_names == [""]:
        places = []
        lengths = dict.fromkeys(row_names, 0)  # the number of pictures of each row so far
        for picture in pictures:
            places.append((row_names.index(picture.row), lengths[picture.row]))
            lengths[picture.row] += 1
        return Grid(places, len(row_names), max(lengths.values()))
    places = [
        (row_names.index(picture.row), column_names.index(picture.column)) for picture in pictures
    ]
    return Grid(places, len(row_names), len(column_names))


def blocks_of(
    pictures: Sequence[Picture], grid: Grid, room: float, largest: float, *, dense: bool
) -> Blocks:
    """Return the blocks that fit the room, not yet with room for texts.

    room: the width of the page without margins.
    largest: the greatest side of a picture.
    dense: True for as few blocks as make the pictures largest, however small.
    """
    # one image is the one before the maps of heads, which may be smaller than an image
    has_images = sum(picture.image is not None for picture in pictures) > 1
    smallest_side = _LEAST_IMAGE if has_images else _LEAST_MAP
    ratio = max(height / width for height, width in map(_shape, pictures))
    # pictures may be larger than LARGEST_SIDE as long as all rows fit _TALL
    longer_side = min(largest, max(LARGEST_SIDE, _TALL / grid.down))
    largest_side = longer_side / max(1.0, ratio)  # a width: the longer side may be the height

    def side_of(blocks: int) -> float:
        """Return the side of a picture if the columns are divided into this many blocks."""
        across = ceil(grid.across / blocks)
        side_by_width = (room + GAP) / across - GAP
        side_by_height = (style.TALL - 1) / (blocks * grid.down * ratio)
        return min(side_by_width, largest_side, side_by_height)

    most_across = max(1, int((room + GAP) / (smallest_side + GAP)))
    count = ceil(grid.across / most_across)
    if dense:
        count = max(range(1, count + 1), key=side_of)
    return Blocks(
        count=count,
        across=ceil(grid.across / count),
        down=grid.down,
        side=side_of(count),
        ratio=ratio,
    )


def _shape(picture: Picture) -> tuple[int, int]:
    """Return the height and width of an image, or of a map without an image."""
    values = picture.map if picture.image is None else picture.image
    if values is None:
        return 1, 1
    return values.shape[-2], values.shape[-1]


def margins_of(beside: Mapping[int, str], *, has_legend: bool) -> Margins:
    """Return the margins of a figure whose rows have these texts at their left."""
    longest = 0
    for text in beside.values():
        longest = max(longest, *map(len, text.split("\n")))
    left = 0.12 + 0.075 * longest if longest else GAP
    right = BAR_ROOM if has_legend else GAP
    return Margins(left, right, top=0.0, bottom=0.1)


def names_beside(
    pictures: Sequence[Picture], names: Mapping[int, str], scale: Scale | None, *, dense: bool
) -> dict[int, str]:
    """Return the text at the left of each named row; dark rows have their largest value.

    names: the names of the rows by number.
    scale: the scale of all maps, None if each has its own.
    dense: True to cut names after two lines.
    """
    dark = _dark_maxima(pictures, "row", scale)
    beside = {}
    for row, name in names.items():
        text = _name_lines(style.shorten(name, 40))
        if name in dark:
            text += f"\nup to {dark[name]:.2g}"
        if dense:
            text = _first_lines(text, _DENSE_LINES)
        beside[row] = text
    return beside


def column_titles(pictures: Sequence[Picture], side: float, scale: Scale | None) -> dict[str, str]:
    """Return the title of each column by its name; dark columns have their largest value.

    side: the width of a picture.
    scale: the scale of all maps, None if each has its own.
    """
    letters = max(6, int(side / 0.07))
    titles = {}
    for picture in pictures:
        titles[picture.column] = textwrap.fill(style.shorten(picture.column, 60), letters)
    for name, value in _dark_maxima(pictures, "column", scale).items():
        words = f"up to {value:.2g}"
        if side < _NARROW:
            words = words.replace("to ", "to\n")
        titles[name] += f"\n{words}"
    return titles


def texts_below(pictures: Sequence[Picture], side: float) -> list[str]:
    """Return the text below each picture, in lines that fit its width."""
    letters = max(10, int((side + GAP) / LETTER))
    return [_wrap(picture.below, letters) for picture in pictures]


def _dark_maxima(
    pictures: Sequence[Picture], axis: Literal["row", "column"], scale: Scale | None
) -> dict[str, float]:
    """Return the largest value of each named row or column that is dark on the scale of all maps.

    The reader cannot tell such values apart by their colours.
    """
    if scale is None or scale.low < 0:
        return {}
    largest: dict[str, float] = {}
    for picture in pictures:
        name = getattr(picture, axis)
        if picture.map is not None and name and not np.isnan(picture.map).all():
            map_maximum = float(np.nanmax(picture.map))
            largest[name] = max(map_maximum, largest.get(name, map_maximum))
    limit = scale.low + _DARK * (scale.high - scale.low)
    return {name: maximum for name, maximum in largest.items() if maximum <= limit}


def _count_lines(text: str) -> int:
    return text.count("\n") + 1 if text else 0


def _first_lines(text: str, count: int) -> str:
    """Return the first lines of a text, with an ellipsis if there are more."""
    lines = text.split("\n")
    if len(lines) <= count:
        return text
    return "\n".join(lines[:count]) + "…"


def _name_lines(name: str) -> str:
    """Divide a name into lines at its spaces, underscores, dashes and dots, never within a word."""
    lines = [""]
    # each part is a word with the separators after it
    for part in re.findall(r"[^\s_.-]*[\s_.-]+|[^\s_.-]+", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _NAME_LETTERS:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _wrap(text: str, letters: int) -> str:
    """Break lines that are too long, but not between a number and its % sign."""
    lines = []
    for line in style.drawable(text).split("\n"):
        lines.append(textwrap.fill(line.replace(" %", "\u00a0%"), letters))
    return "\n".join(lines)
