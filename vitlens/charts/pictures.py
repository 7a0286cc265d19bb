"""Pictures: the cells of the chart of images (image_chart.py), their pixels, and what yields them.

`with_maps` yields images next to their maps, `of_heads` the maps of all heads. `mosaic` joins the
maps of several patches to one, and `cut` draws the borders of patches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray

from vitlens.charts import overlay, style
from vitlens.report.numbers import percent

_LETTERS_BELOW: Final = 16  # of a line below a picture
# factors by which a perturbation is amplified
_ROUND: Final = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256)
_LINES: Final = 6  # rows of images with their maps, on a page
_PANELS_IN_A_ROW: Final = 8  # an image and its maps
_CUT_SIDE: Final = 448  # px, least shorter side of an image that is cut into patches
_MOSAIC: Final = 8  # most maps in a row or column


@dataclass(frozen=True)
class Picture:
    """A cell of the chart `images`: an image, a map, or a map over its image.

    image: (3, height, width) in [0, 1], None for a map without its image.
    map: (rows, columns), None for an image without a map.
    row, column: the names of its row and its column in the chart.
    below: the text under it.
    frame: the colour of its frame, "" for none.
    mask: (height, width), an object that is outlined.
    hit: True if the map's highest point lies on the object, False if not; the point is marked. None
        for no mark.
    crossed: the reason for which the map is crossed out, "" if it is not.
    sheet: the number of its figure, if a section has several.
    signed: True or False for a map drawn as a share of its largest value, with signs or without.
        None for a map drawn by its values.
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
        words = style.shorten(prediction, _LETTERS_BELOW)
        if probability is not None:
            words += f", {percent(probability)}"
        if len(words) > _LETTERS_BELOW:
            words = words.replace(", ", "\n", 1)
        if label is None:
            return cls(image, below=words, row=row)
        if prediction == label:
            return cls(image, below=f"{style.RIGHT_SYMBOL} {words}", frame=style.RIGHT, row=row)
        below = f"{style.WRONG_SYMBOL} {words}\nis {style.shorten(label, _LETTERS_BELOW)}"
        return cls(image, below=below, frame=style.WRONG, row=row)

    @property
    def flaw(self) -> str:
        """Return why its map is crossed out, "" for a map without a flaw."""
        if self.crossed or self.map is None or self.map.size == 1:
            return self.crossed
        values = np.asarray(self.map, float)
        if self.image is None:  # NaN is then a gap between maps (see `mosaic`)
            values = values[np.isfinite(values)]
            if not values.size:  # a head that its layer does not have (see `of_heads`)
                return ""
        return overlay.flaw_of(values)


def scale_of(values: overlay.Array) -> overlay.Scale:
    """Return the scale of one map, which begins at 0 or below."""
    finite = values[np.isfinite(values)]
    low = float(finite.min(initial=0.0))
    high = float(finite.max(initial=0.0))
    if high == 0:  # no positive value
        high = 1.0
    return overlay.Scale(low, high)


def colour_values(
    picture: Picture, joint: overlay.Scale | None = None, *, smooth: bool = True
) -> overlay.Array:
    """Return the colours (height, width, 3) of a picture in [0, 1], without marks.

    joint: the scale of all maps, None for the scale of this map.
    smooth: False to draw the cells of a map as squares.
    """
    if picture.image is None:
        if picture.map is None:
            return np.ones((1, 1, 3))  # an empty cell is white
        shares = scale_of(picture.map).norm(picture.map)
        return np.asarray(colormaps[style.MAGNITUDE](shares))[..., :3]
    if picture.map is None:
        return overlay.enlarged(np.asarray(picture.image, float))
    values = np.asarray(picture.map, float)
    if picture.signed is not None:
        return overlay.overlaid(picture.image, values, signed=picture.signed)
    scale = scale_of(values) if joint is None else joint
    return overlay.blend(picture.image, values, scale=scale, smooth=smooth)


