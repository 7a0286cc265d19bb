"""What every head does, in numbers: distance by layer, statistics by head and by layer, two models, and norms."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.board import Board, Margins, board
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.overlay import Scale, colour_bar, is_constant
from vitlens.figures.style import (
    BLUE,
    GREY,
    MAGNITUDE,
    SERIES,
    SIGNED,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

_HEADS: Final = ("layers", "heads")
_LOOKS: Final = ("-", "--", ":", "-.", "-", "--")  # beside SERIES, for eyes and prints without colour
_MOST: Final = 6  # panels that a page holds
_BAR: Final = 0.72  # inch beside a heat map for its own colour bar


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
    """How far each head looks in px, one dot a head over the layers, of one to six models.

    distance: for each model (layers, heads), NaN where there is no such head or no distance; uniform: for each model
    (layers,), what uniform attention would give, NaN where undefined; low, high: 95 % intervals, shaped as distance.
    The dots of a layer stand side by side in the order of heads; layers are labelled from 1. Raises InputError when
    shapes do not fit, for a model without any distance, for infinite numbers, and for low without high.
    """
    values = [_measured(one, name="distance", axes=_HEADS) for one in distance]
    if not 1 <= len(values) <= len(SERIES):
        raise InputError(f"expected the distance of 1 to {len(SERIES)} models, found {len(values)}")
    every = names if names is not None else [f"model {index + 1}" for index in range(len(values))]
    known = [shortened(name, 24) for name in every]
    for name, given in (("names", known), ("uniform", uniform)):
        require_length(len(given), len(values), name=name, of="the models")
    expected = [_measured(one, name="uniform", axes=("layers",)) for one in uniform]
    for one, value in zip(expected, values, strict=True):
        require_length(len(one), len(value), name="layers of uniform", of="the layers of distance")
    intervals = _intervals(low, high, values)
    figure = sheet(WIDE * 0.8, 3.0)
    axes = figure.add_subplot()
    for index, value in enumerate(values):
        shift = 0.85 * (index - (len(values) - 1) / 2) / len(values)
        _dots(axes, value, intervals[index] if intervals else None, shift, 0.75 / len(values), SERIES[index])
        label = "heads (dots) and their mean (line)" if len(values) == 1 else f"{known[index]}: heads, mean"
        axes.plot([], [], "o-", color=SERIES[index], markersize=2.6, markeredgewidth=0, linewidth=0.8, label=label)
    _uniform_lines(axes, expected, known)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("attention distance (px)")
    _layer_axis(axes, max(map(len, values)))
    figure.legend(loc="outside lower center", ncols=2)
    of = f", {names[0]}" if names is not None and len(names) == 1 else ""
    heading(figure, f"{title}{of}{'; lines: 95 % intervals' if intervals else ''}")
    return figure


def _dots(axes: Axes, value: Array, ends: tuple[Array, Array] | None, shift: float, share: float, colour: str) -> None:
    """One model's heads as dots beside each other around its place in each layer, their mean as a line."""
    for layer, row in enumerate(value):
        found = np.flatnonzero(~np.isnan(row))
        places = layer + 1 + shift + share * (np.arange(len(found)) - (len(found) - 1) / 2) / max(len(found), 2)
        if ends is not None:
            axes.vlines(places, ends[0][layer, found], ends[1][layer, found], color=colour, linewidth=0.7)
        axes.plot(places, row[found], "o", color=colour, markersize=2.6, markeredgewidth=0)
    axes.plot(1 + shift + np.arange(len(value)), _mean(value), color=colour, linewidth=0.8)


def _intervals(
    low: Sequence[ArrayLike] | None, high: Sequence[ArrayLike] | None, values: Sequence[Array]
) -> list[tuple[Array, Array]]:
    """Both ends for each model, of the shape of its values; none where none are given."""
    if low is None and high is None:
        return []
    for name, given in (("low", low or ()), ("high", high or ())):
        require_length(len(given), len(values), name=name, of="the models")
    found = [
        (_measured(below, name="low", axes=_HEADS), _measured(above, name="high", axes=_HEADS))
        for below, above in zip(low or (), high or (), strict=True)
    ]
    for ends, value in zip(found, values, strict=True):
        for name, end in zip(("low", "high"), ends, strict=True):
            _require_shape(end, value, name)
    return found


