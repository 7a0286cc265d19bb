"""A signed map of heads with columns of MLPs and blocks beside it, with colours robust to a few extreme values."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.board import Board, Margins, board
from vitlens.figures.gaps import as_array_with_gaps, as_measured, no_value_patch
from vitlens.figures.inputs import Array, require_length
from vitlens.figures.overlay import Scale
from vitlens.figures.signed import BESIDE, draw_signed, name_heads, signed_bar, symmetric_scale
from vitlens.figures.style import HALF, SMALL, TALL, WIDE, styled, wrapped_title

_FEW: Final = 12  # number of values below which none counts as extreme
_FAR: Final = 3.0  # ratio of magnitudes from which a column has its own colour scale
_LONGEST: Final = 3.0  # inch of a colour bar
_COLUMN, _GAP = 0.38, 0.08  # inch: the width of a column of MLPs or blocks, and the gap before it


def head_board(
    *,
    title: str,
    heads: Array,
    columns: Mapping[str, ArrayLike],
    unit: str,
    right: float = 0.0,
    faintest: float = 0.0,
    tallest: float = TALL,
) -> tuple[Board, float]:
    """A signed map of heads (layers, heads), and a column (layers,) for each further kind.

    right: further room in inches at the right; its left edge is returned with the board. faintest: the least value of
    the full colour; tallest: the height of the map, in inches, at most. Colours, bars and errors as importance_map;
    columns with their own colour scale come last.
    """
    beside = {
        name: as_array_with_gaps(values, name=name, axes=("layers",))[:, None] for name, values in columns.items()
    }
    for name, column in beside.items():
        require_length(len(column), len(heads), name=f"layers of {name}", of="the layers of heads")
    own_scale = {name: column for name, column in beside.items() if _far_apart(column, heads)}
    same_scale = {name: column for name, column in beside.items() if name not in own_scale}
    groups = [{"head": heads, **same_scale}, *({name: column} for name, column in own_scale.items())]
    scales = [
        _clipped(symmetric_scale(group.values(), least=faintest), list(group.values()), least=faintest)
        for group in groups
    ]
    notes = [_beyond(name, values, scale) for group, scale in zip(groups, scales) for name, values in group.items()]
    own = f"; {' and '.join(own_scale)} in {'its' if len(own_scale) == 1 else 'their'} own colours"
    drawn = _room(
        title=title + (own if own_scale else ""),
        shape=heads.shape,
        beside=len(beside) * (_GAP + _COLUMN) + len(groups) * BESIDE + right,
        below=". ".join(filter(None, notes)),
        gaps=any(np.isnan(values).any() for values in (heads, *beside.values())),
        tallest=tallest,
    )
    place, tall = drawn.right, drawn.bottom - drawn.top
    for group, scale in zip(groups, scales):
        for name, values in group.items():
            axes = drawn.panels[0] if name == "head" else drawn.place(place + _GAP, drawn.top, _COLUMN, tall)
            draw_signed(axes, values, scale)
            if name != "head":
                place += _GAP + _COLUMN
                axes.set_xticks([0], labels=[name])
                axes.set_yticks([])
        long = min(tall, _LONGEST)
        signed_bar(drawn.place(place + 0.08, drawn.top + (tall - long) / 2, 0.09, long), scale, unit)
        place += BESIDE
    name_heads(drawn.panels[0], heads.shape)
    return drawn, place


def _room(*, title: str, shape: tuple[int, ...], beside: float, below: str, gaps: bool, tallest: float) -> Board:
    """One panel for heads with cells as square as the page allows, and the notes below it."""
    layers, heads = shape
    wide = min(0.42 * heads, WIDE - 0.45 - beside)
    whole = max(HALF, 0.45 + wide + beside)
    lines = textwrap.wrap(below, int(whole * 15))
    bottom = 0.42 + 0.14 * len(lines) + 0.2 * gaps
    most = min(tallest, TALL - bottom - 0.1 - wrapped_title(title, whole)[1])
    tall = float(np.clip(layers * max(0.2, wide / heads), 1.15, most))
    margins = Margins(left=0.45, right=beside, bottom=bottom)
    drawn = board(title=title, count=1, across=1, panel=(wide, tall), gap=(0.0, 0.0), margins=margins)
    if lines:
        below_map = (drawn.bottom + 0.4) / drawn.figure.get_figheight()
        drawn.figure.text(0.5, 1 - below_map, "\n".join(lines), ha="center", va="top", fontsize=SMALL)
    if gaps:
        drawn.figure.legend(handles=[no_value_patch(label="no value")], loc="lower center", borderaxespad=0.2)
    return drawn


def _far_apart(column: Array, heads: Array) -> bool:
    """Whether the magnitudes differ so much that one colour scale would leave the heads or the column pale."""
    means = [float(np.nansum(np.abs(values)) / max(1, np.sum(~np.isnan(values)))) for values in (column, heads)]
    ends = [symmetric_scale([values]).high for values in (column, heads)]
    return any(max(sizes) > _FAR * min(sizes) > 0 for sizes in (means, ends))


def _clipped(scale: Scale, values: Sequence[Array], *, least: float) -> Scale:
    """The scale up to the 98th percentile (or the second greatest) where the greatest is more than three times that."""
    every = np.sort(np.abs(np.concatenate([array[~np.isnan(array)] for array in values])))
    if len(every) < _FEW:
        return scale
    usual = max(least, float(every[min(len(every) - 2, int(0.98 * len(every)))]))
    return Scale(0.0 - usual, usual, clipped=True) if 0 < _FAR * usual < scale.high else scale


def _beyond(name: str, values: Array, scale: Scale) -> str:
    """The greatest three values of a map (layers, heads or 1) beyond the colours, in words."""
    places = np.argwhere(np.abs(np.nan_to_num(values)) > scale.high).tolist() if scale.clipped else []
    places.sort(key=lambda place: -abs(values[tuple(place)]))
    words = [f"{_label(name, layer, head)} ({values[layer, head]:.3g})" for layer, head in places[:3]]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return f"Beyond the colours: {', '.join(words)}{more}" if words else ""


def _label(name: str, layer: int, head: int) -> str:
    return f"L{layer}.H{head}" if name == "head" else f"L{layer}.{name}"


@styled
def signed_heads(*, values: ArrayLike, title: str, unit: str) -> Figure:
    """A signed value of every head (layers, heads), white at 0, NaN hatched; layers and heads count from 0.

    unit: the label of the colour bar. A few extreme values lie beyond the colours, as importance_map. Raises InputError
    for other shapes, infinite numbers, and without any number.
    """
    heads = as_measured(values, name="values", axes=("layers", "heads"))
    return head_board(title=title, heads=heads, columns={}, unit=unit)[0].figure
