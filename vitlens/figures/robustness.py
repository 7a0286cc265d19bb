"""Accuracy of models on disturbed images, and shape bias."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import legend_in
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled

_MARKERS: Final = "osD^vP"


@dataclass(frozen=True)
class DisturbancePanel:
    """One disturbance or corruption: title, axis: for the panel; labels: one per level, the undisturbed image first;
    curves: for each model rows value, low, high as fractions (3, levels)."""

    title: str
    axis: str
    labels: Sequence[str]
    curves: Mapping[str, ArrayLike]


@styled
def robustness_curves(*, disturbances: Sequence[DisturbancePanel], chance: float, n: int) -> Figure:
    """Accuracy (%) of each model by level, one panel per disturbance, with 95 % intervals as bands and chance dashed.

    chance: fraction; n: images at each level. Raises InputError when lengths differ or there is nothing to draw.
    """
    if not disturbances:
        raise InputError("expected at least one disturbance, found none")
    across = min(2, len(disturbances))
    down = -(-len(disturbances) // across)
    figure = sheet(WIDE if across == 2 else WIDE / 2, 0.15 + 2.1 * down)
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, disturbance in zip(panels.flat, disturbances):
        for index, (name, values) in enumerate(disturbance.curves.items()):
            value, low, high = 100 * as_array(values, name=f"{disturbance.title} of {name}", axes=("ends", "levels"))
            require_length(
                len(value), len(disturbance.labels), name="accuracies", of=f"the levels of {disturbance.title}"
            )
            colour = SERIES[index % len(SERIES)]
            place = np.arange(len(value))
            axes.fill_between(place, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(place, value, marker=_MARKERS[index % len(_MARKERS)], markersize=3.4, color=colour, label=name)
        axes.axhline(100 * chance, color=GREY, linestyle="--", linewidth=0.8)
        axes.set_xticks(range(len(disturbance.labels)), list(disturbance.labels))
        axes.set(title=disturbance.title, xlabel=disturbance.axis, ylim=(0, 104))
        axes.grid(axis="y")
    for row in panels:
        row[0].set_ylabel("accuracy (%)")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    for handle, label in zip(handles, labels):
        handle.set_label(shortened(label, 30))
    legend_in(figure, handles, columns=2, spare=panels.flat[len(disturbances) :])
    heading(figure, f"Accuracy on disturbed images, {n:,} images; bands: 95 % intervals; dashed: chance")
    return figure


@dataclass(frozen=True)
class Bias:
    """One model's shape bias: overall (value, low, high; fractions, ends None where there is no interval), and for
    each class the number of predictions by shape and by texture."""

    name: str
    value: float
    low: float | None
    high: float | None
    shape: Mapping[str, int]
    texture: Mapping[str, int]


@styled
def shape_bias_chart(*, models: Sequence[Bias]) -> Figure:
    """Predictions by shape as a share of those by shape or texture, for each class of shape and overall.

    Marks of a class without such predictions are left out. Raises InputError when models know different classes.
    """
    if not models or any(list(model.shape) != list(models[0].shape) for model in models):
        raise InputError("expected models with the same classes of shape, found none or different ones")
    classes = list(models[0].shape)
    figure = sheet(WIDE * 0.75, 0.9 + 0.22 * len(classes))
    axes = figure.add_subplot()
    for index, model in enumerate(models):
        colour, marker = SERIES[index % len(SERIES)], _MARKERS[index % len(_MARKERS)]
        if model.low is not None and model.high is not None:
            axes.axvspan(100 * model.low, 100 * model.high, color=colour, alpha=0.13, linewidth=0)
        axes.axvline(100 * model.value, color=colour, linewidth=1.2)
        shift = (index - (len(models) - 1) / 2) * 0.24
        for place, name in enumerate(classes):
            decided = model.shape[name] + model.texture[name]
            if decided:
                axes.plot([100 * model.shape[name] / decided], [place + shift], marker, color=colour, markersize=4)
        axes.plot([], [], marker, color=colour, label=f"{shortened(model.name, 24)}: {100 * model.value:.0f} %")
    axes.set_yticks(range(len(classes)), [shortened(name) for name in classes])
    axes.set_ylim(len(classes) - 0.5, -0.5)
    axes.set(xlim=(-2, 102), xlabel="predictions by shape, of those by shape or texture (%)")
    axes.grid(axis="x")
    axes.text(0.0, 1.01, "← texture", transform=axes.transAxes, fontsize=SMALL, color=GREY)
    axes.text(1.0, 1.01, "shape →", transform=axes.transAxes, fontsize=SMALL, color=GREY, ha="right")
    figure.legend(loc="outside lower center", ncols=2)
    heading(figure, "Shape or texture, by class of shape; lines and bands: overall with 95 % intervals")
    return figure
