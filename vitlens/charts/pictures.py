"""Charts of images: photographs in rows and columns, with maps over them or without."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any, Final, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import overlay, style
from vitlens.charts.panels import BAR_ROOM, Board, Margins, area, without_frames
from vitlens.charts.values import Draw
from vitlens.report.numbers import percent

_LARGEST: Final = 1.35  # inch of a picture
_LEAST_MAP: Final = 0.2  # inch of a map without its image
_LEAST_IMAGE: Final = 0.62  # inch of an image
_GAP: Final = 0.06
_LETTER: Final = 0.065  # inch per letter below a picture
_ROUND: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256)
_TALL: Final = 6.0  # of all rows
_LINES: Final = 6  # of images with many maps each, on a page
_DARK: Final = 0.25  # share of a scale up to which all colours are dark
_NAME: Final = 14  # letters of a line of a name
_LONGEST: Final = 16  # letters of a line below a picture
_NARROW: Final = 0.6  # inch of a picture, below which a number above it takes a line
_DENSE: Final = 2  # lines of a name in a dense figure
_CUT_SIDE: Final = 448  # px, least shorter side of an image that is cut into patches
_MOSAIC: Final = 8  # most maps in a row or column
_IN_A_ROW: Final = 6  # pictures without places
_PANELS_IN_A_ROW: Final = 8  # an image and its maps


@dataclass(frozen=True)
class Picture:
    """A cell of `images`.

    image: (3, height, width) in [0, 1].
    map: (rows, columns), drawn over the image, or alone.
    row, column: their names.
    below: a line under it.
    frame: the colour around it.
    mask: (height, width), an object that is outlined.
    hit: True if the map's highest point, which is marked, lies on the object.
    crossed: the reason for which the map is crossed out.
    sheet: the number of its figure, of several.
    signed: for a map drawn as a share of its largest value, True if it has signs.
    of: the name in the title of its figure.
    """

    image: NDArray[np.floating] | None
    map: NDArray[np.floating] | None = None
    row: str = ""
    column: str = ""
    below: str = ""
    frame: str = ""
    mask: NDArray[np.bool_] | None = None
    hit: bool | None = None
    crossed: str = ""
    sheet: int = 0
    signed: bool | None = None
    of: str = ""

    @classmethod
    def predicted(
        cls,
        image: NDArray[np.floating],
        prediction: str,
        probability: float | None,
        label: str | None,
        *,
        row: str = "",
    ) -> "Picture":
        """Return an image with its prediction below, marked as right or wrong if it has a label."""
        words = style.shorten(prediction, _LONGEST)
        if probability is not None:
            words += f", {percent(probability)}"
        if len(words) > _LONGEST:
            words = words.replace(", ", "\n", 1)
        if label is None:
            return cls(image, below=words, row=row)
        if prediction == label:
            return cls(image, below=f"{style.RIGHT_SYMBOL} {words}", frame=style.RIGHT, row=row)
        below = f"{style.WRONG_SYMBOL} {words}\nis {style.shorten(label, _LONGEST)}"
        return cls(image, below=below, frame=style.WRONG, row=row)

    @property
    def flaw(self) -> str:
        """Return why its map says nothing, "" for a map without a flaw."""
        if self.crossed or self.map is None or self.map.size == 1:
            return self.crossed
        values = np.asarray(self.map, float)
        if self.image is None:
            values = values[np.isfinite(values)]
        return overlay.flaw_of(values)


@dataclass(frozen=True)
class _Bar:
    """The meaning of colours: their scale, the map of colours, and the label of the colour bar."""

    scale: overlay.Scale
    colours: str | Colormap
    label: str = ""


@dataclass(frozen=True)
class _Grid:
    """Rows and columns of pictures; places: the row and column of each picture."""

    places: Sequence[tuple[int, int]]
    down: int
    across: int


@dataclass(frozen=True)
class _Blocks:
    """Blocks of pictures below one another, each of `down` rows; sizes in inches.

    side: the width of a picture.
    ratio: its height as a share of the width.
    above: the height of the titles of columns.
    text: that of the texts below a row of pictures.
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
    ) -> "_Blocks":
        """Return the blocks with room for the texts below pictures and above columns."""
        text = 0.05 + 0.14 * max(map(_count_lines, below)) + 0.16 * row_names_below
        above = 0.05
        if any(column_titles):
            above = 0.1 + 0.14 * max(map(_count_lines, column_titles.values()))
        return replace(self, above=above, text=text)

    @property
    def width(self) -> float:
        """Return the width of all pictures of a row."""
        return self.across * (self.side + _GAP) - _GAP

    @property
    def height(self) -> float:
        """Return the height of all blocks."""
        return self.count * self._block

    @property
    def _block(self) -> float:
        return self.above + self.down * (self.side * self.ratio + self.text)

    def y(self, top: float, block: int, row: int) -> float:
        """Return the upper edge of a row of pictures; top: that of all blocks."""
        return top + block * self._block + self.above + row * (self.side * self.ratio + self.text)


