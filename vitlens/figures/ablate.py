"""What every head, MLP and block is worth: a signed map, a ranking with intervals, and whether replacements agree."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import Board, Margins, board
from vitlens.figures.gaps import as_gapped, as_measured, blank, require_shape
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.overlay import Scale, in_words
from vitlens.figures.style import (
    BLUE,
    GREY,
    HALF,
    SIGNED,
    SMALL,
    TALL,
    VERMILLION,
    WIDE,
    broken,
    heading,
    sheet,
    shortened,
    styled,
)

Marks = NDArray[np.bool_]
BESIDE: Final = 0.94  # inch beside a signed map for its colour bar with numbers and label
_HEADS: Final = ("layers", "heads")
_FEW: Final = 12  # values, below which none is called far beyond the others
_FAR: Final = 3.0  # times larger or smaller: colours of its own
_LONGEST: Final = 3.0  # inch of a colour bar
_COLUMN, _GAP = 0.38, 0.08  # inch: a column of MLPs or blocks, and the room before it
_LEAST: Final = 10  # least important units drawn where there are too many for a page
_SKEWED: Final = 50.0  # times the median, from where an axis is logarithmic


@styled
def importance_map(
    *,
    heads: ArrayLike,
    marked: ArrayLike,
    unit: str,
    title: str,
    mlps: ArrayLike | None = None,
    blocks: ArrayLike | None = None,
) -> Figure:
    """What the model loses without each head, a map of layers (down) by heads (across), white at 0.

    heads: (layers, heads) in the unit, NaN where there is no such head, drawn hatched; marked: (layers, heads), whether
    it has an effect after Holm's correction, shown by a dot and counted; mlps, blocks: (layers,) in the same unit, NaN
    where not measured, columns beside the map, in colours of their own where they are more than three times larger or
    smaller, which the title says; unit: what stands at the colour bar, such as "rise of loss (nats)". Colours are
    symmetric around 0; where a few values lie far beyond the others colours stop before them: arrows at the bar and
    a line below say so. Labelled from 1. Raises InputError when shapes do not fit, for infinite numbers, without any
    number, and for a marked head without one.
    """
    values = as_measured(heads, name="heads", axes=_HEADS)
    marks = as_marks(marked, name="marked", values=values)
    columns = {name: one for name, one in (("MLP", mlps), ("block", blocks)) if one is not None}
    dots = f"dots: {np.sum(marks)} of {np.sum(~np.isnan(values))} heads have an effect after Holm's correction"
    drawn, _ = head_board(title=f"{title}; {dots}", heads=values, columns=columns, unit=unit)
    draw_dots(drawn.panels[0], marks)
    return drawn.figure


def head_board(
    *, title: str, heads: Array, columns: Mapping[str, ArrayLike], unit: str, right: float = 0.0
) -> tuple[Board, float]:
    """A signed map of heads (layers, heads), and a column (layers,) for each further kind.

    right: inches of room beside them; returned with the board is where it begins. Colours, bars and errors as
    importance_map; the columns that have their own colours stand last.
    """
    beside = {name: as_gapped(one, name=name, axes=("layers",))[:, None] for name, one in columns.items()}
    for name, one in beside.items():
        require_length(len(one), len(heads), name=f"layers of {name}", of="the layers of heads")
    own = {name: one for name, one in beside.items() if _far_apart(one, heads)}
    alike = {name: one for name, one in beside.items() if name not in own}
    groups = [{"head": heads, **alike}, *({name: one} for name, one in own.items())]
    scales = [_clipped(symmetric_scale(group.values()), list(group.values())) for group in groups]
    notes = [_beyond(name, one, scale) for group, scale in zip(groups, scales) for name, one in group.items()]
    drawn = _room(
        title=title + (f"; {' and '.join(own)} in {'its' if len(own) == 1 else 'their'} own colours" if own else ""),
        shape=heads.shape,
        beside=len(beside) * (_GAP + _COLUMN) + len(groups) * BESIDE + right,
        below=". ".join(filter(None, notes)),
        gaps=any(np.isnan(one).any() for one in (heads, *beside.values())),
    )
    place, tall = drawn.right, drawn.bottom - drawn.top
    for group, scale in zip(groups, scales):
        for name, one in group.items():
            axes = drawn.panels[0] if name == "head" else drawn.place(place + _GAP, drawn.top, _COLUMN, tall)
            draw_signed(axes, one, scale)
            if name != "head":
                place += _GAP + _COLUMN
                axes.set_xticks([0], labels=[name])
                axes.set_yticks([])
        long = min(tall, _LONGEST)
        signed_bar(drawn.place(place + 0.08, drawn.top + (tall - long) / 2, 0.09, long), scale, unit)
        place += BESIDE
    name_heads(drawn.panels[0], heads.shape)
    return drawn, place


def _room(*, title: str, shape: tuple[int, ...], beside: float, below: str, gaps: bool) -> Board:
    """One panel for heads with cells as square as the page allows, and what is written below it."""
    layers, heads = shape
    wide = min(0.42 * heads, WIDE - 0.45 - beside)
    whole = max(HALF, 0.45 + wide + beside)
    lines = textwrap.wrap(below, int(whole * 15))
    bottom = 0.42 + 0.14 * len(lines) + 0.2 * gaps
    most = TALL - bottom - 0.1 - broken(title, whole)[1]
    tall = float(np.clip(layers * max(0.2, wide / heads), 1.15, most))
    margins = Margins(left=0.45, right=beside, bottom=bottom)
    drawn = board(title=title, count=1, across=1, panel=(wide, tall), gap=(0.0, 0.0), margins=margins)
    if lines:
        below_map = (drawn.bottom + 0.4) / drawn.figure.get_figheight()
        drawn.figure.text(0.5, 1 - below_map, "\n".join(lines), ha="center", va="top", fontsize=SMALL)
    if gaps:
        drawn.figure.legend(handles=[blank(label="no value")], loc="lower center", borderaxespad=0.2)
    return drawn


def _far_apart(column: Array, heads: Array) -> bool:
    """Whether one range of colours would leave either the heads or the column pale."""
    means = [float(np.nansum(np.abs(values)) / max(1, np.sum(~np.isnan(values)))) for values in (column, heads)]
    ends = [symmetric_scale([values]).high for values in (column, heads)]
    return any(max(sizes) > _FAR * min(sizes) > 0 for sizes in (means, ends))


def symmetric_scale(values: Iterable[Array]) -> Scale:
    """Colours for signed maps: white at 0, and as far on both sides as the greatest size of any value."""
    most = max((float(np.abs(one[~np.isnan(one)]).max(initial=0.0)) for one in values), default=0.0)
    return Scale(0.0 - most, most)


def _clipped(scale: Scale, values: Sequence[Array]) -> Scale:
    """Only up to what all but 2 % (and one at least) reach, where the greatest is more than three times that."""
    every = np.sort(np.abs(np.concatenate([one[~np.isnan(one)] for one in values])))
    if len(every) < _FEW:
        return scale
    usual = float(every[min(len(every) - 2, int(0.98 * len(every)))])
    return Scale(0.0 - usual, usual, clipped=True) if 0 < _FAR * usual < scale.high else scale


def _beyond(name: str, values: Array, scale: Scale) -> str:
    """The greatest three values of a map (layers, heads or 1) that the colours do not reach, in words."""
    places = np.argwhere(np.abs(np.nan_to_num(values)) > scale.high).tolist() if scale.clipped else []
    places.sort(key=lambda place: -abs(values[tuple(place)]))
    words = [
        f"layer {layer + 1} {name}{f' {head + 1}' if values.shape[1] > 1 else ''} ({values[layer, head]:.3g})"
        for layer, head in places[:3]
    ]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return f"Beyond the colours: {', '.join(words)}{more}" if words else ""


def draw_signed(axes: Axes, values: Array, scale: Scale) -> None:
    """Fill axes with a map (rows, columns) in signed colours, hatched where it is NaN."""
    axes.add_patch(blank(transform=axes.transAxes, zorder=-1))
    axes.imshow(values, cmap=SIGNED, norm=scale.norm, aspect="auto")
    axes.spines[:].set(visible=True, color="#B0B0B0")


def draw_dots(axes: Axes, marks: Marks) -> None:
    """A dot in each cell that is marked (rows, columns), as large as the cells allow."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    wide, tall = axes.get_position().size * figure.get_size_inches()
    size = float(np.clip(22 * min(tall / marks.shape[0], wide / marks.shape[1]), 1.5, 4.0))
    down, across = np.nonzero(marks)
    axes.plot(across, down, "o", color="black", markersize=size, markeredgecolor="white", markeredgewidth=0.4)


