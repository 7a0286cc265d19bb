"""Similarity of a model's position embeddings: the whole matrix, and one map for each patch."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import SIGNED, TALL, WIDE, styled

_MOST = 8  # most maps in a row or column


@styled
def position_matrix(*, similarity: ArrayLike, grid: tuple[int, int]) -> Figure:
    """Cosine similarity (patches, patches) of all pairs of positions, patches row by row of grid.

    Colours are symmetric around 0, up to the greatest similarity of two different positions. Raises InputError unless
    similarity is square, of the size of the grid, and within [-1, 1].
    """
    values = _similarities(similarity, grid)
    rows, columns = grid
    drawn = board(
        title=f"Position embeddings: cosine similarity of {rows}×{columns} positions",
        count=1,
        across=1,
        panel=(3.6, 3.6),
        gap=(0.0, 0.0),
        margins=Margins(left=0.55, right=BAR_ROOM, bottom=0.5),
    )
    axes = drawn.panels[0]
    axes.imshow(values, cmap=SIGNED, norm=_scale(values).norm, interpolation="nearest")
    starts = np.arange(0, rows, -(-rows // _MOST))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(starts * columns + (columns - 1) / 2, labels=[str(row) for row in starts])
        axis.set_label_text(f"row of the grid ({columns} patches each)")
    axes.spines[:].set_visible(False)
    colour_bar(drawn.bar(), scale=_scale(values), label="cosine similarity", colours=SIGNED)
    return drawn.figure


@styled
def position_maps(*, similarity: ArrayLike, grid: tuple[int, int]) -> Figure:
    """A map for each position, at its place in the grid: its cosine similarity with all positions.

    similarity: (patches, patches), row by row of grid. At most 8 by 8 are drawn, evenly spaced in a larger grid,
    as the title says. A ring marks the position itself. Scale and errors as position_matrix.
    """
    values = _similarities(similarity, grid).reshape(*grid, *grid)
    scale = _scale(values.reshape(grid[0] * grid[1], -1))
    chosen = [_spread(length) for length in grid]
    down, across = len(chosen[0]), len(chosen[1])
    ratio = grid[0] / grid[1]
    margins = Margins(left=0.6, right=BAR_ROOM, bottom=0.28)
    panel = min(
        (WIDE - margins.left - margins.right) / across - 0.06,
        ((TALL - 1) / down - 0.06) / ratio,
        0.62,
    )
    share = "" if (down, across) == grid else f"; {down}×{across} of {grid[0]}×{grid[1]} positions, evenly spaced"
    drawn = board(
        title=f"Similarity of each position with all positions, at its place in the grid (ring: itself){share}",
        count=down * across,
        across=across,
        panel=(panel, panel * ratio),
        gap=(0.06, 0.06),
        margins=margins,
    )
    for index, axes in enumerate(drawn.panels):
        y, x = divmod(index, across)
        row, column = chosen[0][y], chosen[1][x]
        axes.imshow(values[row, column], cmap=SIGNED, norm=scale.norm, interpolation="nearest")
        axes.plot(
            column, row, "o", markersize=3.5, markerfacecolor="none", markeredgecolor="black", markeredgewidth=0.8
        )
        if y == down - 1:
            axes.set_xlabel(f"{column}" if x else f"column {column}", labelpad=2)
        if x == 0:
            axes.set_ylabel(f"{row}" if y else f"row {row}", rotation=0, ha="right", va="center")
    without_frames(drawn.panels)
    colour_bar(drawn.bar(), scale=scale, label="cosine similarity", colours=SIGNED)
    return drawn.figure


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
    """Symmetric around 0, up to the greatest off-diagonal value; to 1 for a single position."""
    different = np.abs(values[~np.eye(len(values), dtype=bool)])
    most = float(different.max()) if different.size else 0.0
    return Scale(-most, most, clipped=bool(most < 1)) if most > 1e-6 else Scale(-1.0, 1.0)


def _spread(length: int) -> list[int]:
    """At most eight indices, evenly spaced and centred."""
    step = -(-length // _MOST)
    first = (length - 1) % step // 2
    return list(range(first, length, step))