def _uniform_lines(axes: Axes, uniform: Sequence[Array], names: Sequence[str]) -> None:
    """Dashed: one line where it is the same in all layers of all models, else a step for each layer."""
    every = np.concatenate(uniform)
    if is_constant(every[~np.isnan(every)]):
        axes.axhline(float(np.nanmax(every)), color=GREY, linestyle="--", linewidth=1.1, label="uniform attention")
        return
    for index, one in enumerate(uniform):
        places = [0.5, *(1 + np.arange(len(one))), len(one) + 0.5]
        label = "uniform attention" + (f", {names[index]}" if len(uniform) > 1 else "")
        colour = SERIES[index] if len(uniform) > 1 else GREY
        steps = [one[0], *one, one[-1]]
        axes.step(places, steps, where="mid", color=colour, linestyle="--", linewidth=1.1, label=label)


@styled
def head_heatmaps(
    *,
    values: Mapping[str, ArrayLike],
    title: str,
    units: Mapping[str, str] | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """Statistics of every head, each a map of layers (down) by heads (across) with its own colours; one to six.

    values: by name, (layers, heads), NaN where there is no value, drawn hatched; units: by name, what stands at the
    colour bar; limits: by name, the range of its colours (default: least to greatest). Layers and heads are labelled
    from 1. Raises InputError when shapes differ, where a statistic has no value at all or one beyond its limits.
    """
    maps, units, limits = _statistics(values), units or {}, limits or {}
    _require_known([*units, *limits], maps)
    scales = {name: _scale(name, one, limits.get(name)) for name, one in maps.items()}
    return _heat_maps(maps, scales, [""] * len(maps), units, title, MAGNITUDE).figure


@styled
def difference_maps(
    *,
    differences: Mapping[str, ArrayLike],
    significant: Mapping[str, ArrayLike],
    first: str,
    second: str,
    units: Mapping[str, str] | None = None,
) -> Figure:
    """How the statistics of every head differ between two models of the same shape: first minus second.

    differences: by name, (layers, heads), NaN where there is none; significant: for the same names, whether the
    paired test rejects after Holm's correction, marked by a dot and counted. Colours are symmetric around 0. units
    and errors as head_heatmaps; raises InputError also where a head without a difference is significant.
    """
    maps, units = _statistics(differences), units or {}
    _require_known(units, maps)
    if significant.keys() != maps.keys():
        raise InputError(f"expected significant for {list(maps)}, found it for {list(significant)}")
    marks = {}
    for name, one in maps.items():
        given = as_array(significant[name], name=f"significant of {name!r}", axes=_HEADS) != 0
        _require_shape(given, one, f"significant of {name!r}")
        if np.isnan(one[given]).any():
            raise InputError(f"expected a difference wherever it is significant, found NaN in {name!r}")
        marks[name] = given
    most = {name: float(np.nanmax(np.abs(one))) for name, one in maps.items()}
    notes = [f"\n{np.sum(marks[name])} of {np.sum(~np.isnan(one))} significant" for name, one in maps.items()]
    title = f"{first} minus {second}, every head (dots: significant in a paired test after Holm's correction)"
    drawn = _heat_maps(maps, {name: Scale(0.0 - one, one) for name, one in most.items()}, notes, units, title, SIGNED)
    for axes, given in zip(drawn.panels, marks.values(), strict=True):
        panel = axes.bbox.transformed(drawn.figure.dpi_scale_trans.inverted())
        size = float(np.clip(22 * min(panel.height / given.shape[0], panel.width / given.shape[1]), 1.5, 4.0))
        down, across = np.nonzero(given)
        axes.plot(across, down, "o", color="black", markersize=size, markeredgecolor="white", markeredgewidth=0.4)
    return drawn.figure


def _scale(name: str, values: Array, limits: tuple[float, float] | None) -> Scale:
    """From the lower to the upper limit, which hold all values; without limits from the least to the greatest."""
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
    notes: Sequence[str],
    units: Mapping[str, str],
    title: str,
    colours: str,
) -> Board:
    """One panel a statistic with its own colour bar, cells as square as the page allows."""
    layers, heads = next(iter(maps.values())).shape
    across = len(maps) if len(maps) < 3 else 2 if len(maps) == 4 else 3
    titles = [textwrap.fill(name, 26 if across == 3 else 46) + note for name, note in zip(maps, notes, strict=True)]
    gaps = any(np.isnan(one).any() for one in maps.values())
    gap = (_BAR + 0.24, 0.58 + 0.14 * max(text.count("\n") for text in titles))
    margins = Margins(left=0.45, right=_BAR, top=gap[1] - 0.36, bottom=0.38 + 0.22 * gaps)
    wide = min((WIDE - margins.left - margins.right + gap[0]) / across - gap[0], 2.5)
    tall = float(np.clip(wide * layers / heads, 0.9, 2.8))  # so that two rows of panels fit on a page
    drawn = board(title=title, count=len(maps), across=across, panel=(wide, tall), gap=gap, margins=margins)
    for index, (axes, (name, one)) in enumerate(zip(drawn.panels, maps.items(), strict=True)):
        row, column = divmod(index, across)
        beside = drawn.left + column * (wide + gap[0]) + wide + 0.06
        axes.add_patch(blank(transform=axes.transAxes, zorder=-1))
        axes.imshow(one, cmap=colours, norm=scales[name].norm, aspect="auto")
        axes.spines[:].set_visible(False)
        axes.set_title(titles[index])
        _count_from_one(axes.xaxis, heads, wide / 0.2)
        _count_from_one(axes.yaxis, layers, tall / 0.16)
        axes.set(xlabel="head", ylabel="" if column else "layer")
        bar = drawn.place(beside, drawn.top + row * (tall + gap[1]), 0.09, tall)
        unit = shortened(units.get(name, ""), int(13 * (tall + 0.35)))
        colour_bar(bar, scale=scales[name], label=unit, colours=colours)
    if gaps:
        drawn.figure.legend(handles=[blank(label="no value")], loc="lower center", borderaxespad=0.2)
    return drawn