def signed_bar(axes: Axes, scale: Scale, label: str) -> None:
    """Fill axes with the upright bar of a signed scale; arrows and signs where values lie beyond its ends."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    extend = "both" if scale.clipped else "neither"
    bar = figure.colorbar(ScalarMappable(scale.norm, SIGNED), cax=axes, extend=extend, extendfrac=0.05)
    bar.outline.set_visible(False)
    tall = axes.get_position().height * figure.get_figheight()
    bar.set_label("\n".join(textwrap.wrap(label, int(13 * tall + 3), max_lines=2, placeholder="…")))
    if scale.low == scale.high:
        bar.set_ticks([0.0], labels=["0\nall\nequal"])
        return
    ticks = np.linspace(scale.low, scale.high, 5).tolist()
    labels = in_words(ticks)
    first, last = ("≤ ", "≥ ") if scale.clipped else ("", "")
    bar.set_ticks(ticks, labels=[first + labels[0], labels[1], "0", labels[3], last + labels[-1]])


def rounded(values: Sequence[float]) -> list[str]:
    """As in_words, but nothing is rounded to a minus zero."""
    return [word if float(word) else word.lstrip("-") for word in in_words(values)]


def name_heads(axes: Axes, shape: tuple[int, ...]) -> None:
    """Layers down and heads across, numbered from 1, as many as there is room for."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    wide, tall = axes.get_position().size * figure.get_size_inches()
    count_from_one(axes.yaxis, shape[0], tall / 0.16)
    count_from_one(axes.xaxis, shape[1], wide / 0.2)
    axes.set(xlabel="head", ylabel="layer")