def pixels(picture: Picture) -> NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of one picture, with its object outlined in white."""
    from scipy.ndimage import binary_erosion

    drawn = colour_values(picture)
    if picture.mask is not None:
        times = drawn.shape[0] // picture.mask.shape[0]  # the image is enlarged by this factor
        inside = np.asarray(picture.mask, bool).repeat(times, 0).repeat(times, 1)
        border = inside & ~binary_erosion(inside, iterations=2)
        drawn[border] = 1.0
    return np.asarray(np.round(np.clip(drawn, 0, 1) * 255), np.uint8)


def amplification(changes: NDArray[np.floating]) -> int:
    """Return the greatest round factor by which perturbations can be amplified.

    They are drawn around mid-grey, so no value may exceed 0.5.
    """
    largest = float(np.abs(changes).max(initial=0.0))
    if largest == 0:
        return 1
    # 0.1 % more than 0.5, because perturbations have rounding errors
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
    names: Sequence[str],
    *,
    patches: Sequence[tuple[int, int]] = (),
) -> Iterator[Picture]:
    """Yield each image, and after it its map of every kind.

    pictures: the images (batch, 3, height, width).
    maps: the maps (batch, rows, columns) of every kind.
    titles: the title of every kind.
    names: the names of the images.
    patches: (row, column) of the patch that is outlined in each kind of map. The first is also
        outlined in the image.
    """
    for index, (name, image) in enumerate(zip(names, pictures, strict=True)):
        masks: list[NDArray[np.bool_] | None] = [None] * len(maps)
        if patches:
            masks = [
                patch_mask(patch, maps_of_kind.shape[1:], image.shape[1:])
                for patch, maps_of_kind in zip(patches, maps)
            ]
        yield Picture(image, row=name, column="image", mask=masks[0])
        for title, maps_of_kind, mask in zip(titles, maps, masks, strict=True):
            yield Picture(image, maps_of_kind[index], row=name, column=title, mask=mask)


def patch_mask(
    patch: tuple[int, int], grid: tuple[int, ...], size: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return a mask of an image that is True in one patch.

    patch: (row, column) in the grid.
    grid: (rows, columns).
    size: (height, width) of the image.
    """
    patches = np.zeros(grid)
    patches[patch] = 1.0
    return np.asarray(overlay.upsample(patches, (size[0], size[1]), smooth=False) > 0.5)


def of_heads(
    maps: overlay.Array, numbers: Sequence[int], image: overlay.Array | None = None
) -> Iterator[Picture]:
    """Yield the map of every head.

    Layers are the rows of the chart, or its columns if they are more than twice as many as heads.

    maps: (layers, heads, rows, columns).
    numbers: the numbers of the layers.
    image: an image that is drawn first.
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
    """Return similarities (patches, patches) as one map, which joins the maps of some patches.

    They are at most 8 by 8 patches, and the map of each is at its place. NaN lies between two maps.
    The similarity of a patch with itself, 1, is drawn as the greatest similarity of two patches.
    """
    off_diagonal = similarity[~np.eye(len(similarity), dtype=bool)]
    greatest = 1.0
    if off_diagonal.size:
        greatest = off_diagonal.max(initial=-1.0)
    values = np.minimum(similarity, greatest)
    chosen_rows = _spaced_numbers(grid[0])
    chosen_columns = _spaced_numbers(grid[1])
    by_place = values.reshape(*grid, *grid)
    maps = by_place[np.ix_(chosen_rows, chosen_columns)]  # (down, across, rows, columns)
    gap = max(1, round(max(grid) / 12))
    # a gap below each map and at its right
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
    """Return an enlarged image with white lines between its patches.

    patch: (height, width) of a patch, px.
    """
    times = max(1, ceil(_CUT_SIDE / min(image.shape[1:])))
    drawn = image.repeat(times, axis=1).repeat(times, axis=2)
    line = np.arange(-2, 2)  # pixels around an edge that are white
    for axis, patch_side in ((1, patch[0]), (2, patch[1])):
        edges = np.arange(patch_side * times, drawn.shape[axis], patch_side * times)
        white_pixels = (edges[:, None] + line).ravel()
        np.moveaxis(drawn, axis, 0)[white_pixels] = 1.0  # a view, so that `drawn` changes
    return np.asarray(drawn)
