"""The attention of every head in space: a floor a layer, a plane of patches a head."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from vitlens.charts.style import GREY, MAGNITUDE, WIDE, DisplayedFigure, styled, wrapped_title

_GAP: Final = 0.15  # between planes, as a share of a plane's side
_FAINTEST: Final = 0.25  # times uniform: the least that has a colour of its own
_SIZES: Final = (1.5, 40.0)  # points squared, of a marker


@styled
def attention_space(
    *,
    layer: ArrayLike,
    head: ArrayLike,
    row: ArrayLike,
    column: ArrayLike,
    share: ArrayLike,
    grid: tuple[int, int],
    title: str,
) -> Figure:
    """Points (points,) by layer, head, row and column; share: of the attention, 1 that of a uniform map.

    grid: rows and columns of a head's plane.
    """
    layers, heads, shares = np.asarray(layer), np.asarray(head), np.asarray(share, dtype=np.float64)
    text, _ = wrapped_title(title, WIDE)
    figure = DisplayedFigure(figsize=(WIDE, 5.4))
    figure.suptitle(text, y=0.985, va="top")
    axes: Any = figure.add_axes((0.0, 0.02, 0.86, 0.94), projection="3d", computed_zorder=False)
    x, y, z = outlines(sorted(set(layers.tolist())), int(heads.max()) + 1, grid)
    axes.plot(x, y, z, color=GREY, linewidth=0.4)
    strength = strengths(shares)
    colours = colours_of(shares)
    order = np.argsort(shares)
    places = across(heads, np.asarray(column), grid), grid[0] - 1 - np.asarray(row), layers
    drawn = axes.scatter(
        *(each[order] for each in places),
        c=colours[order],
        s=(_SIZES[0] + (_SIZES[1] - _SIZES[0]) * strength)[order],
        cmap=MAGNITUDE,
        norm=Normalize(float(colours.min()), float(max(colours.max(), colours.min() + 1e-6))),
        depthshade=False,
        linewidth=0,
    )
    powers, names = ticks(shares)
    bar = figure.colorbar(drawn, cax=figure.add_axes((0.89, 0.25, 0.016, 0.5)))
    bar.set_ticks([power for power in powers if colours.min() <= power <= colours.max()])
    bar.set_ticklabels([name for power, name in zip(powers, names) if colours.min() <= power <= colours.max()])
    bar.set_label("times uniform")
    _name_axes(axes, layers, int(heads.max()) + 1, grid)
    return figure


def _name_axes(axes: Any, layers: NDArray[np.integer], heads: int, grid: tuple[int, int]) -> None:
    known = sorted(set(layers.tolist()))
    axes.set_xticks(middles(heads, grid), [f"H{head}" for head in range(heads)])
    axes.set_yticks([])
    axes.set_zticks(known, [f"L{each}" for each in known])
    axes.set_xlabel("head")
    axes.set_ylabel("row")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.pane.set_visible(False)
    axes.set_box_aspect((1.6, 0.7, 1.1), zoom=1.2)
    axes.view_init(elev=22, azim=-72)


def across(head: NDArray[np.integer], column: NDArray[np.integer], grid: tuple[int, int]) -> NDArray[np.floating]:
    """Where points lie from left to right: the planes of the heads beside each other."""
    return np.asarray(head * (1 + _GAP) * grid[1] + column, dtype=np.float64)


def middles(heads: int, grid: tuple[int, int]) -> list[float]:
    """The middle of each head's plane, from left to right."""
    return [(head * (1 + _GAP) + 0.5) * grid[1] for head in range(heads)]


def strengths(share: NDArray[np.floating]) -> NDArray[np.floating]:
    """How large points are, from 0 to 1."""
    return np.asarray(np.sqrt(np.clip(share / max(float(share.max()), 1e-12), 0, 1)))


def colours_of(share: NDArray[np.floating]) -> NDArray[np.floating]:
    """The colours of points as numbers: powers of 2."""
    return np.asarray(np.log2(np.maximum(share, _FAINTEST)))


def ticks(share: NDArray[np.floating]) -> tuple[list[int], list[str]]:
    """Ticks of the colours, at powers of 2, and what they say."""
    top = int(np.ceil(np.log2(max(float(share.max()), 1.0))))
    powers = list(range(-2, top + 1))
    return powers, [f"{2.0**power:.3g}" for power in powers]


def outlines(layers: Sequence[int], heads: int, grid: tuple[int, int]) -> tuple[list[float], list[float], list[float]]:
    """The outline of each head's plane on each floor: x, y and z, with NaN between two."""
    rows, columns = grid
    x: list[float] = []
    y: list[float] = []
    z: list[float] = []
    for layer in layers:
        for head in range(heads):
            left = head * (1 + _GAP) * columns - 0.5
            x += [left, left + columns, left + columns, left, left, np.nan]
            y += [-0.5, -0.5, rows - 0.5, rows - 0.5, -0.5, np.nan]
            z += [*[float(layer)] * 5, np.nan]
    return x, y, z
