"""Figure of the windows of a windowed model: their patches, what a shift connects, and the mask."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts.overlay import Array, enlarged
from vitlens.charts.panels import Margins, board, without_frames
from vitlens.charts.style import (
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    abreast,
    full_width,
    styled,
)

_FOUR: Final = (SKY, ORANGE, GREEN, PURPLE)  # so that neighbours differ
_TINT: Final = 0.35  # opacity of a window's colour over the image


@styled
def windows_and_shift(
    *,
    image: Array,
    parts: Sequence[Array],
    reach: Sequence[Array],
    mask: Array,
    patch: tuple[int, int],
    layers: tuple[int, int],
    title: str,
) -> Figure:
    """Draw four panels: the windows of two successive layers, the reach of a patch, and the mask.

    image: (3, height, width) in [0, 1].
    parts: (rows, columns) for each layer, the number of the part of a window that a patch is in. A
        patch attends only to patches of its part.
    reach: (rows, columns) after each layer, above 0 for the patches on which `patch` depends.
    mask: (places, places) of the second layer's last window, above 0 if a query may attend to a
        key.
    patch: the (row, column) of the patch.
    layers: the numbers of both layers.
    """
    seen = [np.asarray(values) > 0 for values in reach]
    across = abreast(4)
    side = (full_width() - 0.12 * across) / across
    tall = side * min(image.shape[1] / image.shape[2], 1.5)
    margins = Margins(top=0.36, bottom=0.22)
    drawn = board(
        title=title, count=4, across=across, panel=(side, tall), gap=(0.12, 0.6), margins=margins
    )
    for axes, values, number in zip(drawn.panels, parts, layers):
        _draw_parts(axes, image, values)
        axes.set_title(
            f"layer {number}: {len(np.unique(values))} parts,\nno attention between them"
        )
    _borders(drawn.panels[1], parts[0], "white", width=0.7, style=":")
    _draw_reach(drawn.panels[2], image, seen, patch)
    row, column = patch
    drawn.panels[2].set_title(
        f"patches seen by ({row}, {column}):\n{seen[0].sum()}, then {seen[1].sum()} patches"
    )
    masked = drawn.panels[3]
    masked.imshow(
        np.asarray(mask) > 0,
        cmap=ListedColormap(["white", "#333333"]),
        vmin=0,
        vmax=1,
        aspect="auto",
    )
    masked.set_title(f"mask of layer {layers[1]}'s last\nwindow (dark: may attend)")
    without_frames(drawn.panels)
    masked.spines[:].set(visible=True, color=GREY)
    masked.set_xlabel("key, row by row", labelpad=2)
    masked.set_ylabel("query", labelpad=1)
    return drawn.figure


def _draw_parts(axes: Axes, picture: Array, parts: Array) -> None:
    """Draw the image tinted by part, with a line between patches of different parts."""
    rows, columns = parts.shape
    extent = (0.0, float(columns), float(rows), 0.0)
    axes.imshow(enlarged(picture), extent=extent, aspect="auto")
    axes.imshow(
        _colour_parts(parts),
        cmap=ListedColormap(_FOUR),
        vmin=0,
        vmax=3,
        alpha=_TINT,
        extent=extent,
        aspect="auto",
    )
    _borders(axes, parts, "black")


def _colour_parts(parts: Array) -> Array:
    """Return the number of one of four colours for each patch, so that neighbouring parts differ.

    Parts lie in rows and columns, so both alternate between two.
    """
    begins_below = np.any(parts[1:] != parts[:-1], axis=1)
    begins_right = np.any(parts[:, 1:] != parts[:, :-1], axis=0)
    row_parity = np.cumsum([False, *begins_below]) % 2
    column_parity = np.cumsum([False, *begins_right]) % 2
    return np.asarray(2.0 * row_parity[:, None] + column_parity)


def _borders(
    axes: Axes, parts: Array, colour: str, *, width: float = 0.8, style: str = "-"
) -> None:
    """Draw a line between patches of different parts, at the lower and right edges of a patch."""
    for row, column in np.argwhere(parts[1:] != parts[:-1]):
        axes.plot([column, column + 1], [row + 1, row + 1], style, color=colour, linewidth=width)
    for row, column in np.argwhere(parts[:, 1:] != parts[:, :-1]):
        axes.plot([column + 1, column + 1], [row, row + 1], style, color=colour, linewidth=width)


def _draw_reach(
    axes: Axes, picture: Array, seen: Sequence[NDArray[np.bool_]], patch: tuple[int, int]
) -> None:
    """Draw the image, clear within the reach of the first layer and pale outside the reach of both.

    Patches that the second layer adds are tinted.
    """
    rows, columns = seen[0].shape
    extent = (0.0, float(columns), float(rows), 0.0)
    axes.imshow(enlarged(picture), extent=extent, aspect="auto")
    covers = np.ones((rows, columns))  # 1: white, 0: orange, NaN: nothing over the image
    covers[seen[1]] = 0.0
    covers[seen[0]] = np.nan
    colours = ListedColormap([ORANGE, "white"])
    opacity = np.where(covers == 1, 0.8, 0.5)
    axes.imshow(covers, cmap=colours, vmin=0, vmax=1, alpha=opacity, extent=extent, aspect="auto")
    _borders(axes, seen[1].astype(np.float64), "black")
    axes.plot(
        patch[1] + 0.5,
        patch[0] + 0.5,
        "o",
        color=VERMILLION,
        markersize=3.5,
        markeredgecolor="white",
    )
