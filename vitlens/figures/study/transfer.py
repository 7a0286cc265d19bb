"""Ways of adapting a model to other data: accuracy and time, accuracy by share of the images, similarity by depth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from vitlens.errors import InputError
from vitlens.figures.curves import series_style
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.study.points import chance_line, logarithmic
from vitlens.figures.style import GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled

Line = Sequence[tuple[float, float, float, float]]  # place, value, low, high


@dataclass(frozen=True)
class RegimeBar:
    """One way. accuracy, low, high: fractions; seeds: accuracy by seed; seconds: of a training, and of those before."""

    name: str
    accuracy: float
    low: float
    high: float
    seeds: Sequence[float]
    seconds: float
    before: float = 0.0


@styled
def regimes_in_rows(*, regimes: Sequence[RegimeBar], chance: float, title: str) -> Figure:
    """One row a way: accuracy (%) with its interval and its seeds, and seconds of training on a logarithmic axis.

    chance: the accuracy (fraction) of guessing, dashed. Raises InputError for no way, numbers that are not finite, or
    times that are not above 0.
    """
    values = 100 * as_array(
        [[each.accuracy, each.low, each.high] for each in regimes], name="accuracies", axes=("ways", "3")
    )
    seconds = as_array([each.seconds + each.before for each in regimes], name="times", axes=("ways",))
    if seconds.min() <= 0:
        raise InputError(f"expected times above 0, found {seconds.min():g}")
    figure = sheet(WIDE, 0.9 + 0.36 * len(regimes))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.6, 1))
    chance_line(left, chance, upright=True)
    for place, (row, each) in enumerate(zip(values, regimes, strict=True)):
        colour = SERIES[place % len(SERIES)]
        left.plot(row[1:3], [place, place], color=colour, linewidth=1.4)
        left.plot(100 * np.asarray(each.seeds), np.full(len(each.seeds), place), "|", color=GREY, markersize=7)
        left.plot(row[:1], [place], "o", color=colour, markersize=4.5)
        left.text(102, place, f"{row[0]:.1f} [{row[1]:.1f}, {row[2]:.1f}]", va="center", fontsize=SMALL)
        right.plot([seconds[place]], [place], "o", color=colour, markersize=4.5)
        words = f"{seconds[place]:,.0f}" if seconds[place] >= 10 else f"{seconds[place]:.2g}"
        right.annotate(words, (seconds[place], place), (6, 0), textcoords="offset points", va="center", fontsize=SMALL)
    left.set(xlim=(0, 100), title="accuracy on test images (%)", ylim=(len(regimes) - 0.4, -0.6))
    left.set_yticks(range(len(regimes)), [shortened(each.name, 28) for each in regimes])
    left.grid(axis="x")
    right.set_title("seconds of training (log)")
    right.tick_params(axis="y", length=0)
    logarithmic(right, "x")
    heading(figure, title)
    return figure


@styled
def accuracy_by_share(*, lines: Mapping[str, Line], order: Sequence[str], chance: float, title: str) -> Figure:
    """Accuracy (%) by the number of training images (logarithmic), a line a way, with intervals.

    lines: by name, (images, accuracy, low, high), fractions; order: all names, so that a way has one colour in every
    figure. Raises InputError for a line without points, or one whose name is not in the order.
    """
    figure = sheet(WIDE * 0.7, 2.6)
    axes = figure.subplots()
    chance_line(axes, chance, upright=False)
    places: set[float] = set()
    for index, (name, line) in enumerate(lines.items()):
        at, *values = as_array(line, name=f"points of {name}", axes=("points", "4")).T
        beside = at * 1.02 ** (index - (len(lines) - 1) / 2)  # so that intervals do not overlap
        _with_ends(axes, beside, 100 * np.stack(values), name, _place(name, order))
        places |= set(at.tolist())
    every = sorted(places)
    axes.set(xscale="log", ylim=(0, 100), xlabel="training images (logarithmic)", title="accuracy on test images (%)")
    axes.set_xlim(every[0] / 1.3, every[-1] * 1.3)
    axes.xaxis.set_major_locator(FixedLocator(every))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(lines) + 1)
    heading(figure, title)
    return figure


@styled
def similarity_by_layer(*, lines: Mapping[str, Line], order: Sequence[str], title: str) -> Figure:
    """CKA of each layer before and after training, a line a way, with intervals; 1: equal up to rotation and scale.

    lines: by name, (layer, CKA, low, high); order: as `accuracy_by_share`. Raises InputError as it does.
    """
    figure = sheet(WIDE * 0.7, 2.5)
    axes = figure.subplots()
    for index, (name, line) in enumerate(lines.items()):
        at, *values = as_array(line, name=f"points of {name}", axes=("points", "4")).T
        _with_ends(axes, at + 0.08 * (index - (len(lines) - 1) / 2), np.stack(values), name, _place(name, order))
    axes.set(ylim=(min(0.0, axes.get_ylim()[0]), 1.03), xlabel="layer", title="CKA of a layer before and after")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(lines) + 1)
    heading(figure, title)
    return figure


def _place(name: str, order: Sequence[str]) -> int:
    if name not in order:
        raise InputError(f"expected one of {', '.join(order)}, found {name}")
    return list(order).index(name)


def _with_ends(axes: Axes, at: Array, values: Array, name: str, index: int) -> None:
    """A line with vertical intervals; values: value, low and high (3, points)."""
    colour, marker = series_style(index)
    axes.errorbar(
        at, values[0], np.abs(values[1:] - values[0]), color=colour, fmt=f"-{marker}", markersize=4, capsize=2,
        elinewidth=1, label=shortened(name, 30),
    )  # fmt: skip
