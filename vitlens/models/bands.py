"""Where in the image the cells of a tensor lie, from images of noise that differ in one band.

An image is divided into bands of rows, and into bands of columns. One band at a time is replaced by
other noise. A cell changes most with the band that it was computed from. Its mean band is the mean
of the bands' numbers, weighted by these changes. In a map, the mean band of rows rises from row to
row, and that of columns from column to column.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.shapes import Images

Grid = tuple[int, int]  # (rows, columns) of cells, or (height, width) of an image
Places = Float[Tensor, "2 cells"]  # the mean band of each cell: of rows, and of columns

_BANDS: Final = 4  # the number of bands of rows, and of bands of columns
IMAGES: Final = 1 + 2 * _BANDS  # the number of `banded_images`
# least `grid_fit` of a map; channels and the tokens of an attention matrix stay below 0.2
FITS: Final = 0.4
# least `grid_fit` for a grid without the image's proportions
_FITS_OTHER_PROPORTIONS: Final = 0.7
# least cells of such a grid: fewer lie in order by chance
_LEAST_CELLS_OTHER_PROPORTIONS: Final = 8
_LARGEST_ASPECT_RATIO: Final = 4.0  # of a cell
# least range of the cells' mean bands, which is at most 3, from which their places can be read
_LEAST_RANGE: Final = 1.0
# a correlation with the other axis, or against the axis, that a map never has
_MISFITS: Final = 0.8


def banded_images(images: Images) -> Images:
    """Return the first of two images, then its variants with one band of the second image.

    There is a variant for each band of rows, then one for each band of columns.
    """
    image = images[:1]
    other = images[1:2]
    height = int(image.shape[2])
    width = int(image.shape[3])
    banded = image.repeat(IMAGES, 1, 1, 1)
    for band in range(_BANDS):
        rows = slice(band * height // _BANDS, (band + 1) * height // _BANDS)
        columns = slice(band * width // _BANDS, (band + 1) * width // _BANDS)
        banded[1 + band, :, rows] = other[0, :, rows]
        banded[1 + _BANDS + band, :, :, columns] = other[0, :, :, columns]
    return banded


def mean_bands(tensor: Float[Tensor, "images *axes"], channel_axis: int) -> Places:
    """Return the mean bands of each cell of a tensor that was computed from `banded_images`.

    The cells are those of all axes but the batch and the channels, in order.
    """
    # of shape (variants, cells); the first of the banded images is the unchanged one
    changes = (tensor[1:] - tensor[:1]).abs().float().mean(channel_axis).flatten(1)
    by_band = changes.unflatten(0, (2, _BANDS)).cpu()  # (rows or columns, bands, cells)
    bands = torch.arange(_BANDS, dtype=by_band.dtype)
    weighted_sums = (bands[:, None] * by_band).sum(1)
    middle = (_BANDS - 1) / 2  # the mean band of a cell that does not change
    places: Places = (weighted_sums / by_band.sum(1)).nan_to_num(middle, middle, middle)
    return places


def grid_fit(places: Places, grid: Grid) -> float:
    """Return how well the cells lie row by row in a grid: the worse fit of its two axes.

    It is 1 if they do, about 0 if they do not, and -1 for another order. The fit of an axis is the
    correlation of its rows (columns) with the bands of this axis, less the absolute correlation
    with the bands of the other axis.
    """
    fits = [along - abs(across) for along, across in _correlations(places, grid)]
    return min(fits, default=1.0)  # a single cell has no axis to compare


def is_misplaced(places: Places, grid: Grid) -> bool:
    """Return True if the cells clearly lie in another order, for example column by column."""
    if not shows_places(places):
        return False
    return any(
        along < -_MISFITS or abs(across) > _MISFITS for along, across in _correlations(places, grid)
    )


def shows_places(places: Places) -> bool:
    """Return True if the cells clearly lie at different places of the image.

    They do not if each of them is computed from the whole image.
    """
    ranges = places.amax(1) - places.amin(1)  # of rows, and of columns
    return bool(ranges.max() > _LEAST_RANGE)


def grids_of(cells: int) -> list[Grid]:
    """Return every grid (rows, columns) of so many cells."""
    return [(rows, cells // rows) for rows in range(1, cells + 1) if cells % rows == 0]


def best_grid(places: Places, image_size: Grid) -> tuple[Grid, float]:
    """Return the grid in which the cells lie best row by row, and its `grid_fit`.

    The fit is 0 if it is not clear enough. Several grids may have this number of cells: one without
    the image's proportions must fit better.
    """
    fits = list[tuple[float, Grid]]()
    cells = places.shape[1]
    for grid in grids_of(cells):
        if not is_possible(grid, image_size):
            continue
        fit = grid_fit(places, grid)
        if has_proportions(grid, image_size):
            is_clear = fit >= FITS
        else:
            is_clear = fit >= _FITS_OTHER_PROPORTIONS and cells >= _LEAST_CELLS_OTHER_PROPORTIONS
        fits.append((fit if is_clear else 0.0, grid))
    best_fit, fitting_grid = max(fits, default=(0.0, (1, 1)))
    return fitting_grid, best_fit


def has_proportions(grid: Grid, image_size: Grid) -> bool:
    """Return True if a grid divides an image into about square cells.

    With the rows of the grid, square cells would make rows x width / height columns. The grid has
    as many, to less than one.
    """
    columns_of_square_cells = grid[0] * image_size[1] / image_size[0]
    return is_possible(grid, image_size) and abs(columns_of_square_cells - grid[1]) < 1


def is_possible(grid: Grid, image_size: Grid) -> bool:
    """Return True if a map of an image can have this grid.

    Its cells must have a pixel or more on each side, and not be much longer than wide.
    """
    height = image_size[0] / grid[0]
    width = image_size[1] / grid[1]
    shorter = min(height, width)
    return shorter >= 1 and max(height, width) <= _LARGEST_ASPECT_RATIO * shorter


def _correlations(places: Places, grid: Grid) -> list[tuple[float, float]]:
    """Return the pair (along, across) of the rows of a grid, then that of its columns.

    `along` is the correlation of a cell's row (column) with its mean band on the same axis, and
    `across` the correlation with its mean band on the other axis. The latter is in units of the
    larger spread, because the mean bands of a few cells vary by chance. An axis with only one cell
    is left out.
    """
    centred = places.double() - places.double().mean(1, keepdim=True)  # (rows or columns, cells)
    spread = centred.norm(dim=1)
    rows = torch.arange(grid[0]).repeat_interleave(grid[1]).double()
    columns = torch.arange(grid[1]).repeat(grid[0]).double()
    correlations = []
    for axis, position in enumerate((rows, columns)):
        if grid[axis] == 1:
            continue
        other_axis = 1 - axis
        offset = position - position.mean()
        direction = offset / offset.norm()
        along = centred[axis] @ direction / spread[axis]
        across = centred[other_axis] @ direction / spread.max()
        correlations.append((float(along.nan_to_num(0.0)), float(across.nan_to_num(0.0))))
    return correlations
