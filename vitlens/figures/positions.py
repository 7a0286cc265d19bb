"""How alike a model's position embeddings are: the whole matrix, and one map for each patch."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import SIGNED, TALL, WIDE, bare, heading, sheet, styled

_MOST = 8  # maps down or across that can still be read


@styled
def position_matrix(*, similarity: ArrayLike, grid: tuple[int, int]) -> Figure:
    """Cosine similarity (patches, patches) of every position with every other, patches row by row of grid.

    Colours are symmetric around 0; they reach to the greatest similarity of two different positions, since each is 1
    with itself. Raises InputError unless similarity is square, as large as the grid says, and within [-1, 1].
    """
    values = _similarities(similarity, grid)
    figure = sheet(4.6, 3.9)
    axes = figure.add_subplot()
    scale = _scale(values)
    axes.imshow(values, cmap=SIGNED, norm=scale.norm, interpolation="nearest")
    rows, columns = grid
    step = -(-rows // 7)
    starts = np.arange(0, rows, step)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(starts * columns + (columns - 1) / 2, labels=[str(row + 1) for row in starts])
        axis.set_label_text(f"patch, by row of the grid ({columns} a row)")
    axes.spines[:].set_visible(False)
    colour_bar(figure, [axes], scale=scale, label="cosine similarity", colours=SIGNED)
    heading(figure, f"Position embeddings: cosine similarity of {rows}×{columns} positions")
    return figure


@styled
def position_maps(*, similarity: ArrayLike, grid: tuple[int, int]) -> Figure:
    """For each position, its cosine similarity with all positions, as a map that stands where the position does.

    similarity: (patches, patches), row by row of grid. At most 8 by 8 are drawn: of a larger grid evenly spaced ones,
    and the title says so. A ring marks the position itself. Scale and errors as position_matrix.
    """
    values = _similarities(similarity, grid).reshape(*grid, *grid)
    scale = _scale(values.reshape(grid[0] * grid[1], -1))
    chosen = [_spread(length) for length in grid]
    down, across = len(chosen[0]), len(chosen[1])
    ratio = grid[0] / grid[1]
    panel = min((WIDE - 1.2) / across, (TALL - 1) / down / ratio, 0.75)
    figure = sheet(max(4.0, panel * across + 1.2), panel * ratio * down + 0.3)
    cells = figure.subplots(down, across, squeeze=False, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    for (y, x), axes in np.ndenumerate(cells):
        row, column = chosen[0][y], chosen[1][x]
        axes.imshow(values[row, column], cmap=SIGNED, norm=scale.norm, interpolation="nearest")
        axes.plot(column, row, "o", markersize=3, markerfacecolor="none", markeredgecolor="black", markeredgewidth=0.7)
        if y == down - 1:
            axes.set_xlabel(f"{column + 1}" if x else f"column {column + 1}")
        if x == 0:
            axes.set_ylabel(f"{row + 1}" if y else f"row {row + 1}", rotation=0, ha="right", va="center")
    bare(cells.flat)
    colour_bar(figure, list(cells.flat), scale=scale, label="cosine similarity", colours=SIGNED)
    share = "" if (down, across) == grid else f"; {down}×{across} of {grid[0]}×{grid[1]} positions, evenly spaced"
    heading(figure, f"Each position's similarity with all positions, in its place (ring: itself){share}")
    return figure


def _similarities(similarity: ArrayLike, grid: tuple[int, int]) -> Array:
    values = as_array(similarity, name="similarity", axes=("patches", "patches"))
    patches = grid[0] * grid[1]
    if values.shape != (patches, patches):
        raise InputError(f"expected similarity of shape ({patches}, {patches}) for a {grid} grid, found {values.shape}")
    if np.abs(values).max() > 1 + 1e-3:
        raise InputError(
            f"expected cosine similarity in [-1, 1], found {np.abs(values).max():.3g}; divide by the norms"
        )
    return values


def _scale(values: Array) -> Scale:
    """Symmetric around 0, as wide as the off-diagonal needs; 1 for a single position."""
    different = np.abs(values[~np.eye(len(values), dtype=bool)])
    most = float(different.max()) if different.size else 0.0
    return Scale(-most, most, clipped=bool(most < 1)) if most > 1e-6 else Scale(-1.0, 1.0)


def _spread(length: int) -> list[int]:
    """At most eight indices, evenly spaced from the middle out."""
    step = -(-length // _MOST)
    first = (length - 1) % step // 2
    return list(range(first, length, step))
