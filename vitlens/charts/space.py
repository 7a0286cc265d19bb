"""The attention of every head in space: a floor a layer, a plane of patches a head."""

from typing import Any, Final

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

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
    floors, planes = sorted(set(layers.tolist())), int(heads.max()) + 1
    text, _ = wrapped_title(title, WIDE)
    figure = DisplayedFigure(figsize=(WIDE, 5.4))
    figure.suptitle(text, y=0.985, va="top")
    axes: Any = figure.add_axes((0.0, 0.02, 0.86, 0.94), projection="3d", computed_zorder=False)
    square = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0], [np.nan, np.nan]]) * (grid[1], grid[0]) - 0.5
    lefts = np.arange(planes)[:, None] * (1 + _GAP) * grid[1]
    outlines = (  # of each head's plane on each floor
        np.tile((lefts + square[:, 0]).ravel(), len(floors)), np.tile(square[:, 1], planes * len(floors)),
        np.repeat(np.array(floors, dtype=np.float64), planes * len(square)),
    )  # fmt: skip
    axes.plot(*outlines, color=GREY, linewidth=0.4)
    sizes = _SIZES[0] + (_SIZES[1] - _SIZES[0]) * np.sqrt(np.clip(shares / max(float(shares.max()), 1e-12), 0, 1))
    colours = np.log2(np.maximum(shares, _FAINTEST))  # powers of 2
    low, high = float(colours.min()), float(colours.max())
    order = np.argsort(shares)
    places = heads * (1 + _GAP) * grid[1] + np.asarray(column), grid[0] - 1 - np.asarray(row), layers
    drawn = axes.scatter(
        *(each[order] for each in places),
        c=colours[order],
        s=sizes[order],
        cmap=MAGNITUDE,
        norm=Normalize(low, max(high, low + 1e-6)),
        depthshade=False,
        linewidth=0,
    )
    powers = [power for power in range(-2, int(np.ceil(max(high, 0.0))) + 1) if low <= power <= high]
    bar = figure.colorbar(drawn, cax=figure.add_axes((0.89, 0.25, 0.016, 0.5)))
    bar.set_ticks(powers)
    bar.set_ticklabels([f"{2.0**power:.3g}" for power in powers])
    bar.set_label("times uniform")
    middles = [(plane * (1 + _GAP) + 0.5) * grid[1] for plane in range(planes)]
    axes.set_xticks(middles, [f"H{plane}" for plane in range(planes)])
    axes.set_yticks([])
    axes.set_zticks(floors, [f"L{floor}" for floor in floors])
    axes.set_xlabel("head")
    axes.set_ylabel("row")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.pane.set_visible(False)
    axes.set_box_aspect((1.6, 0.7, 1.1), zoom=1.2)
    axes.view_init(elev=22, azim=-72)
    return figure