def images(
    *,
    scale: Literal["own", "joint", "signed"] = "own",
    label: str = "",
    smooth: bool = True,
    largest: float = _LARGEST,
    under: bool = False,
    dense: bool = False,
) -> Draw:
    """Return a chart of pictures by row and column.

    Columns that do not fit form further blocks below.

    scale: each map from 0 to its own maximum, or one scale for all maps, symmetric around 0 if
        signed.
    label: the label of the colour bar, which is drawn for one scale, and with a label also for maps
        up to their own maximum.
    largest: the greatest side of a picture, inch.
    under: True for names of rows below them.
    dense: True for as few blocks as make the pictures largest, however small.
    """

    @style.styled
    def draw(rows: Sequence[Any], title: str) -> Figure:
        grid = _grid(rows)
        bar = _bar(rows, scale)
        legend = bar
        if bar is None and label:
            legend = _Bar(overlay.Scale(0.0, 1.0), style.MAGNITUDE)
        joint_scale = bar.scale if bar and scale == "joint" else None
        row_names = {}
        for (row, _), picture in zip(grid.places, rows):
            if picture.row:
                row_names[row] = picture.row
        beside: dict[int, str] = {}
        if not under:
            beside = _names_beside(rows, row_names, joint_scale)
        if dense:
            beside = {row: _first_lines(text, _DENSE) for row, text in beside.items()}
        margins = _margins(beside, has_legend=legend is not None)
        room = style.full_width() - margins.left - margins.right
        blocks = _blocks(rows, grid, room, largest, dense=dense)
        below = _texts_below(rows, blocks.side)
        column_titles = _column_titles(rows, blocks.side, joint_scale)
        blocks = blocks.with_texts(below, column_titles, row_names_below=under)
        tall = blocks.height
        if not under:
            tall -= 0.05
        board = area(title=title, wide=blocks.width, tall=tall, margins=margins)
        for picture, (row, column), text_below in zip(rows, grid.places, below):
            block, column_of_block = divmod(column, blocks.across)
            x = board.left + column_of_block * (blocks.side + _GAP)
            y = blocks.y(board.top, block, row)
            axes = board.place(x, y, blocks.side, blocks.side * blocks.ratio)
            _fill(axes, picture, bar, smooth)
            if picture.below:
                axes.set_xlabel(text_below, fontsize=style.SMALL, labelpad=2)
            if row == 0 and picture.column:
                axes.set_title(column_titles[picture.column])
        if under:
            _name_rows_below(board, blocks, row_names)
        else:
            _name_rows_beside(board, blocks, beside)
        if legend is not None:
            overlay.colour_bar(
                board.bar(),
                scale=legend.scale,
                label=label or legend.label,
                colours=legend.colours,
                both=legend.colours == style.SIGNED,
            )
        return board.figure

    return draw


def _names_beside(
    rows: Sequence[Picture], names: dict[int, str], scale: overlay.Scale | None
) -> dict[int, str]:
    """Return the text at the left of each named row; dark rows have their largest value."""
    dark = _dark_maxima(rows, "row", scale)
    beside = {}
    for row, name in names.items():
        beside[row] = _name_lines(style.shorten(name, 40))
        if name in dark:
            beside[row] += f"\nup to {dark[name]:.2g}"
    return beside


def _first_lines(text: str, count: int) -> str:
    """Return the first lines of a text, with an ellipsis if there are more."""
    lines = text.split("\n")
    if len(lines) <= count:
        return text
    return "\n".join(lines[:count]) + "…"


def _column_titles(
    rows: Sequence[Picture], side: float, scale: overlay.Scale | None
) -> dict[str, str]:
    """Return the title of each column by its name; dark columns have their largest value."""
    letters = max(6, int(side / 0.07))
    titles = {}
    for picture in rows:
        titles[picture.column] = textwrap.fill(style.shorten(picture.column, 60), letters)
    for name, value in _dark_maxima(rows, "column", scale).items():
        words = f"up to {value:.2g}"
        if side < _NARROW:
            words = words.replace("to ", "to\n")
        titles[name] += f"\n{words}"
    return titles