def _count_from_one(axis: Axis, count: int, room: float) -> None:
    """Label as many places from 1 as there is room for."""
    places = range(0, count, -(-count // int(room)))
    axis.set_ticks(places, labels=[str(place + 1) for place in places])


def blank(corner: tuple[float, float] = (0.0, 0.0), width: float = 1.0, height: float = 1.0, **options: Any) -> Patch:
    """What stands where there is no value, behind a map or in a legend."""
    look: dict[str, Any] = {"hatch": "//////", "facecolor": "#E0E0E0", "edgecolor": "#A8A8A8", "linewidth": 0}
    return Rectangle(corner, width, height, **look, **options)


@styled
def layer_evolution(
    *, panels: Mapping[str, Mapping[str, ArrayLike]], title: str = "Statistics of attention, layer by layer"
) -> Figure:
    """How statistics change with depth: mean over heads as a line, from the least to the greatest head as a band.

    panels: by statistic and its unit, such as "entropy (nats)", by rows of the weights, such as "CLS row", (layers,
    heads), NaN where there is no value. A kind of rows has one colour in all panels; layers are labelled from 1.
    Raises InputError for no panel or more than six, other shapes, infinite numbers, and rows without any value.
    """
    _require_few(panels)
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
        found = {row: _measured(values, name=f"{name}, {row}", axes=_HEADS) for row, values in curves.items()}
        for row, values in found.items():
            look = rows.index(row)
            _band(axes, values, SERIES[look], _LOOKS[look])
        if all(np.nanmin(values) >= 0 for values in found.values()):
            axes.set_ylim(0, 1.06 * max(float(np.nanmax(values)) for values in found.values()) or 1.0)
        axes.set_title(textwrap.fill(name, 30 if across == 3 else 46))
        _layer_axis(axes, max(map(len, found.values())))
    figure.legend(
        handles=[Line2D([], [], color=SERIES[i], linestyle=_LOOKS[i], label=row) for i, row in enumerate(rows)],
        loc="outside lower center",
        ncols=len(rows),
    )
    heading(figure, f"{title}; line: mean of heads, band: least to greatest head")
    return figure


def _band(axes: Axes, values: Array, colour: str, look: str) -> None:
    """The mean over heads as a line, and the range of heads as a band, by layer."""
    layers = 1 + np.arange(len(values))
    heads = np.ma.masked_invalid(values)
    ends = (heads.min(axis=1).filled(np.nan), heads.max(axis=1).filled(np.nan))
    axes.fill_between(layers, *ends, color=colour, alpha=0.18, linewidth=0)
    axes.plot(layers, _mean(values), look, color=colour, marker="o", markersize=2.4)


@styled
def token_norms(
    *,
    median: ArrayLike,
    greatest: ArrayLike,
    high_norm: ArrayLike,
    sinks: ArrayLike | None = None,
    title: str = "Norms of tokens after each block",
) -> Figure:
    """How large tokens become with depth, how many stand out, and how many keys are attention sinks.

    median, greatest: Euclidean norm of the tokens after each block (layers,), on a logarithmic axis where they span
    more than a factor of ten; high_norm: mean number of tokens an image beyond median + 5 MAD (layers,); sinks: mean
    number of keys an image whose received weight lies beyond it (layers, heads), NaN where there is no head. Layers
    are labelled from 1. Raises InputError when shapes do not fit or a number is negative, NaN or infinite.
    """
    columns = {"median": median, "greatest": greatest, "high_norm": high_norm}
    norms = {name: as_array(one, name=name, axes=("layers",)) for name, one in columns.items()}
    received = None if sinks is None else _measured(sinks, name="sinks", axes=_HEADS)
    for name, one in {**norms, "sinks": received}.items():
        if one is not None:
            require_length(len(one), len(norms["median"]), name=f"layers of {name}", of="the layers of median")
            if np.nanmin(one) < 0:
                raise InputError(f"expected {name} of at least 0, found {np.nanmin(one):.3g}")
    many = norms["high_norm"]
    figure = sheet(WIDE, 2.3)
    panels = figure.subplots(1, 2 if received is None else 3)
    _norm_lines(panels[0], norms["median"], norms["greatest"])
    panels[1].bar(1 + np.arange(len(many)), many, 0.7, color=BLUE)
    panels[1].set_ylim(0, 1.06 * many.max() or 1.0)
    if not many.any():
        panels[1].text(0.5, 0.5, "none", transform=panels[1].transAxes, ha="center", color=GREY)
    if received is not None:
        _band(panels[2], received, BLUE, "-")
        panels[2].set_ylim(0, 1.06 * float(np.nanmax(received)) or 1.0)
    names = ("Norm of a token", "High-norm tokens\nof an image", "Sinks of an image\n(mean and range of heads)")
    for axes, name in zip(panels, names, strict=False):
        axes.set_title(name)
        _layer_axis(axes, len(many))
    heading(figure, title)
    return figure


def _norm_lines(axes: Axes, median: Array, greatest: Array) -> None:
    """Both norms by layer; the axis is logarithmic where they span more than a factor of ten."""
    layers = 1 + np.arange(len(median))
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


def as_gapped(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    """As as_array, with the same errors, but NaN stays where there is no value."""
    detach = getattr(values, "detach", None)  # a torch tensor, without importing torch
    array: Array = np.asarray(values if detach is None else detach().cpu().double(), dtype=np.float64)
    as_array(np.where(np.isnan(array), 0.0, array), name=name, axes=axes)
    return array


def _measured(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    array = as_gapped(values, name=name, axes=axes)
    if np.isnan(array).all():
        raise InputError(f"expected a number in {name}, found only NaN; leave it out")
    return array


def _statistics(values: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """Maps by name, all of one shape."""
    _require_few(values)
    maps = {name: _measured(one, name=repr(name), axes=_HEADS) for name, one in values.items()}
    for name, one in maps.items():
        _require_shape(one, next(iter(maps.values())), repr(name))
    return maps


def _require_few(panels: Sized) -> None:
    if not 1 <= len(panels) <= _MOST:
        raise InputError(f"expected 1 to {_MOST} statistics, found {len(panels)}; draw them in several figures")


def _require_known(names: Iterable[str], maps: Mapping[str, Array]) -> None:
    wrong = [name for name in names if name not in maps]
    if wrong:
        raise InputError(f"expected names of the statistics {list(maps)}, found {wrong}")


def _require_shape(found: Array | NDArray[np.bool_], like: Array, name: str) -> None:
    if found.shape != like.shape:
        raise InputError(f"expected {name} of shape {like.shape}, found {found.shape}")


def _mean(values: Array) -> Array:
    """Mean over heads, NaN for a layer without any value."""
    mean: Array = np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)
    return mean


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(0.5, layers + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(axis="y")
