"""Similarity of a model's position embeddings: one map for each patch."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import MAGNITUDE, SIGNED, TALL, WIDE, shortened, styled

_MOST = 8  # most maps in a row or column
_PANELS = 3  # models in a row


@styled
def position_maps(*, similarity: ArrayLike, grid: tuple[int, int]) -> Figure:
    """A map for each position, at its place in the grid: its cosine similarity with all positions.

    similarity: (patches, patches), row by row of grid. At most 8 by 8 are drawn, evenly spaced in a larger grid,
    as the title says. A ring marks the position itself. Colours are symmetric around 0, up to the greatest similarity
    of two different positions. Raises InputError unless similarity is square, of the size of the grid, and within
    [-1, 1].
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


@styled
def position_panels(*, similarities: Mapping[str, ArrayLike], grid: tuple[int, int], title: str) -> Figure:
    """The maps of `position_maps` of several models of one grid side by side, each model as one panel.

    similarities: (patches, patches) by the model's name. Every panel has its own scale and bar, from the least value
    where none is negative. Raises InputError for none, and as `position_maps` does.
    """
    if not similarities:
        raise InputError("expected the similarities of at least one model, found none")
    across = min(len(similarities), _PANELS)
    wide = (WIDE - 0.2 * (across + 1)) / max(across, 2)
    tall = wide * grid[0] / grid[1]
    drawn = board(
        title=title,
        count=len(similarities),
        across=across,
        panel=(wide, tall),
        gap=(0.2, 0.85),
        margins=Margins(left=0.2, right=0.2, top=0.24, bottom=0.55),
    )
    for index, (axes, (name, similarity)) in enumerate(zip(drawn.panels, similarities.items())):
        values = _similarities(similarity, grid)
        lowest = float(values.min())
        colours = SIGNED if lowest < 0 else MAGNITUDE
        scale = _scale(values) if lowest < 0 else replace(_scale(values), low=lowest)
        axes.imshow(_mosaic(values, grid), cmap=colours, norm=scale.norm, interpolation="nearest", aspect="auto")
        axes.set_title(shortened(name, 28))
        down, right = divmod(index, across)
        x, y = drawn.left + right * (wide + 0.2), drawn.top + down * (tall + 0.85)
        bar = drawn.place(x + 0.15 * wide, y + tall + 0.08, 0.7 * wide, 0.09)
        colour_bar(bar, scale=scale, label="cosine similarity", colours=colours, place="horizontal")
    without_frames(drawn.panels)
    return drawn.figure


def _mosaic(values: Array, grid: tuple[int, int]) -> Array:
    """The maps of at most 8 by 8 positions, each at its place, with empty lines between them."""
    maps = values.reshape(*grid, *grid)[np.ix_(*map(_spread, grid))]  # (down, across, rows, columns)
    gap = max(1, round(max(grid) / 12))
    padded = np.pad(maps, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    down, across, rows, columns = padded.shape
    mosaic: Array = padded.transpose(0, 2, 1, 3).reshape(down * rows, across * columns)
    return mosaic[:-gap, :-gap]


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
