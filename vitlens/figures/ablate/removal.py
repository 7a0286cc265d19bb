"""Accuracy of a model as its heads are removed, in several orders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.style import GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled

_LINE_STYLES: Final = ("-", "--", "-.", ":", "-", "--")  # beside SERIES, for readers and prints without colour


@dataclass(frozen=True)
class AccuracyCurve:
    """Accuracy as heads are removed; all (k,), fractions. share: of heads removed, ascending from 0; low, high: 95 %
    interval."""

    share: ArrayLike
    accuracy: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None


@styled
def removal_curves(
    *,
    curves: Mapping[str, AccuracyCurve],
    title: str,
    random: Sequence[AccuracyCurve] = (),
    removable: float | None = None,
    points: float = 1.0,
) -> Figure:
    """Accuracy (%) against heads removed (%), one curve per order, with its 95 % interval as a band.

    curves: one to six by name, such as "least important first", "most important first", "first-order", "greedy"; all
    begin at the clean accuracy, where nothing is removed; random: random orders, all at the same shares, as thin grey
    lines with their mean; points: the accepted loss of accuracy: a dashed line is that much below the clean accuracy;
    removable: the share of heads (fraction) that can be removed in the FIRST order within this loss, marked on its
    curve. Raises InputError when lengths differ, for a number that is not a fraction, and for curves that begin at
    different accuracies.
    """
    if not 1 <= len(curves) <= len(SERIES):
        raise InputError(f"expected 1 to {len(SERIES)} curves, found {len(curves)}")
    lines = {name: _percent(curve, repr(name)) for name, curve in curves.items()}
    orders = [_percent(curve, f"random order {index}") for index, curve in enumerate(random, start=1)]
    clean = _clean(lines, orders)
    figure = sheet(WIDE * 0.8, 3.3)
    axes = figure.add_subplot()
    _draw_random(axes, orders)
    for (name, line), colour, style in zip(lines.items(), SERIES, _LINE_STYLES):
        axes.fill_between(line[0], line[2], line[3], color=colour, alpha=0.15, linewidth=0)
        marker = "o" if len(line[0]) <= 40 else ""
        axes.plot(line[0], line[1], style, color=colour, marker=marker, markersize=2.4, label=shortened(name, 30))
    label = f"clean − {points:g} {'point' if points == 1 else 'points'}: {clean - points:.1f} %"
    axes.axhline(clean - points, color="black", linestyle=(0, (4, 3)), linewidth=0.8, label=label)
    if removable is not None:
        _mark(axes, next(iter(lines.values())), removable, clean - points)
    every = np.concatenate([line[1:].ravel() for line in (*lines.values(), *orders)])
    axes.set(xlim=(0, 100), ylim=(0, 1.08 * max(float(np.nanmax(every)), 1.0)))
    axes.set(xlabel="heads removed (%)", ylabel="accuracy (%)")
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=2)
    banded = any(not np.isnan(line[2]).all() for line in lines.values())
    heading(figure, f"{title}{'; bands: 95 % intervals' if banded else ''}")
    return figure


def _percent(curve: AccuracyCurve, name: str) -> Array:
    """Rows share, accuracy, low, high in %; the ends are NaN where there is no interval."""
    if (curve.low is None) != (curve.high is None):
        raise InputError(f"expected both ends of the interval of {name}, found one")
    columns = {"share": curve.share, "accuracy": curve.accuracy, "low": curve.low, "high": curve.high}
    rows = {key: as_array(v, name=f"{key} of {name}", axes=("k",)) for key, v in columns.items() if v is not None}
    for key, row in rows.items():
        require_length(len(row), len(rows["share"]), name=f"values of {key} of {name}", of="the shares")
        if row.min() < -1e-9 or row.max() > 1 + 1e-9:
            raise InputError(f"expected {key} of {name} as fractions, found {row.min():.3g} to {row.max():.3g}")
    share = rows["share"]
    if share[0] != 0 or (np.diff(share) <= 0).any():
        raise InputError(f"expected share of {name} to rise from 0, found {np.round(share[:5], 3).tolist()} ...")
    missing = np.full(len(share), np.nan)
    return 100 * np.stack([rows.get(key, missing) for key in columns])


def _clean(lines: Mapping[str, Array], orders: Sequence[Array]) -> float:
    """The accuracy at which all curves begin. Raises InputError where it differs, or shares of random orders do."""
    clean = float(next(iter(lines.values()))[1, 0])
    named = {
        **{repr(name): line for name, line in lines.items()},
        **{f"random order {i}": o for i, o in enumerate(orders, 1)},
    }
    for name, line in named.items():
        if abs(line[1, 0] - clean) > 1e-6:
            raise InputError(f"expected {name} to begin at the clean accuracy {clean:.4g} %, found {line[1, 0]:.4g} %")
    for order in orders:
        if order.shape != orders[0].shape or not np.allclose(order[0], orders[0][0]):
            raise InputError("expected random orders at the same shares, found different ones")
    return clean


def _draw_random(axes: Axes, orders: Sequence[Array]) -> None:
    for index, order in enumerate(orders):
        axes.plot(order[0], order[1], color="#A0A0A0", linewidth=0.5, alpha=0.7, label="" if index else "random orders")
    if len(orders) > 1:
        mean = np.mean([order[1] for order in orders], axis=0)
        axes.plot(orders[0][0], mean, color=GREY, linewidth=1.8, label=f"mean of {len(orders)} random orders")


def _mark(axes: Axes, line: Array, removable: float, least: float) -> None:
    """Mark the share of heads that can be removed by a ring and in words; least: accuracy in %."""
    if not 0 <= removable <= 1:
        raise InputError(f"expected removable as a fraction, found {removable:.3g}")
    share = 100 * removable
    accuracy = float(np.interp(share, line[0], line[1]))
    if accuracy < least - 1e-6:
        raise InputError(f"expected at least {least:.4g} % where removable says so, found {accuracy:.4g} %")
    axes.plot([share], [accuracy], "o", color="white", markeredgecolor="black", markersize=6, zorder=5, clip_on=False)
    axes.plot([share, share], [0, accuracy], color="black", linewidth=0.6, linestyle=":")
    side, shift = ("left", 4) if share < 60 else ("right", -4)
    words = f"{share:.0f} % removable"
    axes.annotate(words, (share, 0), (shift, 4), textcoords="offset points", ha=side, fontsize=SMALL)