def _margins(beside: Mapping[int, str], *, has_legend: bool) -> Margins:
    """Return the margins of a figure whose rows have these texts at their left."""
    longest = 0
    for text in beside.values():
        longest = max(longest, *map(len, text.split("\n")))
    left = 0.12 + 0.075 * longest if longest else _GAP
    right = BAR_ROOM if has_legend else _GAP
    return Margins(left, right, 0.0, 0.1)


def _texts_below(rows: Sequence[Picture], side: float) -> list[str]:
    """Return the text below each picture, in lines that fit its width."""
    letters = max(10, int((side + _GAP) / _LETTER))
    return [_wrap(picture.below, letters) for picture in rows]


def _blocks(
    rows: Sequence[Picture], grid: _Grid, room: float, largest: float, *, dense: bool
) -> _Blocks:
    """Return the blocks that fit the room, yet without room for texts."""
    has_images = sum(picture.image is not None for picture in rows) > 1
    smallest_side = _LEAST_IMAGE if has_images else _LEAST_MAP
    ratio = max(height / width for height, width in map(_shape, rows))
    largest_side = max(_LARGEST, min(largest, _TALL / grid.down)) / max(1.0, ratio)

    def side_of(blocks: int) -> float:
        across = ceil(grid.across / blocks)
        side_by_width = (room + _GAP) / across - _GAP
        side_by_height = (style.TALL - 1) / (blocks * grid.down * ratio)
        return min(side_by_width, largest_side, side_by_height)

    most_across = max(1, int((room + _GAP) / (smallest_side + _GAP)))
    count = ceil(grid.across / most_across)
    if dense:
        count = max(range(1, count + 1), key=side_of)
    return _Blocks(
        count=count,
        across=ceil(grid.across / count),
        down=grid.down,
        side=side_of(count),
        ratio=ratio,
    )


def _name_rows_below(board: Board, blocks: _Blocks, names: dict[int, str]) -> None:
    width, height = board.figure.get_size_inches()
    for block, (row, name) in product(range(blocks.count), names.items()):
        words = style.shorten(name, int(blocks.width / _LETTER))
        y = blocks.y(board.top, block, row) + blocks.side * blocks.ratio + 0.04
        board.figure.text(board.left / width, 1 - y / height, words, va="top", fontsize=style.SMALL)


def _name_rows_beside(board: Board, blocks: _Blocks, names: dict[int, str]) -> None:
    width, height = board.figure.get_size_inches()
    for block, (row, name) in product(range(blocks.count), names.items()):
        y = blocks.y(board.top, block, row) + blocks.side * blocks.ratio / 2
        board.figure.text(
            (board.left - 0.05) / width, 1 - y / height, name, ha="right", va="center"
        )


def _grid(rows: Sequence[Picture]) -> _Grid:
    """Return the places of pictures by the names of their rows and columns, or in order if they
    have none.
    """
    down = list(dict.fromkeys(picture.row for picture in rows))
    across = list(dict.fromkeys(picture.column for picture in rows))
    if len(down) == 1 and len(across) == 1:  # pictures without places
        lines = ceil(len(rows) / _IN_A_ROW)
        columns = ceil(len(rows) / lines)
        return _Grid([divmod(index, columns) for index in range(len(rows))], lines, columns)
    places = []
    next_column = dict.fromkeys(down, 0)
    for picture in rows:
        column = across.index(picture.column)
        if across == [""]:  # the pictures of a row next to one another
            column = next_column[picture.row]
            next_column[picture.row] += 1
        places.append((down.index(picture.row), column))
    return _Grid(places, len(down), max(len(across), *next_column.values()))


def _bar(rows: Sequence[Picture], kind: str) -> _Bar | None:
    """Return what the colours of all maps mean, None if each map has its own scale."""
    signs = [picture.signed for picture in rows if picture.signed is not None]
    if any(signs):
        return _Bar(overlay.Scale(-1.0, 1.0, clipped=True), style.SIGNED, "share of its maximum")
    if signs:
        return _Bar(overlay.Scale(0.0, 1.0, clipped=True), overlay.POSITIVE, "share of its maximum")
    # their grids may differ
    maps = [np.ravel(picture.map) for picture in rows if picture.map is not None]
    if not maps or kind == "own":
        return None
    values = np.concatenate(maps)
    if kind == "signed":
        return _Bar(overlay.clipped_scale(values), style.SIGNED)
    return _Bar(overlay.joint_scale(values), style.MAGNITUDE)


