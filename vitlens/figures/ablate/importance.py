"""Importance of every head, MLP and block: a signed map, a ranking with intervals, agreement of replacements."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.ablate.head_board import head_board
from vitlens.figures.gaps import as_array_with_gaps, as_measured
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.signed import Marks, as_marks, draw_dots
from vitlens.figures.style import (
    BLUE,
    GREY,
    SMALL,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

_HEADS: Final = ("layers", "heads")
_LEAST: Final = 10  # least important units drawn where there are too many for a page
_SKEWED: Final = 50.0  # times the median: a greatest value from which an axis is logarithmic


@styled
def importance_map(
    *,
    heads: ArrayLike,
    marked: ArrayLike | None,
    unit: str,
    title: str,
    mlps: ArrayLike | None = None,
    blocks: ArrayLike | None = None,
    faintest: float = 0.0,
) -> Figure:
    """The importance of each head as a map of layers (down) by heads (across), white at 0.

    heads: (layers, heads) in the unit, NaN where there is no such head, drawn hatched; marked: (layers, heads), whether
    it has an effect after Holm's correction, marked by a dot and counted (None: not tested, as the title says); mlps,
    blocks: (layers,) in the same unit, NaN where not measured, columns beside the map, with their own colour scale
    where they are more than three times larger or smaller, as the title says; unit: the label of the colour bar, such
    as "rise of loss (nats)". Colours are symmetric around 0, at least up to faintest (in the unit), so that rounding
    errors stay pale. A few extreme values lie beyond the colours, which arrows at the bar and a note below show. Layers
    and heads count from 0. Raises InputError when shapes do not fit, for infinite numbers, without any number, and for
    a marked head without one.
    """
    values = as_measured(heads, name="heads", axes=_HEADS)
    marks = None if marked is None else as_marks(marked, name="marked", values=values)
    columns = {name: column for name, column in (("MLP", mlps), ("block", blocks)) if column is not None}
    tested = "no test: it needs at least two images"
    if marks is not None:
        tested = f"dots: {np.sum(marks)} of {np.sum(~np.isnan(values))} heads have an effect after Holm's correction"
    drawn, _ = head_board(title=f"{title}; {tested}", heads=values, columns=columns, unit=unit, faintest=faintest)
    if marks is not None:
        draw_dots(drawn.panels[0], marks)
    return drawn.figure


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
    """Heads, MLPs or blocks in descending order of importance, each with its 95 % interval.

    names: labels of the units (L3.H7); values, low, high: (units,) in the unit, low and high NaN where there is no
    interval (one image); matters: (units,), whether it has an effect after Holm's correction: coloured, others grey;
    first_order: (units,) estimates in the unit, hollow, NaN where there is none. Of more than most + 10 units the most
    important and the ten least important are drawn, with the number of the others between them; most: 1 to 30. unit:
    the label of the axis, such as "rise of loss (nats)". The axis is logarithmic beyond a range around 0, as its label
    says, where the greatest value is 50 times the median. Raises InputError when lengths differ, for infinite numbers,
    for a value NaN, and for an interval that does not contain its value.
    """
    centre, below, above, marks, estimates = _ranked(values, low, high, matters, first_order)
    require_length(len(names), len(centre), name="names", of="the values")
    if not 1 <= most <= 30:
        raise InputError(f"expected most of 1 to 30 units, found {most}")
    order = np.argsort(-centre, kind="stable")
    cut = max(0, len(order) - most - _LEAST)
    if cut:
        order = np.concatenate([order[:most], order[-_LEAST:]])
    places = np.arange(len(order)) + (np.arange(len(order)) >= most if cut else 0)
    numbers = np.stack([centre, below, above, estimates])[:, order]
    colours = [(BLUE if value > 0 else VERMILLION) if mark else GREY for value, mark in zip(numbers[0], marks[order])]
    figure = sheet(WIDE * 0.8, 0.9 + 0.185 * (len(order) + (cut > 0)))
    axes = figure.add_subplot()
    _draw_ranking(axes, places, numbers, colours)
    if cut:
        others = axes.text(0.5, most, f"⋮ {cut} others", transform=axes.get_yaxis_transform(), zorder=5)
        others.set(ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
    axes.set_yticks(places, [shortened(names[i], 24) for i in order])
    axes.set_ylim(places[-1] + 0.7, -0.7)
    note = log_axes_if_skewed(axes, numbers, "x")
    axes.set_xlabel(f"{unit}; {note}" if note else unit)
    figure.legend(handles=_legend(colours, not np.isnan(estimates).all()), loc="outside lower center", ncols=2)
    heading(figure, f"{title}; {'no intervals' if np.isnan(below).all() else 'lines: 95 % intervals'}")
    return figure


def _ranked(
    values: ArrayLike, low: ArrayLike, high: ArrayLike, matters: ArrayLike, first_order: ArrayLike | None
) -> tuple[Array, Array, Array, Marks, Array]:
    """All columns, checked to be of one length; the estimates are NaN where none are given."""
    centre = as_array(values, name="values", axes=("units",))
    optional = {"low": low, "high": high, "first_order": np.full(len(centre), np.nan)}
    if first_order is not None:
        optional["first_order"] = first_order
    columns = [as_array_with_gaps(column, name=name, axes=("units",)) for name, column in optional.items()]
    below, above, estimates = columns
    for name, column in zip(optional, columns):
        require_length(len(column), len(centre), name=name, of="the values")
    room = 1e-6 * float(np.abs(centre).max())
    wrong = np.flatnonzero((below > centre + room) | (above < centre - room) | (np.isnan(below) != np.isnan(above)))
    if wrong.size:
        i = wrong[0]
        raise InputError(
            f"expected intervals that contain their values, found {centre[i]:.3g} [{below[i]:.3g}, {above[i]:.3g}]"
        )
    return centre, below, above, as_marks(matters, name="matters", values=centre), estimates


def _draw_ranking(axes: Axes, places: NDArray[np.int_], numbers: Array, colours: Sequence[str]) -> None:
    """Draw a dot, a line and its numbers for each unit; numbers: (4, units), value, ends of the interval, estimate."""
    value, low, high, estimate = numbers
    axes.axvline(0, color="black", linewidth=0.6)
    axes.hlines(places, low, high, color=colours, linewidth=1.3)
    axes.scatter(value, places, s=13, color=colours, zorder=3)
    axes.scatter(estimate, places, s=17, marker="D", facecolor="none", edgecolor="black", linewidth=0.7, zorder=4)
    sizes = np.abs(value[value != 0])
    decimals = int(np.clip(1 - np.floor(np.log10(np.median(sizes))), 0, 4)) if sizes.size else 0
    for place, column in zip(places, np.round(numbers[:3], decimals).T + 0.0):  # + 0.0: no "-0.00"
        middle, *ends = (f"{number:.{decimals}f}" for number in column)
        words = middle if np.isnan(column[1]) else f"{middle}  [{', '.join(ends)}]"
        axes.text(1.02, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
    axes.grid(axis="x")


def _legend(colours: Sequence[str], estimated: bool) -> list[Line2D]:
    """Legend entries of the colours that occur and of the hollow marks."""
    words = {BLUE: "worse without it (Holm)", VERMILLION: "better without it (Holm)", GREY: "no effect shown"}
    known = [(colour, word) for colour, word in words.items() if colour in colours]
    handles = [Line2D([], [], color=colour, marker="o", markersize=3.6, label=word) for colour, word in known]
    hollow = Line2D([], [], color="black", linestyle="", marker="D", markersize=4, markeredgewidth=0.7)
    hollow.set(markerfacecolor="none", label="first-order estimate")
    return [*handles, hollow] if estimated else handles


def log_axes_if_skewed(axes: Axes, values: Array, which: str = "xy") -> str:
    """Make axes symmetric-logarithmic if the greatest value is over 50 times the median; returns a note, or ""."""
    known = values[~np.isnan(values)]
    sizes = np.abs(known[known != 0])
    if not sizes.size or sizes.max() <= _SKEWED * np.median(sizes):
        return ""
    first, last = (int(np.floor(np.log10(size))) for size in (np.median(sizes), sizes.max()))
    powers = 10.0 ** np.arange(first, last + 1, -(-(last - first + 1) // 4))
    ticks = [tick for tick in (*-powers[::-1], 0.0, *powers) if min(0.0, known.min()) <= tick <= max(0.0, known.max())]
    for name in which:
        (axes.set_xscale if name == "x" else axes.set_yscale)("symlog", linthresh=powers[0])
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axis.set_minor_locator(NullLocator())
    return f"logarithmic beyond ±{powers[0]:g}"


@styled
def replacement_agreement(
    *,
    values: Mapping[str, ArrayLike],
    rho: Mapping[tuple[str, str], float],
    unit: str,
    title: str = "Agreement of the replacements",
) -> Figure:
    """The importance of every head by one replacement against that by another, for all pairs of two to five.

    values: by name ("zero", "mean", "resample", "first-order"), (units,) in the unit, NaN where not measured; rho:
    Spearman's rank correlation of each pair, in either order, NaN where it is undefined; unit: such as "nats". All
    panels have one range; dashed: both equal. Axes logarithmic as in importance_ranking. Raises InputError for one name
    or more than five, lengths that differ, infinite numbers, a pair without rho, and rho beyond [-1, 1].
    """
    if not 2 <= len(values) <= 5:
        raise InputError(f"expected 2 to 5 replacements, found {len(values)}")
    measured = {name: as_measured(column, name=repr(name), axes=("units",)) for name, column in values.items()}
    names = list(measured)
    for name, column in measured.items():
        require_length(len(column), len(measured[names[0]]), name=f"units of {name!r}", of=f"those of {names[0]!r}")
    every = np.concatenate(list(measured.values()))
    ends = [float(np.nanmin(every)), float(np.nanmax(every))]
    pairs = list(combinations(names, 2))
    across = min(len(pairs), 3 if len(pairs) < 10 else 5)  # 1, 3, 6 or 10 pairs fill their rows
    down = len(pairs) // across
    figure = sheet(min(WIDE, 0.5 + 2.8 * across), 0.3 + min(2.6, 0.6 + 5.7 / across) * down)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    note = ""
    for axes, (first, second) in zip(panels.flat, pairs, strict=True):
        _compare(axes, measured[first], measured[second], _correlation(rho, first, second))
        axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=0.8, zorder=1)
        note = log_axes_if_skewed(axes, every)
        axes.set(xlabel=f"{first} ({unit})", ylabel=f"{second} ({unit})")
    words = [f"{len(measured[names[0]])} units", "ρ: Spearman", "dashed: equal", note]
    heading(figure, f"{title} ({'; '.join(filter(None, words))})")
    return figure


def _correlation(rho: Mapping[tuple[str, str], float], first: str, second: str) -> float:
    pair = next((pair for pair in ((first, second), (second, first)) if pair in rho), None)
    if pair is None:
        raise InputError(f"expected rho of {(first, second)}, found it of {sorted(rho)}")
    value = float(rho[pair])
    if abs(value) > 1 + 1e-6:
        raise InputError(f"expected rho of {pair} in [-1, 1], found {value:.3g}")
    return value


def _compare(axes: Axes, across: Array, down: Array, rho: float) -> None:
    """Draw both importances of each unit, and write their rank correlation."""
    axes.plot(across, down, "o", color=BLUE, markersize=3, alpha=0.6, markeredgewidth=0)
    axes.set_title("ρ undefined" if np.isnan(rho) else f"ρ = {rho:.2f}")
    axes.grid()
