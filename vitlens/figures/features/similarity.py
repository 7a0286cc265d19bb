"""Similarity of the layers of models: maps of layers by layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Margins, board
from vitlens.figures.gaps import as_measured, no_value_patch
from vitlens.figures.inputs import Array
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import MAGNITUDE, SMALL, WIDE, shortened, styled


@dataclass(frozen=True)
class LayerMap:
    """Similarity (rows, columns) of the layers of one model (down) with those of another, or its own (across); rows,
    columns: the names of the two; embedded: whether the first row is the embedding, and the first column."""

    values: ArrayLike
    rows: str
    columns: str
    embedded: tuple[bool, bool] = (False, False)


@styled
def layer_similarity(*, maps: Sequence[LayerMap], title: str, label: str, lowest: float | None = None) -> Figure:
    """Maps of similarity side by side, with one colour scale up to 1; layers count from 0, an embedding before them is
    marked E.

    values may be NaN, drawn hatched; lowest: the lower end of the colours (default: 0, or the least value where it is
    negative); label: at the colour bar. In maps of two models the greatest value of every row is marked by a dot.
    Raises InputError for no map or a value above 1.
    """
    if not maps:
        raise InputError("expected at least one map of similarity, found none")
    measured = [
        as_measured(pair.values, name=f"similarity of {pair.rows} and {pair.columns}", axes=("rows", "columns"))
        for pair in maps
    ]
    least = min(float(np.nanmin(values)) for values in measured)
    most = max(float(np.nanmax(values)) for values in measured)
    if most > 1 + 1e-3:
        raise InputError(f"expected similarities of at most 1, found {most:.3g}")
    scale = Scale(min(0.0, least) if lowest is None else lowest, 1.0)
    across = min(3, len(maps))
    wide = min((WIDE - BAR_ROOM - 0.5 - 0.55 * (across - 1)) / across, 2.4)
    tall = wide * float(np.clip(max(values.shape[0] / values.shape[1] for values in measured), 0.6, 1.4))
    drawn = board(
        title=title,
        count=len(maps),
        across=across,
        panel=(wide, tall),
        gap=(0.55, 0.55),
        margins=Margins(left=0.5, right=BAR_ROOM, top=0.06, bottom=0.42),
    )
    for axes, pair, values in zip(drawn.panels, maps, measured, strict=True):
        axes.add_patch(no_value_patch(transform=axes.transAxes, zorder=-1))
        axes.imshow(values, cmap=MAGNITUDE, norm=scale.norm, aspect="auto", origin="lower")
        axes.spines[:].set_visible(False)
        _count(axes.xaxis, values.shape[1], wide / 0.22, embedded=pair.embedded[1])
        _count(axes.yaxis, values.shape[0], tall / 0.18, embedded=pair.embedded[0])
        letters = int(wide / 0.075)
        axes.set_xlabel(f"layer of {shortened(pair.columns, letters - 9)}", fontsize=SMALL)
        axes.set_ylabel(f"layer of {shortened(pair.rows, letters - 9)}", fontsize=SMALL)
        if pair.rows != pair.columns:
            _mark_greatest(axes, values)
    colour_bar(drawn.bar(), scale=scale, label=label)
    return drawn.figure


def _count(axis: Axis, count: int, room: float, *, embedded: bool) -> None:
    """Label as many layers, from 0, as there is room for, and the embedding before them."""
    first = int(embedded)
    places = range(first, count, -(-count // max(1, int(room))))
    labels = ["E"] * first + [str(place - first) for place in places]
    axis.set_ticks([*range(first), *places], labels=labels)


def _mark_greatest(axes: Axes, values: Array) -> None:
    """Mark the layer of the other model that is most similar to each row's layer by a dot."""
    across = np.nan_to_num(values, nan=-np.inf).argmax(1)
    (dots,) = axes.plot(across, np.arange(len(values)), "o", color="white", markersize=3)
    dots.set(markeredgecolor="black", markeredgewidth=0.5)
