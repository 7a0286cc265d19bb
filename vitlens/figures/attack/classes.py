"""Accuracy of each class, clean and under attack."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import models_legend, series_style
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import WIDE, heading, sheet, shortened, styled

_MOST_CLASSES: Final = 30


@dataclass(frozen=True)
class ByClass:
    """One model: clean and robust accuracy of each class, rows value, low, high as fractions (3, classes)."""

    name: str
    clean: ArrayLike
    robust: ArrayLike


@styled
def class_robustness(*, models: Sequence[ByClass], classes: Sequence[str], title: str) -> Figure:
    """Accuracy (%) of each class, clean (ring) and under attack (filled, with 95 % intervals).

    Of more than 30 classes those with the greatest loss (mean over models) are drawn. Raises InputError when lengths
    differ.
    """
    if not models or not classes:
        raise InputError("expected at least one model and one class, found none")
    accuracies = []
    for model in models:
        both = (model.clean, model.robust)
        clean, robust = (as_array(rows, name=model.name, axes=("ends", "classes")) for rows in both)
        require_length(clean.shape[1], len(classes), name=f"accuracies of {model.name}", of="the classes")
        require_length(robust.shape[1], len(classes), name=f"robust accuracies of {model.name}", of="the classes")
        accuracies.append((100 * clean, 100 * robust))
    lost = np.mean([clean[0] - robust[0] for clean, robust in accuracies], axis=0)
    order = np.argsort(-lost, kind="stable")[:_MOST_CLASSES]
    figure = sheet(WIDE * 0.8, 0.8 + max(0.24, 0.13 * len(models)) * len(order))
    axes = figure.add_subplot()
    for index, (clean, robust) in enumerate(accuracies):
        colour, marker = series_style(index)
        place = np.arange(len(order)) + (index - (len(accuracies) - 1) / 2) * 0.7 / len(accuracies)
        axes.hlines(place, robust[0, order], clean[0, order], color=colour, alpha=0.35, linewidth=0.8)
        axes.hlines(place, robust[1, order], robust[2, order], color=colour, linewidth=1.6)
        axes.plot(clean[0, order], place, marker, color=colour, markerfacecolor="none", markersize=6.4)
        axes.plot(robust[0, order], place, marker, color=colour, markersize=3.4)
    axes.set_yticks(range(len(order)), [shortened(classes[index]) for index in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set(xlim=(-3, 103), xlabel="accuracy (%); ring: clean, filled: under attack")
    axes.grid(axis="x")
    models_legend(figure, [shortened(model.name, 30) for model in models])
    note = (
        f": the {_MOST_CLASSES} of {len(classes)} classes with the greatest loss"
        if len(classes) > _MOST_CLASSES
        else ""
    )
    heading(figure, f"{title}{note}; lines: 95 % intervals")
    return figure
