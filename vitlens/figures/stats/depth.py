"""Statistics by layer: the attention distance of every head, the change with depth, and the norms of tokens."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.gaps import as_measured, require_panel_count, require_shape
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.overlay import is_constant
from vitlens.figures.style import (
    BLUE,
    GREY,
    SERIES,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

_HEADS: Final = ("layers", "heads")
_LINES: Final = ("-", "--", ":", "-.", "-", "--")  # with SERIES, for readers and prints without colour


@styled
def distance_by_layer(
    *,
    distance: Sequence[ArrayLike],
    uniform: Sequence[ArrayLike],
    names: Sequence[str] | None = None,
    low: Sequence[ArrayLike] | None = None,
    high: Sequence[ArrayLike] | None = None,
    title: str = "Mean attention distance of every head",
) -> Figure:
    """The attention distance of each head in px, one dot per head over the layers, of one to six models.

    distance: for each model (layers, heads), NaN where there is no such head or no distance; uniform: for each model
    (layers,), the distance under uniform attention, NaN where undefined; low, high: 95 % intervals, shaped as distance.
    The dots of a layer are side by side in the order of heads; layers are labelled from 0. Raises InputError when
    shapes do not fit, for a model without any distance, for infinite numbers, and for low without high.
    """
    values = [as_measured(of_model, name="distance", axes=_HEADS) for of_model in distance]
    if not 1 <= len(values) <= len(SERIES):
        raise InputError(f"expected the distance of 1 to {len(SERIES)} models, found {len(values)}")
    all_names = names if names is not None else [f"model {index + 1}" for index in range(len(values))]
    short_names = [shortened(name, 24) for name in all_names]
    for name, sequence in (("names", short_names), ("uniform", uniform)):
        require_length(len(sequence), len(values), name=name, of="the models")
    expected = [as_measured(of_model, name="uniform", axes=("layers",)) for of_model in uniform]
    for of_model, value in zip(expected, values, strict=True):
        require_length(len(of_model), len(value), name="layers of uniform", of="the layers of distance")
    intervals = _intervals(low, high, values)
    figure = sheet(WIDE * 0.8, 3.0)
    axes = figure.add_subplot()
    for index, value in enumerate(values):
        shift = 0.85 * (index - (len(values) - 1) / 2) / len(values)
        _dots(axes, value, intervals[index] if intervals else None, shift, 0.75 / len(values), SERIES[index])
        label = "heads (dots) and their mean (line)" if len(values) == 1 else f"{short_names[index]}: heads, mean"
        axes.plot([], [], "o-", color=SERIES[index], markersize=2.6, markeredgewidth=0, linewidth=0.8, label=label)
    _uniform_lines(axes, expected, short_names)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("attention distance (px)")
    _layer_axis(axes, max(map(len, values)))
    figure.legend(loc="outside lower center", ncols=2)
    of = f", {names[0]}" if names is not None and len(names) == 1 else ""
    heading(figure, f"{title}{of}{'; lines: 95 % intervals' if intervals else ''}")
    return figure


def _dots(axes: Axes, value: Array, ends: tuple[Array, Array] | None, shift: float, share: float, colour: str) -> None:
    """Draw one model's heads as dots side by side in each layer, their mean as a line."""
    for layer, row in enumerate(value):
        heads = np.flatnonzero(~np.isnan(row))
        places = layer + shift + share * (np.arange(len(heads)) - (len(heads) - 1) / 2) / max(len(heads), 2)
        if ends is not None:
            axes.vlines(places, ends[0][layer, heads], ends[1][layer, heads], color=colour, linewidth=0.7)
        axes.plot(places, row[heads], "o", color=colour, markersize=2.6, markeredgewidth=0)
    axes.plot(shift + np.arange(len(value)), _mean(value), color=colour, linewidth=0.8)


def _intervals(
    low: Sequence[ArrayLike] | None, high: Sequence[ArrayLike] | None, values: Sequence[Array]
) -> list[tuple[Array, Array]]:
    """Both ends of the intervals for each model, of the shape of its values; empty where none are given."""
    if low is None and high is None:
        return []
    for name, sequence in (("low", low or ()), ("high", high or ())):
        require_length(len(sequence), len(values), name=name, of="the models")
    intervals = [
        (as_measured(below, name="low", axes=_HEADS), as_measured(above, name="high", axes=_HEADS))
        for below, above in zip(low or (), high or (), strict=True)
    ]
    for ends, value in zip(intervals, values, strict=True):
        for name, end in zip(("low", "high"), ends, strict=True):
            require_shape(end, value, name)
    return intervals


def _uniform_lines(axes: Axes, uniform: Sequence[Array], names: Sequence[str]) -> None:
    """Draw dashed: one line where it is the same in all layers of all models, otherwise a step for each layer."""
    every = np.concatenate(uniform)
    if is_constant(every[~np.isnan(every)]):
        axes.axhline(float(np.nanmax(every)), color=GREY, linestyle="--", linewidth=1.1, label="uniform attention")
        return
    for index, by_layer in enumerate(uniform):
        places = [-0.5, *np.arange(len(by_layer)), len(by_layer) - 0.5]
        label = "uniform attention" + (f", {names[index]}" if len(uniform) > 1 else "")
        colour = SERIES[index] if len(uniform) > 1 else GREY
        steps = [by_layer[0], *by_layer, by_layer[-1]]
        axes.step(places, steps, where="mid", color=colour, linestyle="--", linewidth=1.1, label=label)


