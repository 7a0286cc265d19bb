"""Accuracy by class."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import GREY, SERIES, heading, sheet, shortened, styled

_MOST_BARS = 30  # classes whose names are still legible


@styled
def per_class_bars(
    *, accuracy: ArrayLike, low: ArrayLike, high: ArrayLike, n: ArrayLike, classes: Sequence[str], models: Sequence[str]
) -> Figure:
    """Accuracy of each class with its 95 % interval, for one or more models.

    accuracy, low, high: fractions (models, classes); n: images of each class (classes,). Of more than 30 classes the
    30 with the lowest accuracy (mean of models) are drawn, lowest first, and the title says so. Raises InputError when
    shapes do not fit or a number is not finite (a class without images has no accuracy: leave it out).
    """
    value, below, above = (
        100 * as_array(values, name=name, axes=("models", "classes"))
        for name, values in (("accuracy", accuracy), ("low", low), ("high", high))
    )
    count = as_array(n, name="n", axes=("classes",))
    for name, array in (("accuracies", value), ("lows", below), ("highs", above)):
        if array.shape != (len(models), len(classes)):
            raise InputError(f"expected {name} of shape ({len(models)}, {len(classes)}), found {array.shape}")
    require_length(len(count), len(classes), name="n", of="the classes")
    shown = np.arange(len(classes))
    if len(classes) > _MOST_BARS:
        shown = np.argsort(value.mean(axis=0), kind="stable")[:_MOST_BARS]
    figure = sheet(4.8, 0.5 + len(shown) * (0.12 + 0.11 * len(models)))
    axes = figure.add_subplot()
    thick = 0.8 / len(models)
    for index, model in enumerate(models):
        place = np.arange(len(shown)) + (index - (len(models) - 1) / 2) * thick
        # of one model no colour, which in a report of several is that of another
        colour = SERIES[index % len(SERIES)] if len(models) > 1 else GREY
        axes.barh(place, value[index, shown], thick * 0.9, color=colour, alpha=0.85, label=model)
        axes.hlines(place, below[index, shown], above[index, shown], color="black", linewidth=0.9)
    axes.set_yticks(range(len(shown)), [f"{shortened(classes[i])} ({count[i]:,.0f})" for i in shown.tolist()])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("accuracy (%); lines: 95 % intervals; in brackets: images")
    axes.grid(axis="x")
    if len(models) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    note = "" if len(shown) == len(classes) else f": the {len(shown)} lowest of {len(classes)} classes"
    heading(figure, f"Accuracy by class{note}" + (f", {models[0]}" if len(models) == 1 else ""))
    return figure
