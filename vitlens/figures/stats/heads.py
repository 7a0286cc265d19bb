"""Statistics of every head as maps of layers by heads."""

import textwrap
from collections.abc import Mapping
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import Board, Margins, board
from vitlens.figures.gaps import as_measured, no_value_patch, require_known, require_panel_count, require_shape
from vitlens.figures.inputs import Array
from vitlens.figures.overlay import Scale, colour_bar, is_constant
from vitlens.figures.signed import number_places
from vitlens.figures.style import MAGNITUDE, WIDE, shortened, styled

_HEADS: Final = ("layers", "heads")
_BAR: Final = 0.88  # inch beside a heat map for its own colour bar


@styled
def head_heatmaps(
    *,
    values: Mapping[str, ArrayLike],
    title: str,
    units: Mapping[str, str] | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """One to six statistics of every head, each a map of layers (down) by heads (across) with its own colour scale.

    values: by name, (layers, heads), NaN where there is no value, drawn hatched; units: by name, the label of the
    colour bar; limits: by name, the range of its colours (default: least to greatest). Layers and heads are labelled
    from 0. Raises InputError when shapes differ, where a statistic has no value at all or one beyond its limits.
    """
    maps, units, limits = _statistics(values), units or {}, limits or {}
    require_known([*units, *limits], maps)
    scales = {name: _scale(name, array, limits.get(name)) for name, array in maps.items()}
    return _heat_maps(maps, scales, units, title).figure


def _scale(name: str, values: Array, limits: tuple[float, float] | None) -> Scale:
    """From the lower to the upper limit, which all values must lie between; without limits from least to greatest."""
    least, most = float(np.nanmin(values)), float(np.nanmax(values))
    if limits is None:
        return Scale(least, least if is_constant(values[~np.isnan(values)]) else most)
    low, high = limits
    room = 1e-6 * (high - low)  # for rounding
    if not low - room <= least <= most <= high + room:
        raise InputError(f"expected {name!r} within its limits {low:g} to {high:g}, found {least:.3g} to {most:.3g}")
    return Scale(low, high)


def _heat_maps(
    maps: Mapping[str, Array],
    scales: Mapping[str, Scale],
    units: Mapping[str, str],
    title: str,
) -> Board:
    """One panel per statistic with its own colour bar, cells as square as the page allows."""
    layers, heads = next(iter(maps.values())).shape
    across = len(maps) if len(maps) < 3 else 2 if len(maps) == 4 else 3
    titles = [textwrap.fill(name, 26 if across == 3 else 46) for name in maps]
    gaps = any(np.isnan(array).any() for array in maps.values())
    gap = (_BAR + 0.24, 0.58 + 0.14 * max(text.count("\n") for text in titles))
    margins = Margins(left=0.45, right=_BAR, top=gap[1] - 0.36, bottom=0.38 + 0.22 * gaps)
    wide = min((WIDE - margins.left - margins.right + gap[0]) / across - gap[0], 2.5)
    tall = float(np.clip(wide * layers / heads, 0.9, 2.8))  # so that two rows of panels fit on a page
    drawn = board(title=title, count=len(maps), across=across, panel=(wide, tall), gap=gap, margins=margins)
    for index, (axes, (name, array)) in enumerate(zip(drawn.panels, maps.items(), strict=True)):
        row, column = divmod(index, across)
        beside = drawn.left + column * (wide + gap[0]) + wide + 0.06
        axes.add_patch(no_value_patch(transform=axes.transAxes, zorder=-1))
        axes.imshow(array, cmap=MAGNITUDE, norm=scales[name].norm, aspect="auto")
        axes.spines[:].set_visible(False)
        axes.set_title(titles[index])
        number_places(axes.xaxis, heads, wide / 0.2)
        number_places(axes.yaxis, layers, tall / 0.16)
        axes.set(xlabel="head", ylabel="" if column else "layer")
        bar = drawn.place(beside, drawn.top + row * (tall + gap[1]), 0.09, tall)
        unit = shortened(units.get(name, ""), int(13 * (tall + 0.35)))
        colour_bar(bar, scale=scales[name], label=unit)
    if gaps:
        drawn.figure.legend(handles=[no_value_patch(label="no value")], loc="lower center", borderaxespad=0.2)
    return drawn


def _statistics(values: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """Maps by name, all of one shape."""
    require_panel_count(values)
    maps = {name: as_measured(value, name=repr(name), axes=_HEADS) for name, value in values.items()}
    for name, array in maps.items():
        require_shape(array, next(iter(maps.values())), repr(name))
    return maps