def count_from_one(axis: Axis, count: int, room: float) -> None:
    """Label as many places from 1 as there is room for."""
    places = range(0, count, -(-count // max(1, int(room))))
    axis.set_ticks(places, labels=[str(place + 1) for place in places])


def as_marks(marked: ArrayLike, *, name: str, values: Array) -> Marks:
    """Yes or no for each of the values; raises InputError for another shape, and for a yes where the value is NaN."""
    marks: Marks = as_array(marked, name=name, axes=[str(length) for length in values.shape]) != 0
    require_shape(marks, values, name)
    if np.isnan(values[marks]).any():
        raise InputError(f"expected a value wherever {name} is true, found NaN")
    return marks


@styled
def importance_ranking(
    *,
    names: Sequence[str],
    values: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    matters: ArrayLike,
    unit: str,
    title: str,
    first_order: ArrayLike | None = None,
    most: int = 30,
) -> Figure:
    """Heads, MLPs or blocks from the most important down, each with its 95 % interval.

    names: one a unit, as they are to be read (layers and heads from 1); values, low, high: (units,) in the unit, low
    and high NaN where there is no interval (one image); matters: (units,), whether it has an effect after Holm's
    correction: coloured, others grey; first_order: (units,) estimates in the unit, hollow, NaN where there is none.
    Of more than most + 10 units the most important and the ten least are drawn, and a line between says how many are
    not; most: 1 to 30. unit: what stands at the axis, such as "rise of loss (nats)". The axis is logarithmic away from
    0, and says so, where the greatest is 50 times the median. Raises InputError when lengths differ, for infinite
    numbers, for a value NaN, and for an interval that does not hold its value.
    """
    centre, below, above, marks, guess = _ranked(values, low, high, matters, first_order)
    require_length(len(names), len(centre), name="names", of="the values")
    if not 1 <= most <= 30:
        raise InputError(f"expected most of 1 to 30 units, found {most}")
    order = np.argsort(-centre, kind="stable")
    cut = max(0, len(order) - most - _LEAST)
    if cut:
        order = np.concatenate([order[:most], order[-_LEAST:]])
    places = np.arange(len(order)) + (np.arange(len(order)) >= most if cut else 0)
    numbers = np.stack([centre, below, above, guess])[:, order]
    colours = [(BLUE if value > 0 else VERMILLION) if mark else GREY for value, mark in zip(numbers[0], marks[order])]
    figure = sheet(WIDE * 0.8, 0.9 + 0.185 * (len(order) + (cut > 0)))
    axes = figure.add_subplot()
    _draw_ranking(axes, places, numbers, colours)
    if cut:
        others = axes.text(0.5, most, f"⋮ {cut} others lie between", transform=axes.get_yaxis_transform(), zorder=5)
        others.set(ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
    axes.set_yticks(places, [shortened(names[i], 24) for i in order])
    axes.set_ylim(places[-1] + 0.7, -0.7)
    note = stretch(axes, numbers, "x")
    axes.set_xlabel(f"{unit}; {note}" if note else unit)
    figure.legend(handles=_legend(colours, not np.isnan(guess).all()), loc="outside lower center", ncols=2)
    heading(figure, f"{title}; {'no intervals' if np.isnan(below).all() else 'lines: 95 % intervals'}")
    return figure


def _ranked(
    values: ArrayLike, low: ArrayLike, high: ArrayLike, matters: ArrayLike, first_order: ArrayLike | None
) -> tuple[Array, Array, Array, Marks, Array]:
    """All of one length; the estimates are NaN where none are given."""
    centre = as_array(values, name="values", axes=("units",))
    estimates = np.full(len(centre), np.nan) if first_order is None else first_order
    given = {"low": low, "high": high, "first_order": estimates}
    below, above, guess = (as_gapped(one, name=name, axes=("units",)) for name, one in given.items())
    for name, one in zip(given, (below, above, guess)):
        require_length(len(one), len(centre), name=name, of="the values")
    room = 1e-6 * float(np.abs(centre).max())
    wrong = np.flatnonzero((below > centre + room) | (above < centre - room) | (np.isnan(below) != np.isnan(above)))
    if wrong.size:
        i = wrong[0]
        raise InputError(
            f"expected intervals that hold their values, found {centre[i]:.3g} [{below[i]:.3g}, {above[i]:.3g}]"
        )
    return centre, below, above, as_marks(matters, name="matters", values=centre), guess


def _draw_ranking(axes: Axes, places: NDArray[np.int_], numbers: Array, colours: Sequence[str]) -> None:
    """A dot, a line and its numbers for each unit; numbers: (4, units), value, ends of its interval, estimate."""
    value, low, high, guess = numbers
    axes.axvline(0, color="black", linewidth=0.6)
    axes.hlines(places, low, high, color=colours, linewidth=1.3)
    axes.scatter(value, places, s=13, color=colours, zorder=3)
    axes.scatter(guess, places, s=17, marker="D", facecolor="none", edgecolor="black", linewidth=0.7, zorder=4)
    sizes = np.abs(value[value != 0])
    decimals = int(np.clip(1 - np.floor(np.log10(np.median(sizes))), 0, 4)) if sizes.size else 0
    for place, column in zip(places, np.round(numbers[:3], decimals).T + 0.0):  # + 0.0: no "-0.00"
        middle, *ends = (f"{number:.{decimals}f}" for number in column)
        words = middle if np.isnan(column[1]) else f"{middle}  [{', '.join(ends)}]"
        axes.text(1.02, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
    axes.grid(axis="x")


def _legend(colours: Sequence[str], estimated: bool) -> list[Line2D]:
    """What the colours that occur and the hollow marks mean."""
    words = {BLUE: "worse without it (Holm)", VERMILLION: "better without it (Holm)", GREY: "no effect shown"}
    known = [(colour, word) for colour, word in words.items() if colour in colours]
    handles = [Line2D([], [], color=colour, marker="o", markersize=3.6, label=word) for colour, word in known]
    hollow = Line2D([], [], color="black", linestyle="", marker="D", markersize=4, markeredgewidth=0.7)
    hollow.set(markerfacecolor="none", label="first-order estimate")
    return [*handles, hollow] if estimated else handles


def stretch(axes: Axes, values: Array, which: str = "xy") -> str:
    """Make axes logarithmic away from 0 where the greatest value is 50 times the median; what to say of it, or ""."""
    found = values[~np.isnan(values)]
    sizes = np.abs(found[found != 0])
    if not sizes.size or sizes.max() <= _SKEWED * np.median(sizes):
        return ""
    first, last = (int(np.floor(np.log10(size))) for size in (np.median(sizes), sizes.max()))
    powers = 10.0 ** np.arange(first, last + 1, -(-(last - first + 1) // 4))
    ticks = [tick for tick in (*-powers[::-1], 0.0, *powers) if min(0.0, found.min()) <= tick <= max(0.0, found.max())]
    for one in which:
        (axes.set_xscale if one == "x" else axes.set_yscale)("symlog", linthresh=powers[0])
        axis = axes.xaxis if one == "x" else axes.yaxis
        axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axis.set_minor_locator(NullLocator())
    return f"logarithmic beyond ±{powers[0]:g}"


@styled
def replacement_agreement(
    *,
    values: Mapping[str, ArrayLike],
    rho: Mapping[tuple[str, str], float],
    unit: str,
    title: str = "Do the replacements agree?",
) -> Figure:
    """Every head's importance by one replacement against that by another, a dot a head, for all pairs of two to five.

    values: by name ("zero", "mean", "resample", "first-order"), (units,) in the unit, NaN where not measured; rho:
    Spearman's rank correlation of each pair, in either order, NaN where it is undefined; unit: as in "nats". All panels
    have one range; dashed: both equal. Stretched as importance_ranking. Raises InputError for one name or more than
    five, lengths that differ, infinite numbers, a pair without rho, and rho beyond [-1, 1].
    """
    if not 2 <= len(values) <= 5:
        raise InputError(f"expected 2 to 5 replacements, found {len(values)}")
    known = {name: as_measured(one, name=repr(name), axes=("units",)) for name, one in values.items()}
    names = list(known)
    for name, one in known.items():
        require_length(len(one), len(known[names[0]]), name=f"units of {name!r}", of=f"those of {names[0]!r}")
    every = np.concatenate(list(known.values()))
    ends = [float(np.nanmin(every)), float(np.nanmax(every))]
    side = len(names) - 1
    figure = sheet(min(WIDE, 0.5 + 2.8 * side), 0.3 + min(2.6, 6.6 / side) * side)
    panels = figure.subplots(side, side, squeeze=False, sharex=True, sharey=True)
    note = ""
    for across, down in combinations(range(len(names)), 2):
        axes = panels[down - 1, across]
        _compare(axes, known[names[across]], known[names[down]], _correlation(rho, names[across], names[down]))
        axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=0.8, zorder=1)
        note = stretch(axes, every)
        axes.set(xlabel=f"{names[across]} ({unit})" if down == side else "")
        axes.set(ylabel=f"{names[down]} ({unit})" if not across else "")
    for unused in panels[np.triu_indices(side, 1)]:
        unused.remove()
    words = [f"{len(known[names[0]])} units", "ρ: Spearman", "dashed: equal", note]
    heading(figure, f"{title} ({'; '.join(filter(None, words))})")
    return figure


def _correlation(rho: Mapping[tuple[str, str], float], one: str, other: str) -> float:
    pair = next((pair for pair in ((one, other), (other, one)) if pair in rho), None)
    if pair is None:
        raise InputError(f"expected rho of {(one, other)}, found it of {sorted(rho)}")
    value = float(rho[pair])
    if abs(value) > 1 + 1e-6:
        raise InputError(f"expected rho of {pair} in [-1, 1], found {value:.3g}")
    return value


def _compare(axes: Axes, across: Array, down: Array, rho: float) -> None:
    """Both importances of each unit, and their rank correlation."""
    axes.plot(across, down, "o", color=BLUE, markersize=3, alpha=0.6, markeredgewidth=0)
    axes.set_title("ρ undefined" if np.isnan(rho) else f"ρ = {rho:.2f}")
    axes.grid()