def _dark_maxima(
    rows: Sequence[Picture], side: Literal["row", "column"], scale: overlay.Scale | None
) -> dict[str, float]:
    """Return the largest value of each named row or column whose maps are all dark on the scale of
    all maps.
    """
    if scale is None or scale.low < 0:
        return {}
    largest: dict[str, float] = {}
    for picture in rows:
        name = getattr(picture, side)
        if picture.map is not None and name:
            map_maximum = float(np.nanmax(picture.map))
            largest[name] = max(map_maximum, largest.get(name, map_maximum))
    limit = scale.low + _DARK * (scale.high - scale.low)
    return {name: maximum for name, maximum in largest.items() if maximum <= limit}


def _shape(picture: Picture) -> tuple[int, int]:
    """Return the height and width of an image, or of a map without an image."""
    pixels = picture.map if picture.image is None else picture.image
    if pixels is None:
        return 1, 1
    return pixels.shape[-2], pixels.shape[-1]


def _count_lines(text: str) -> int:
    return text.count("\n") + 1 if text else 0


def _name_lines(name: str) -> str:
    """Divide a name into lines at its spaces, underscores, dashes and dots, never within a word."""
    lines = [""]
    for part in re.findall(r"[^\s_.-]*[\s_.-]+|[^\s_.-]+", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _wrap(text: str, letters: int) -> str:
    """Break lines that are too long, but not between a number and its % sign."""
    lines = []
    for line in style.drawable(text).split("\n"):
        lines.append(textwrap.fill(line.replace(" %", "\u00a0%"), letters))
    return "\n".join(lines)


def _fill(axes: Axes, picture: Picture, bar: _Bar | None, smooth: bool) -> None:
    """Draw one picture with its map and the marks upon it."""
    without_frames([axes])
    if picture.image is None and picture.map is not None:
        if bar is None:
            bar = _Bar(_scale_of(picture.map), style.MAGNITUDE)
        colours = overlay.as_colormap(bar.colours).with_extremes(bad="#D9D9D9")
        axes.imshow(picture.map, cmap=colours, norm=bar.scale.norm)
    else:
        joint_scale = None if bar is None else bar.scale
        axes.imshow(_pixels(picture, joint_scale, smooth), interpolation="nearest")
    if picture.flaw:
        overlay.cross_out(axes, picture.flaw)
    if picture.mask is not None:
        overlay.outline(axes, np.asarray(picture.mask, float))
    if picture.map is not None and picture.hit is not None:
        overlay.mark_peak(axes, np.asarray(picture.map, float), hit=picture.hit)
    if picture.frame:
        axes.spines[:].set(visible=True, color=picture.frame, linewidth=2.0)


def _scale_of(values: overlay.Array) -> overlay.Scale:
    """Return the scale of one map, which begins at 0 or below."""
    finite = values[np.isfinite(values)]
    low = float(finite.min(initial=0.0))
    high = float(finite.max(initial=0.0))
    return overlay.Scale(low, high or 1.0)


def _pixels(picture: Picture, joint: overlay.Scale | None, smooth: bool) -> overlay.Array:
    if picture.image is None:
        if picture.map is None:
            return np.ones((1, 1, 3))
        shares = _scale_of(picture.map).norm(picture.map)
        return np.asarray(colormaps[style.MAGNITUDE](shares))[..., :3]
    if picture.map is None:
        return overlay.enlarged(np.asarray(picture.image, float))
    values = np.asarray(picture.map, float)
    if picture.signed is not None:
        return overlay.overlaid(picture.image, values, signed=picture.signed)
    return overlay.blend(picture.image, values, scale=joint or _scale_of(values), smooth=smooth)


def pixels(picture: Picture) -> NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of one picture, with its object outlined in white."""
    from scipy.ndimage import binary_erosion

    drawn = _pixels(picture, None, True)
    if picture.mask is not None:
        times = drawn.shape[0] // picture.mask.shape[0]
        inside = np.asarray(picture.mask, bool).repeat(times, 0).repeat(times, 1)
        border = inside & ~binary_erosion(inside, iterations=2)
        drawn[border] = 1.0
    return np.asarray(np.round(np.clip(drawn, 0, 1) * 255), np.uint8)


def amplification(changes: NDArray[np.floating]) -> int:
    """Return the greatest round factor at which no perturbation, drawn around mid-grey, leaves the
    range of colours.
    """
    largest = float(np.abs(changes).max(initial=0.0))
    if largest == 0:
        return 1
    fitting = [factor for factor in _ROUND if factor * largest <= 0.5 * 1.001]
    return max(fitting, default=1)


def images_on_a_page(panels: int) -> int:
    """Return the number of images that fit on a page if each has this many maps next to it.

    At least one.
    """
    rows_of_image = ceil((panels + 1) / _PANELS_IN_A_ROW)
    return max(1, _LINES // rows_of_image)


def with_maps(
    pictures: overlay.Array,
    maps: Sequence[overlay.Array],
    titles: Sequence[str],
    names: Sequence[str] = ("",),
    *,
    patches: Sequence[tuple[int, int]] = (),
) -> Iterator[Picture]:
    """Yield each image (3, height, width), and after it its maps (batch, rows, columns), one for
    each title.

    patches: (row, column) of the patch that is outlined in each map; the first is also outlined in
    the image.
    """
    for index, (name, image) in enumerate(zip(names, pictures)):
        masks: list[NDArray[np.bool_] | None] = [None] * len(maps)
        if patches:
            masks = [
                patch_mask(patch, batch.shape[1:], image.shape[1:])
                for patch, batch in zip(patches, maps)
            ]
        yield Picture(image, row=name, column="image", mask=masks[0])
        for title, batch, mask in zip(titles, maps, masks, strict=True):
            yield Picture(image, batch[index], row=name, column=title, mask=mask)


def patch_mask(
    patch: tuple[int, int], grid: tuple[int, ...], size: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return one patch (row, column) as a mask of the image, to be outlined."""
    patches = np.zeros(grid)
    patches[patch] = 1.0
    return np.asarray(overlay.upsample(patches, (size[0], size[1]), smooth=False) > 0.5)


def of_heads(
    maps: overlay.Array, numbers: Sequence[int], image: overlay.Array | None = None
) -> Iterator[Picture]:
    """Yield the map of every head (layers, heads, rows, columns).

    Layers lie down, or across if they are more than twice as many as heads.

    numbers: the numbers of the layers.
    image: drawn first.
    """
    layers = list(map(str, numbers))
    layers[0] = f"layer {layers[0]}"
    heads = list(map(str, range(maps.shape[1])))
    heads[0] = f"head {heads[0]}"
    rows = layers
    columns = heads
    if len(layers) > 2 * len(heads):
        rows = heads
        columns = layers
        maps = maps.swapaxes(0, 1)
    if image is not None:
        yield Picture(image, row=rows[0], column="image")
    for row, column in np.ndindex(len(rows), len(columns)):
        yield Picture(None, maps[row, column], row=rows[row], column=columns[column])


def mosaic(similarity: overlay.Array, grid: tuple[int, int]) -> overlay.Array:
    """Return similarities (patches, patches) as one map: a map for each of at most 8 by 8 patches,
    at its place.

    NaN lies between two maps. The similarity of a patch with itself, 1, is drawn as the greatest of
    two patches.
    """
    off_diagonal = similarity[~np.eye(len(similarity), dtype=bool)]
    greatest = 1.0
    if off_diagonal.size:
        greatest = off_diagonal.max(initial=-1.0)
    values = np.minimum(similarity, greatest)
    chosen = [_spaced_numbers(length) for length in grid]
    maps = values.reshape(*grid, *grid)[np.ix_(*chosen)]  # (down, across, rows, columns)
    gap = max(1, round(max(grid) / 12))
    padded = np.pad(maps, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    down, across, rows, columns = padded.shape
    joined = padded.transpose(0, 2, 1, 3).reshape(down * rows, across * columns)
    return np.asarray(joined[:-gap, :-gap])  # no gap after the last map


def _spaced_numbers(length: int) -> range:
    """Return at most 8 numbers below a length, evenly spaced and centred."""
    step = ceil(length / _MOSAIC)
    left_over = (length - 1) % step  # after the last number, if the first is 0
    return range(left_over // 2, length, step)


def cut(image: overlay.Array, patch: tuple[int, int]) -> overlay.Array:
    """Return an image, each pixel repeated, with white lines between its patches of (height, width)
    px.
    """
    times = max(1, ceil(_CUT_SIDE / min(image.shape[1:])))
    drawn = image.repeat(times, axis=1).repeat(times, axis=2)
    line = np.arange(-2, 2)  # pixels around an edge that are white
    for axis, patch_side in ((1, patch[0]), (2, patch[1])):
        edges = np.arange(patch_side * times, drawn.shape[axis], patch_side * times)
        white_pixels = (edges[:, None] + line).ravel()
        np.moveaxis(drawn, axis, 0)[white_pixels] = 1.0  # a view, so that `drawn` changes
    return np.asarray(drawn)
