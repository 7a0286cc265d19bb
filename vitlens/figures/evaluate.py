"""Predictions of single images, and accuracy by class."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import PHOTOGRAPHS, Margins, board, without_frames
from vitlens.figures.inputs import as_array, as_images, require_length
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import (
    GREY,
    RIGHT,
    RIGHT_SYMBOL,
    SERIES,
    SMALL,
    WIDE,
    WRONG,
    WRONG_SYMBOL,
    heading,
    sheet,
    shortened,
    styled,
)

_MOST_BARS = 30  # classes whose names are still legible


@styled
def prediction_grid(
    *, images: ArrayLike, predicted: ArrayLike, probability: ArrayLike, truth: ArrayLike, classes: Sequence[str]
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1] with their prediction, marked right or wrong by colour and symbol.

    predicted, truth: class indices (batch,); probability: of the prediction, a fraction (batch,). The true class is
    below a wrong one. Raises InputError when shapes do not fit or an index has no class.
    """
    pictures = as_images(images)
    predictions, labels = _indices(predicted, "predicted", len(classes)), _indices(truth, "truth", len(classes))
    probabilities = as_array(probability, name="probability", axes=("batch",))
    for name, values in (("predictions", predictions), ("probabilities", probabilities), ("truths", labels)):
        require_length(len(values), len(pictures), name=name, of="the images")
    across = min(6, len(pictures))
    panel = min((WIDE - 0.16) / across - 0.12, (PHOTOGRAPHS / len(pictures)) ** 0.5, 1.5)
    rights = [prediction == label for prediction, label in zip(predictions, labels, strict=True)]
    captions = [
        _caption(prediction == label, classes[prediction], float(value), classes[label])
        for prediction, value, label in zip(predictions, probabilities, labels, strict=True)
    ]
    caption_room = 0.12 + 0.14 * max(caption.count("\n") + 1 for caption in captions)
    drawn = board(
        title=f"Predictions and their probability: {sum(rights)} of these {len(pictures)} right",
        count=len(pictures),
        across=across,
        panel=(panel, panel * pictures.shape[2] / pictures.shape[3]),
        gap=(0.12, caption_room),
        margins=Margins(left=0.08, right=0.08, bottom=caption_room),
    )
    for index, (axes, picture) in enumerate(zip(drawn.panels, pictures, strict=True)):
        axes.imshow(enlarged(picture))
        without_frames([axes])
        colour = RIGHT if rights[index] else WRONG
        axes.spines[:].set(visible=True, color=colour, linewidth=2)
        axes.set_xlabel(captions[index], color=colour, fontsize=SMALL, labelpad=3)
    return drawn.figure


def _caption(right: bool, predicted: str, confidence: float, truth: str) -> str:
    """The prediction with its probability, and the true class of a wrong one, in lines that fit a panel."""
    probability = f"{100 * confidence:.0f} %"
    between = ", " if len(predicted) + len(probability) < 14 else "\n"
    caption = f"{RIGHT_SYMBOL if right else WRONG_SYMBOL} {shortened(predicted, 16)}{between}{probability}"
    return caption if right else f"{caption}\nis {shortened(truth, 16)}"


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


def _indices(values: ArrayLike, name: str, classes: int) -> list[int]:
    indices = as_array(values, name=name, axes=("batch",)).astype(np.int64)
    if indices.min() < 0 or indices.max() >= classes:
        raise InputError(f"expected {name} from 0 to {classes - 1}, found {indices.min()} to {indices.max()}")
    return [int(index) for index in indices]
