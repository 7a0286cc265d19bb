"""Similarity of the outputs of heads, and the synergy of pairs of heads."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Board, Margins, board
from vitlens.figures.gaps import as_array_with_gaps, as_measured, no_value_patch
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.signed import (
    BESIDE,
    as_marks,
    draw_dots,
    draw_signed,
    rounded,
    signed_bar,
    symmetric_scale,
)
from vitlens.figures.style import MAGNITUDE, WIDE, shortened, styled

_NARROWEST: Final = 0.36  # inch, the narrowest cells in which values are written


@styled
def redundancy_matrix(
    *, similarity: ArrayLike, layers_of_heads: ArrayLike, title: str, measure: str = "similarity"
) -> Figure:
    """The similarity of the outputs of all pairs of heads, with lines between layers.

    similarity: (heads, heads) symmetric in [0, 1], NaN where it is undefined, drawn hatched; layers_of_heads: (heads,)
    the layer of each, from 0, ascending; measure: the label of the colour bar ("linear CKA"). Colours range from 0 to
    the greatest similarity of two different heads. Raises InputError unless similarity is square, symmetric, within
    [0, 1] and of the length of layers_of_heads.
    """
    values = _square(similarity, "similarity", "heads")
    layers = as_array(layers_of_heads, name="layers_of_heads", axes=("heads",)).astype(np.int64)
    require_length(len(layers), len(values), name="layers_of_heads", of="the heads of similarity")
    if layers.min() < 0 or (np.diff(layers) < 0).any():
        raise InputError(f"expected ascending layers_of_heads from 0, found {layers[:8].tolist()} ...")
    if np.nanmin(values, initial=0.0) < -1e-6 or np.nanmax(values, initial=0.0) > 1 + 1e-6:
        raise InputError(f"expected similarity in [0, 1], found {np.nanmin(values):.3g} to {np.nanmax(values):.3g}")
    side = float(np.clip(0.14 * len(values), 2.6, WIDE - 0.5 - BAR_ROOM))
    gaps = bool(np.isnan(values).any())
    margins = Margins(left=0.5, right=BAR_ROOM, bottom=0.42 + 0.2 * gaps)
    drawn = board(title=title, count=1, across=1, panel=(side, side), gap=(0.0, 0.0), margins=margins)
    axes = drawn.panels[0]
    scale = _reach(values)
    axes.add_patch(no_value_patch(transform=axes.transAxes, zorder=-1))
    axes.imshow(values, cmap=MAGNITUDE, norm=scale.norm)
    axes.spines[:].set_visible(False)
    _name_layers(axes, layers, side)
    colour_bar(drawn.bar(), scale=scale, label=measure)
    if gaps:
        drawn.figure.legend(handles=[no_value_patch(label="no value")], loc="lower center", borderaxespad=0.2)
    return drawn.figure


def _reach(values: Array) -> Scale:
    """From 0 to the greatest similarity of two different heads; to 1 where there is none."""
    different = values[~np.eye(len(values), dtype=bool) & ~np.isnan(values)]
    most = float(different.max()) if different.size else 0.0
    return Scale(0.0, most, clipped=most < 1) if most > 1e-6 else Scale(0.0, 1.0)


def _name_layers(axes: Axes, layers: NDArray[np.int64], side: float) -> None:
    """Draw lines between layers, and label the middle of each."""
    known, starts = np.unique(layers, return_index=True)
    ends = np.append(starts[1:], len(layers))
    thickness = float(np.clip(60 * side / len(layers), 0.4, 0.9))
    for edge in starts[1:] - 0.5:
        axes.axhline(edge, color="white", linewidth=thickness)
        axes.axvline(edge, color="white", linewidth=thickness)
    step = -(-len(known) // int(side / 0.2))
    middles = ((starts + ends - 1) / 2)[::step]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(middles, labels=[str(layer) for layer in known[::step]])
        axis.set_label_text("layer (its heads in order)")


@styled
def synergy_matrix(
    *,
    synergy: ArrayLike,
    names: Sequence[str],
    significant: ArrayLike,
    unit: str,
    title: str = "Synergy of pairs of heads",
) -> Figure:
    """The effect of removing two heads beyond the sum of both effects: white at 0, dots where the interval excludes 0.

    synergy: (k, k) symmetric in the unit, effect of both minus sum of effects, NaN where not measured, drawn hatched;
    the diagonal is not drawn; names: (k,), labels; significant: (k, k), symmetric; unit: such as "nats". Where there is
    room, values are written below the diagonal and dots are only above it. Raises InputError when shapes do not fit,
    for fewer than two heads, infinite numbers, no number, matrices that are not symmetric, and a significant pair
    without a value.
    """
    values = _square(synergy, "synergy", "k")
    count = len(values)
    if count < 2:
        raise InputError("expected synergy of at least 2 heads, found 1")
    require_length(len(names), count, name="names", of="the heads of synergy")
    np.fill_diagonal(values, np.nan)
    values = as_measured(values, name="synergy off its diagonal", axes=("k", "k"))
    marks = as_marks(significant, name="significant", values=values)
    if (marks != marks.T).any():
        raise InputError("expected significant to be symmetric, found pairs that differ")
    upper = np.triu(np.ones((count, count), dtype=bool), 1)
    measured = upper & ~np.isnan(values)
    dots = f"dots: {np.sum(marks & upper)} of {np.sum(measured)} intervals exclude 0"
    drawn, side = _matrix(
        f"{title}: effect of removing both minus sum of effects ({dots})", names, gaps=bool((upper & ~measured).any())
    )
    axes, scale = drawn.panels[0], symmetric_scale([values])
    draw_signed(axes, values, scale)
    for place in range(count):
        axes.add_patch(Rectangle((place - 0.5, place - 0.5), 1, 1, color="#C8C8C8"))
    roomy = side / count >= _NARROWEST
    draw_dots(axes, marks & upper if roomy else marks)
    if roomy:
        _write_values(axes, values, scale)
    signed_bar(drawn.place(drawn.right + 0.08, drawn.top, 0.09, min(side, 3.0)), scale, f"synergy ({unit})")
    return drawn.figure


def _matrix(title: str, names: Sequence[str], *, gaps: bool) -> tuple[Board, float]:
    """One square panel with a name at each row and column, and its side in inches."""
    known = [shortened(name, 20) for name in names]
    longest = 0.056 * max(map(len, known)) + 0.15
    margins = Margins(left=max(0.4, longest), right=BESIDE + 0.05, bottom=max(0.4, longest) + 0.2 * gaps)
    side = float(np.clip(0.44 * len(names), 1.2, WIDE - margins.left - margins.right))
    drawn = board(title=title, count=1, across=1, panel=(side, side), gap=(0.0, 0.0), margins=margins)
    step = -(-len(names) // int(side / 0.13))
    places = range(0, len(names), step)
    drawn.panels[0].set_yticks(places, [known[place] for place in places])
    drawn.panels[0].set_xticks(places, [known[place] for place in places], rotation=90)
    if gaps:
        drawn.figure.legend(handles=[no_value_patch(label="not measured")], loc="lower center", borderaxespad=0.2)
    return drawn, side


def _write_values(axes: Axes, values: Array, scale: Scale) -> None:
    """Every value below the diagonal, in white where the colour is dark."""
    lower = [(row, column) for row in range(len(values)) for column in range(row) if not np.isnan(values[row, column])]
    words = rounded([float(values[place]) for place in lower])
    for (row, column), word in zip(lower, words):
        dark = abs(values[row, column]) > 0.6 * scale.high
        axes.text(column, row, word, ha="center", va="center", fontsize=6, color="white" if dark else "black")


def _square(values: ArrayLike, name: str, axis: str) -> Array:
    """A copy of a symmetric matrix, NaN where there is no value."""
    array = np.array(as_array_with_gaps(values, name=name, axes=(axis, axis)))
    if array.shape[0] != array.shape[1]:
        raise InputError(f"expected {name} to be square, found {array.shape}")
    if not np.allclose(array, array.T, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise InputError(f"expected {name} to be symmetric, found differences between the sides of its diagonal")
    return array
