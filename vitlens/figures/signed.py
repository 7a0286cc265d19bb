"""Signed maps, white at 0: their colours, colour bar, dots, and the labels of layers and heads."""

import textwrap
from collections.abc import Iterable
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from numpy.typing import NDArray

from vitlens.figures.gaps import no_value_patch
from vitlens.figures.inputs import Array
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import SIGNED

Marks = NDArray[np.bool_]
_FEW: Final = 12  # number of values below which none counts as extreme
_FAR: Final = 3.0  # times the usual magnitude, from which on a value lies beyond the colours
BESIDE: Final = 0.94  # inch to the right of a signed map for its colour bar with numbers and label


def symmetric_scale(values: Iterable[Array], *, least: float = 0.0) -> Scale:
    """A scale symmetric around 0, up to the greatest absolute value, and at least to `least`."""
    most = max((float(np.abs(array[~np.isnan(array)]).max(initial=0.0)) for array in values), default=0.0)
    most = max(most, least)
    return Scale(0.0 - most, most)


def clipped_scale(values: Array, *, least: float = 0.0) -> Scale:
    """A symmetric scale up to the 98th percentile (or the second greatest) where the greatest is more than three times
    that; the arrows of its bar show it."""
    scale = symmetric_scale([values], least=least)
    every = np.sort(np.abs(values[~np.isnan(values)]))
    if len(every) < _FEW:
        return scale
    usual = max(least, float(every[min(len(every) - 2, int(0.98 * len(every)))]))
    return Scale(0.0 - usual, usual, clipped=True) if 0 < _FAR * usual < scale.high else scale


def draw_signed(axes: Axes, values: Array, scale: Scale) -> None:
    """Fill axes with a map (rows, columns) in signed colours, hatched where it is NaN."""
    axes.add_patch(no_value_patch(transform=axes.transAxes, zorder=-1))
    axes.imshow(values, cmap=SIGNED, norm=scale.norm, aspect="auto")
    axes.spines[:].set(visible=True, color="#B0B0B0")


def draw_dots(axes: Axes, marks: Marks) -> None:
    """Draw a dot in each marked cell (rows, columns), as large as the cells allow."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    wide, tall = axes.get_position().size * figure.get_size_inches()
    size = float(np.clip(22 * min(tall / marks.shape[0], wide / marks.shape[1]), 1.5, 4.0))
    down, across = np.nonzero(marks)
    axes.plot(across, down, "o", color="black", markersize=size, markeredgecolor="white", markeredgewidth=0.4)


def signed_bar(axes: Axes, scale: Scale, label: str) -> None:
    """Fill axes with the vertical bar of a signed scale, its label wrapped to the height; see colour_bar."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    tall = axes.get_position().height * figure.get_figheight()
    words = "\n".join(textwrap.wrap(label, int(13 * tall + 3), max_lines=2, placeholder="…"))
    colour_bar(axes, scale=scale, label=words, colours=SIGNED, both=True)


def name_heads(axes: Axes, shape: tuple[int, ...]) -> None:
    """Label layers (down) and heads (across) from 0, as many as there is room for."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    wide, tall = axes.get_position().size * figure.get_size_inches()
    number_places(axes.yaxis, shape[0], tall / 0.16)
    number_places(axes.xaxis, shape[1], wide / 0.2)
    axes.set(xlabel="head", ylabel="layer")


def number_places(axis: Axis, count: int, room: float) -> None:
    """Label as many indices, from 0, as there is room for."""
    places = range(0, count, -(-count // max(1, int(room))))
    axis.set_ticks(places, labels=[str(place) for place in places])
