"""The effective receptive field: how far the middle patch of each layer sees, and its maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import Margins, board, without_frames
from vitlens.figures.curves import models_legend, series_style
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.style import MAGNITUDE, SMALL, TALL, WIDE, heading, sheet, shortened, styled

_NAME: Final = 1.1  # inch at the left, for a model's name
_LARGEST: Final = 1.5  # inch, the widest panel


@dataclass(frozen=True)
class FieldCurve:
    """One model by layer: distances (px), (layers, 3) with the ends of their intervals.

    seen: the share (fraction) of the pixels with any gradient; uniform: the distance (px) if all pixels were alike;
    each (layers,).
    """

    name: str
    distances: ArrayLike
    seen: ArrayLike
    uniform: ArrayLike


@styled
def field_by_depth(*, curves: Sequence[FieldCurve]) -> Figure:
    """Distance (px) to the pixels that move the middle patch, and share of pixels (%) with any gradient.

    One line a model over its layers, from 0. Raises InputError for no model, or shapes that do not fit.
    """
    if not curves:
        raise InputError("expected the receptive field of at least one model, found none")
    figure = sheet(WIDE, 2.5)
    left, right = figure.subplots(1, 2)
    deepest = 0
    for index, curve in enumerate(curves):
        colour, _ = series_style(index)
        distances = as_array(curve.distances, name=f"distances of {curve.name}", axes=("layers", "3"))
        seen = 100 * as_array(curve.seen, name=f"seen of {curve.name}", axes=("layers",))
        uniform = as_array(curve.uniform, name=f"uniform of {curve.name}", axes=("layers",))
        for name, values in (("seen", seen), ("uniform", uniform)):
            require_length(len(values), len(distances), name=name, of=f"the layers of {curve.name}")
        deepest = max(deepest, len(distances))
        _line(left, distances, index)
        _line(right, np.stack([seen] * 3, 1), index)
        left.plot(uniform, color=colour, linestyle="--", linewidth=0.8)
    left.set(title="distance to the pixels, weighted by gradient (px)", ylim=(0, None))
    right.set(title="share of the pixels with any gradient (%)", ylim=(0, 104))
    for axes in (left, right):
        axes.set_xticks(range(0, deepest, max(1, -(-deepest // 8))))
        axes.set_xlabel("layer (of a CNN: stage)")
        axes.grid(axis="y")
    models_legend(figure, [shortened(curve.name, 30) for curve in curves])
    heading(figure, "Effective receptive field by layer; dashed: all pixels alike; bands: 95 % intervals")
    return figure


@styled
def field_maps(*, fields: Mapping[str, Sequence[ArrayLike]]) -> Figure:
    """The norm of the gradient (height, width) at each layer: a row for each model, or more where layers are many.

    Each map has its own colours, from 0 to its largest value by the square root; pixels of exactly 0 are grey. Raises
    InputError for no map, or a negative number.
    """
    rows = {name: [_field(name, layer) for layer in layers] for name, layers in fields.items()}
    if not any(rows.values()):
        raise InputError("expected the receptive field of at least one layer, found none")
    across = min(max(len(layers) for layers in rows.values()), 8)
    lines = [(name, start) for name, layers in rows.items() for start in range(0, len(layers), across)]
    first = next(layers[0] for layers in rows.values() if layers)
    ratio = first.shape[0] / first.shape[1]
    side = min((WIDE - _NAME) / across - 0.07, ((TALL - 0.6) / len(lines) - 0.25) / ratio, _LARGEST)
    drawn = board(
        title="Effective receptive field of the middle patch, layer by layer; each map has its own colours",
        count=len(lines) * across,
        across=across,
        panel=(side, side * ratio),
        gap=(0.07, 0.25),
        margins=Margins(left=_NAME, top=0.2),
    )
    without_frames(drawn.panels)
    colours = matplotlib.colormaps[MAGNITUDE].with_extremes(bad="#D9D9D9")
    for line, (name, start) in enumerate(lines):
        panels = drawn.panels[line * across : (line + 1) * across]
        shown = rows[name][start : start + across]
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        for offset, (axes, values) in enumerate(zip(panels, shown)):
            norm = PowerNorm(0.5, vmin=0.0, vmax=values.max() or 1.0)
            axes.imshow(np.where(values > 0, values, np.nan), cmap=colours, norm=norm)
            axes.set_title(f"L{start + offset}", fontsize=SMALL, pad=2)
        if not start:
            panels[0].set_ylabel(shortened(name, 18), rotation=0, ha="right", va="center", fontsize=SMALL)
    return drawn.figure


def _field(name: str, values: ArrayLike) -> Array:
    field = as_array(values, name=f"receptive field of {name}", axes=("height", "width"))
    if field.min() < 0:
        raise InputError(f"expected norms of gradients of at least 0 in {name}, found {field.min():g}")
    return field


def _line(axes: Axes, values: Array, index: int) -> None:
    colour, marker = series_style(index)
    axes.fill_between(range(len(values)), values[:, 1], values[:, 2], color=colour, alpha=0.15, linewidth=0)
    axes.plot(values[:, 0], marker=marker, markersize=3.6, color=colour)
