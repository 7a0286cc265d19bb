"""The points of a study: accuracy with its interval, and the cost of each, in rows or along an axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.style import BLUE, GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled

_MARKERS: Final = "osD^vP"  # with SERIES, for readers and prints without colour
_COSTS: Final = (
    ("flops", "MFLOPs per image", 1e-6),
    ("images_per_second", "training, images/s", 1.0),
)


@dataclass(frozen=True)
class StudyPoint:
    """One point. accuracy, low, high: fractions, the mean over seeds and its 95 % interval; seeds: accuracy by seed.

    flops: of one image's forward pass; images_per_second: of training.
    """

    name: str
    accuracy: float
    low: float
    high: float
    seeds: Sequence[float]
    parameters: int
    flops: float
    images_per_second: float


@styled
def points_in_rows(*, points: Sequence[StudyPoint], chance: float, title: str) -> Figure:
    """One row per point, from the top down: accuracy (%), FLOPs and training speed, the last two on logarithmic axes.

    chance: the accuracy (fraction) of guessing, drawn dashed. Raises InputError for no point, or numbers that are not
    finite or, of costs, not above 0.
    """
    values, costs = _values(points)
    places = np.arange(len(points))
    figure = sheet(WIDE, 0.8 + 0.33 * len(points))
    left, *others = figure.subplots(1, 1 + len(_COSTS), sharey=True, width_ratios=(2.4, 1, 1))
    chance_line(left, chance, upright=True)
    for place, row, point in zip(places, values, points):
        left.plot(row[1:3], [place, place], color=BLUE, linewidth=1.4)
        left.plot(
            100 * np.asarray(point.seeds),
            np.full(len(point.seeds), place),
            "|",
            color=GREY,
            markersize=7,
            clip_on=False,
        )
        left.plot(row[:1], [place], "o", color=BLUE, markersize=4.5, clip_on=False)  # whole at 100 %, too
        words = f"{row[0]:.1f} [{row[1]:.1f}, {row[2]:.1f}]"
        left.text(102, place, words, va="center", fontsize=SMALL)
    left.set(xlim=(0, 100), title="accuracy on test images (%)", ylim=(len(points) - 0.4, -0.6))
    left.set_yticks(places, [f"{shortened(p.name, 28)}\n{p.parameters / 1e6:.3g} M parameters" for p in points])
    for axes, cost, (_, name, _) in zip(others, costs.T, _COSTS):
        _costs(axes, cost, places.astype(float), cost, "o", GREY, upright=True)
        axes.set_title(f"{name} (log)".replace(" ", "\n", 1))
        logarithmic(axes, "x")
        axes.tick_params(axis="y", length=0)
    left.grid(axis="x")
    heading(figure, title)
    return figure


@styled
def points_along(
    *,
    series: Mapping[str, Sequence[StudyPoint]],
    places: Mapping[str, ArrayLike],
    axis: str,
    chance: float,
    title: str,
    costs: bool = True,
) -> Figure:
    """Accuracy (%) against a logarithmic axis, a line for each series, with intervals; costs: two more panels.

    places: of each series' points on the axis, above 0; axis: its label. Raises InputError as `points_in_rows`
    does, and where places and points do not match.
    """
    panels = 1 + len(_COSTS) * costs
    figure = sheet(WIDE if costs else WIDE * 0.7, 2.6)
    first, *others = figure.subplots(1, panels, squeeze=False, width_ratios=(1.5, 1, 1)[:panels])[0]
    chance_line(first, chance, upright=False)
    for index, (name, points) in enumerate(series.items()):
        colour, marker = SERIES[index % len(SERIES)], _MARKERS[index % len(_MARKERS)]
        values, spent = _values(points)
        at = as_array(places[name], name=f"places of {name}", axes=("points",))
        if len(at) != len(points) or at.min() <= 0:
            raise InputError(f"expected {len(points)} places above 0 for {name}, found {at.tolist()}")
        beside = at * 1.025 ** (index - (len(series) - 1) / 2)  # so that intervals of two series do not overlap
        first.errorbar(
            beside, values[:, 0], np.abs(values[:, 1:].T - values[:, 0]), color=colour, fmt=f"-{marker}",
            markersize=4, capsize=2, elinewidth=1, label=shortened(name, 30),
        )  # fmt: skip
        for axes, cost in zip(others, spent.T):
            _costs(axes, at, cost, cost, f"-{marker}", colour, upright=False)
    first.set(ylim=(0, 100), title="accuracy on test images (%)")
    for axes, (_, name, _) in zip(others, _COSTS):
        axes.set(title=f"{name} (logarithmic)")
        logarithmic(axes, "y")
    every = sorted({float(place) for of_series in places.values() for place in np.asarray(of_series)})
    for axes in (first, *others):
        axes.set(xscale="log", xlabel=axis, xlim=(every[0] / 1.35, every[-1] * 1.35))
        axes.xaxis.set_major_locator(FixedLocator(every))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
    first.legend(loc="best")
    heading(figure, title)
    return figure


def _values(points: Sequence[StudyPoint]) -> tuple[Array, Array]:
    """Accuracy, low and high in % (points, 3), and costs in their units (points, 2)."""
    values = 100 * as_array(
        [[p.accuracy, p.low, p.high] for p in points], name="accuracies of the points", axes=("points", "3")
    )
    costs = as_array(
        [[scale * getattr(p, field) for field, _, scale in _COSTS] for p in points],
        name="costs of the points",
        axes=("points", "2"),
    )
    if costs.min() <= 0:
        raise InputError(f"expected costs above 0, found {costs.min():g}")
    return values, costs


def chance_line(axes: Axes, chance: float, *, upright: bool) -> None:
    """Draw the accuracy of guessing as a dashed line."""
    line = axes.axvline if upright else axes.axhline
    line(100 * chance, color=GREY, linestyle="--", linewidth=0.9, label=f"guessing: {100 * chance:.0f} %")


def _costs(axes: Axes, x: Array, y: Array, values: Array, style: str, colour: str, *, upright: bool) -> None:
    """Draw the points of a cost with their numbers beside them (upright: in rows)."""
    axes.plot(x, y, style, color=colour, markersize=4, linewidth=0.8)
    for place, height, value in zip(x, y, values):
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        shift, side = ((5, 0), "left") if upright else ((0, 5), "center")
        axes.annotate(
            text, (place, height), shift, textcoords="offset points", ha=side, va="center" if upright else "bottom",
            fontsize=SMALL, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def logarithmic(axes: Axes, side: str) -> None:
    """Make an axis logarithmic, without ticks, with room for the numbers beside its points."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    axes.set(**{f"{side}scale": "log"})
    low, high = axis.get_data_interval()
    span = max(high / low, 2.0)
    room = (0.12, 0.6) if side == "x" else (0.12, 0.25)  # shares of the span below and above
    axes.set(**{f"{side}lim": (low / span ** room[0], high * span ** room[1])})
    axis.set_major_locator(NullLocator())
    axis.set_minor_locator(NullLocator())
