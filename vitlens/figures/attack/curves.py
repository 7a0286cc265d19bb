"""Accuracy under attack over epsilon, and histograms of the smallest perturbations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import models_legend, series_style
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import GREY, SMALL, WIDE, heading, sheet, shortened, styled


@dataclass(frozen=True)
class Panel:
    """One panel of curves.

    title, axis: above and below it; epsilons: ascending, in the axis's unit, from 0 where clean accuracy is shown;
    curves: by name, rows value, low, high as fractions (3, epsilons).
    """

    title: str
    axis: str
    epsilons: Sequence[float]
    curves: Mapping[str, ArrayLike]


@styled
def robust_curves(*, panels: Sequence[Panel], title: str, chance: float | None = None) -> Figure:
    """Accuracy (%) under attack over epsilon, one panel each, with 95 % intervals as bands.

    Curves of one name have the same colour in all panels; chance: fraction, drawn dashed. Raises InputError when
    lengths differ or there is nothing to draw.
    """
    if not panels or not any(panel.curves for panel in panels):
        raise InputError("expected at least one attack with a curve, found none")
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    across = _across(len(panels))
    down = -(-len(panels) // across)
    figure = sheet(WIDE if across > 1 else WIDE * 0.65, 0.35 + (2.1 if across > 1 else 2.6) * down)
    drawn = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, panel in zip(drawn.flat, panels):
        places = as_array(list(panel.epsilons), name="epsilons", axes=("epsilons",))
        for name, values in panel.curves.items():
            value, low, high = 100 * as_array(values, name=f"accuracy of {name}", axes=("ends", "epsilons"))
            require_length(len(value), len(places), name=f"accuracies of {name}", of="the epsilons")
            colour, marker = series_style(names.index(name))
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(places, value, marker=marker, markersize=3.2, linewidth=1.2, color=colour, label=name)
        if chance is not None:
            axes.axhline(100 * chance, color=GREY, linestyle="--", linewidth=0.8)
        axes.set(title=panel.title, xlabel=panel.axis, ylim=(-3, 104))
        _ticks(axes, places.tolist())
        axes.grid(axis="y")
    for row in drawn:
        row[0].set_ylabel("accuracy (%)")
    models_legend(figure, [shortened(name, 30) for name in names], spare=drawn.flat[len(panels) :])
    dashed = "; dashed: chance" if chance is not None else ""
    heading(figure, f"{title}; bands: 95 % intervals{dashed}")
    return figure


def _across(count: int) -> int:
    """The number of panels in a row: two for four panels, otherwise up to three."""
    return 2 if count == 4 else min(3, count)


def _ticks(axes: Axes, places: Sequence[float]) -> None:
    """Set a tick at each epsilon, as far as there is room for the numbers."""
    spread = max(places) - min(places) or 1.0
    chosen: list[float] = []
    for place in reversed(places):  # the largest are furthest apart
        if not chosen or chosen[-1] - place >= 0.11 * spread:
            chosen.append(place)
    axes.xaxis.set_major_locator(FixedLocator(chosen))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


@dataclass(frozen=True)
class Distances:
    """The smallest perturbations: values (broken,), of the images that an attack broke; survived: number of correctly
    classified images that it did not break; median: None where it lies beyond all epsilons tried."""

    name: str
    values: ArrayLike
    survived: int
    median: float | None


@styled
def distance_histograms(*, panels: Mapping[str, Sequence[Distances]], axis: Mapping[str, str], title: str) -> Figure:
    """Histograms of the smallest perturbation of each correctly classified image, one panel per attack.

    panels: by attack, one entry per model, with at least one broken image in all; axis: by attack, the unit. Medians
    are drawn as lines, and the number of images never broken is written. Raises InputError when no image is broken.
    """
    shown = {name: list(models) for name, models in panels.items() if any(np.size(model.values) for model in models)}
    if not shown:
        raise InputError("expected at least one image that an attack broke, found none")
    models = list(dict.fromkeys(model.name for distances in shown.values() for model in distances))
    across = _across(len(shown))
    down = -(-len(shown) // across)
    figure = sheet(WIDE if across > 1 else WIDE * 0.65, 0.35 + 2.0 * down)
    drawn = figure.subplots(down, across, squeeze=False)
    for axes, (attack, distances) in zip(drawn.flat, shown.items()):
        _histogram(axes, distances, models)
        axes.set(title=attack, xlabel=axis[attack])
        axes.grid(axis="y")
    for row in drawn:
        row[0].set_ylabel("images classified correctly (%)")
    models_legend(figure, [shortened(name, 30) for name in models], spare=drawn.flat[len(shown) :])
    heading(figure, title)
    return figure


def _histogram(axes: Axes, distances: Sequence[Distances], models: Sequence[str]) -> None:
    values = {model.name: np.asarray(model.values, dtype=np.float64) for model in distances}
    longest = max(float(lengths.max()) for lengths in values.values() if lengths.size)
    edges = np.linspace(0, longest * 1.0001, 25)
    for model in distances:
        colour, _ = series_style(models.index(model.name))
        right = values[model.name].size + model.survived
        if not right:
            continue
        heights = np.histogram(values[model.name], edges)[0] * 100 / right
        axes.stairs(heights, edges, color=colour, fill=True, alpha=0.25)
        axes.stairs(heights, edges, color=colour, linewidth=1.1)
        if model.median is not None:
            axes.axvline(model.median, color=colour, linestyle="--", linewidth=1.0)
    axes.set_xlim(0, longest * 1.02)
    counts = [
        f"{shortened(model.name, 18)}: {model.survived} of {model.survived + values[model.name].size}"
        for model in distances
    ]
    axes.set_ylim(0, axes.get_ylim()[1] * (1.1 + 0.1 * len(counts)))  # room for the text
    axes.text(
        0.98, 0.97, "\n".join(["not broken", *counts]), transform=axes.transAxes, ha="right", va="top", fontsize=SMALL
    )