@styled
def layer_evolution(
    *, panels: Mapping[str, Mapping[str, ArrayLike]], title: str = "Statistics of attention, layer by layer"
) -> Figure:
    """Statistics over the layers: the mean over heads as a line, from the least to the greatest head as a band.

    panels: by statistic and unit, such as "entropy (nats)", then by rows of the weights, such as "CLS row", (layers,
    heads), NaN where there is no value. A kind of rows has the same colour in all panels; layers are labelled from 0.
    Raises InputError for no panel or more than six, other shapes, infinite numbers, and rows without any value.
    """
    require_panel_count(panels)
    rows = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    if not all(panels.values()):
        raise InputError(f"expected rows for every statistic, found none for {[k for k, v in panels.items() if not v]}")
    if not 1 <= len(rows) <= len(SERIES):
        raise InputError(f"expected 1 to {len(SERIES)} kinds of rows, found {len(rows)}")
    across = 2 if len(panels) in (2, 4) else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = sheet(WIDE * (0.6 if across == 1 else 1), 0.35 + 1.9 * down)
    for index, (name, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, index + 1)
        measured = {row: as_measured(values, name=f"{name}, {row}", axes=_HEADS) for row, values in curves.items()}
        for row, values in measured.items():
            _band(axes, values, SERIES[rows.index(row)], _LINES[rows.index(row)])
        if all(np.nanmin(values) >= 0 for values in measured.values()):
            axes.set_ylim(0, 1.06 * max(float(np.nanmax(values)) for values in measured.values()) or 1.0)
        axes.set_title(textwrap.fill(name, 30 if across == 3 else 46))
        _layer_axis(axes, max(map(len, measured.values())))
    figure.legend(
        handles=[Line2D([], [], color=SERIES[i], linestyle=_LINES[i], label=row) for i, row in enumerate(rows)],
        loc="outside lower center",
        ncols=len(rows),
    )
    heading(figure, f"{title}; line: mean of heads, band: least to greatest head")
    return figure


def _band(axes: Axes, values: Array, colour: str, line: str) -> None:
    """Draw the mean over heads as a line and the range of heads as a band, by layer."""
    layers = np.arange(len(values))
    heads = np.ma.masked_invalid(values)
    ends = (heads.min(axis=1).filled(np.nan), heads.max(axis=1).filled(np.nan))
    axes.fill_between(layers, *ends, color=colour, alpha=0.18, linewidth=0)
    axes.plot(layers, _mean(values), line, color=colour, marker="o", markersize=2.4)


@styled
def token_norms(
    *,
    median: ArrayLike,
    greatest: ArrayLike,
    high_norm: ArrayLike,
    sinks: ArrayLike | None = None,
    title: str = "Norms of tokens after each block",
) -> Figure:
    """The norms of tokens by depth, the number of tokens of high norm, and the number of attention sinks.

    median, greatest: Euclidean norm of the tokens after each block (layers,), on a logarithmic axis where they span
    more than a factor of ten; high_norm: mean number of tokens per image beyond median + 5 MAD (layers,); sinks: mean
    number of keys per image whose received weight lies beyond it (layers, heads), NaN where there is no head. Layers
    are labelled from 0. Raises InputError when shapes do not fit or a number is negative, NaN or infinite.
    """
    columns = {"median": median, "greatest": greatest, "high_norm": high_norm}
    norms = {name: as_array(column, name=name, axes=("layers",)) for name, column in columns.items()}
    received = None if sinks is None else as_measured(sinks, name="sinks", axes=_HEADS)
    for name, column in {**norms, "sinks": received}.items():
        if column is not None:
            require_length(len(column), len(norms["median"]), name=f"layers of {name}", of="the layers of median")
            if np.nanmin(column) < 0:
                raise InputError(f"expected {name} of at least 0, found {np.nanmin(column):.3g}")
    counts = norms["high_norm"]
    figure = sheet(WIDE, 2.3)
    panels = figure.subplots(1, 2 if received is None else 3)
    _norm_lines(panels[0], norms["median"], norms["greatest"])
    panels[1].bar(np.arange(len(counts)), counts, 0.7, color=BLUE)
    panels[1].set_ylim(0, 1.06 * counts.max() or 1.0)
    if not counts.any():
        panels[1].text(0.5, 0.5, "none", transform=panels[1].transAxes, ha="center", color=GREY)
    if received is not None:
        _band(panels[2], received, BLUE, "-")
        panels[2].set_ylim(0, 1.06 * float(np.nanmax(received)) or 1.0)
    names = ("Norm of a token", "High-norm tokens\nof an image", "Sinks of an image\n(mean and range of heads)")
    for axes, name in zip(panels, names, strict=False):
        axes.set_title(name)
        _layer_axis(axes, len(counts))
    heading(figure, title)
    return figure


def _norm_lines(axes: Axes, median: Array, greatest: Array) -> None:
    """Draw both norms by layer; the axis is logarithmic where they span more than a factor of ten."""
    layers = np.arange(len(median))
    axes.plot(layers, greatest, "o--", color=VERMILLION, markersize=2.4, label="greatest")
    axes.plot(layers, median, "o-", color=BLUE, markersize=2.4, label="median")
    axes.legend()
    if not 0 < 10 * median.min() < greatest.max():
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _mean(values: Array) -> Array:
    """Mean over heads, NaN for a layer without any value."""
    mean: Array = np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)
    return mean


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(-0.5, layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(axis="y")
