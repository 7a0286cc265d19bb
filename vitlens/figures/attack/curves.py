"""Accuracy under attack over epsilon, and histograms of the smallest perturbations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled

_MARKERS: Final = "osD^vP"


@dataclass(frozen=True)
class Panel:
    """One panel of curves.

    title, axis: above and below it; epsilons: rising, in the axis's unit, 0 first where the clean accuracy is shown;
    curves: by name, rows value, low, high as fractions (3, epsilons).
    """

    title: str
    axis: str
    epsilons: Sequence[float]
    curves: Mapping[str, ArrayLike]


@styled
def robust_curves(*, panels: Sequence[Panel], title: str, chance: float | None = None) -> Figure:
    """Accuracy (%) under attack over epsilon, one panel each, with 95 % intervals as bands.

    The colour of a curve goes by its name, the same in all panels; chance: fraction, dashed. Raises InputError when
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
    for axes in drawn.flat[len(panels) :]:
        axes.set_visible(False)
    for row in drawn:
        row[0].set_ylabel("accuracy (%)")
    names_below(figure, names)
    dashed = "; dashed: chance" if chance is not None else ""
    heading(figure, f"{title}; bands: 95 % intervals{dashed}")
    return figure


def series_style(index: int) -> tuple[str, str]:
    """Colour and marker of a model or an attack, by its index."""
    return SERIES[index % len(SERIES)], _MARKERS[(index + index // len(SERIES)) % len(_MARKERS)]


def _across(count: int) -> int:
    """Panels in a row: four stand two by two."""
    return 2 if count == 4 else min(3, count)


def names_below(figure: Figure, names: Sequence[str]) -> None:
    """The names below the panels, which keep their height."""
    handles = []
    for index, name in enumerate(names):
        colour, marker = series_style(index)
        [handle] = figure.axes[0].plot([], [], marker=marker, markersize=3.6, color=colour, label=shortened(name, 30))
        handles.append(handle)
    columns = min(3, len(names))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(names) // columns))


def _ticks(axes: Axes, places: Sequence[float]) -> None:
    """A tick at each epsilon that was tried, as far as their numbers have room."""
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
    """The smallest perturbations: values (broken,), of the images that an attack broke; survived: how many correctly
    classified images it did not break; median: None where it lies beyond what was tried."""

    name: str
    values: ArrayLike
    survived: int
    median: float | None


@styled
def distance_histograms(*, panels: Mapping[str, Sequence[Distances]], axis: Mapping[str, str], title: str) -> Figure:
    """The smallest perturbation found for each image, one panel an attack: histograms of images that were right.

    panels: by attack, one entry a model, of at least one broken image in all; axis: by attack, the unit. Medians are
    drawn as lines, and how many images were never broken is written. Raises InputError when nothing is broken.
    """
    shown = {name: list(models) for name, models in panels.items() if any(np.size(one.values) for one in models)}
    if not shown:
        raise InputError("expected at least one image that an attack broke, found none")
    models = list(dict.fromkeys(one.name for distances in shown.values() for one in distances))
    across = _across(len(shown))
    down = -(-len(shown) // across)
    figure = sheet(WIDE if across > 1 else WIDE * 0.65, 0.35 + 2.0 * down)
    drawn = figure.subplots(down, across, squeeze=False)
    for axes, (attack, distances) in zip(drawn.flat, shown.items()):
        _histogram(axes, distances, models)
        axes.set(title=attack, xlabel=axis[attack])
        axes.grid(axis="y")
    for axes in drawn.flat[len(shown) :]:
        axes.set_visible(False)
    for row in drawn:
        row[0].set_ylabel("right images (%)")
    names_below(figure, models)
    heading(figure, title)
    return figure


def _histogram(axes: Axes, distances: Sequence[Distances], models: Sequence[str]) -> None:
    values = {one.name: np.asarray(one.values, dtype=np.float64) for one in distances}
    longest = max(float(some.max()) for some in values.values() if some.size)
    edges = np.linspace(0, longest * 1.0001, 25)
    for one in distances:
        colour, _ = series_style(models.index(one.name))
        right = values[one.name].size + one.survived
        if not right:
            continue
        heights = np.histogram(values[one.name], edges)[0] * 100 / right
        axes.stairs(heights, edges, color=colour, fill=True, alpha=0.25)
        axes.stairs(heights, edges, color=colour, linewidth=1.1)
        if one.median is not None:
            axes.axvline(one.median, color=colour, linestyle="--", linewidth=1.0)
    axes.set_xlim(0, longest * 1.02)
    counts = [f"{shortened(one.name, 18)}: {one.survived} of {one.survived + np.size(one.values)}" for one in distances]
    axes.set_ylim(0, axes.get_ylim()[1] * (1.1 + 0.1 * len(counts)))  # room for the text
    axes.text(
        0.98, 0.97, "\n".join(["not broken", *counts]), transform=axes.transAxes, ha="right", va="top", fontsize=SMALL
    )
