"""Calibration: accuracy against confidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array
from vitlens.figures.style import GREY, HALF, SERIES, WIDE, heading, sheet, shortened, styled

FEW: Final = 30  # images of a bin below which its accuracy has a 95 % interval of up to 40 points
_PALE = "#A8A8A8"


@dataclass(frozen=True)
class Calibration:
    """One model's predictions in equal-width bins of confidence over [0, 1].

    confidence, accuracy: mean in each bin, fractions (bins,), any number where a bin is empty; count: images (bins,);
    error: the expected calibration error, a fraction.
    """

    name: str
    confidence: ArrayLike
    accuracy: ArrayLike
    count: ArrayLike
    error: float


@styled
def reliability_diagram(*, models: Sequence[Calibration], few: int = FEW) -> Figure:
    """Accuracy against confidence for each model, and below it the share of images by confidence.

    Bars below the dashed diagonal: the model is overconfident. Bins of fewer than `few` images are hollow. Raises
    InputError when there is no model, shapes differ, or a filled bin is not finite.
    """
    if not models:
        raise InputError("expected at least one model's calibration, found none")
    figure = sheet(HALF if len(models) == 1 else min(WIDE, 3.2 * len(models)), 3.5)
    panels = figure.subplots(2, len(models), squeeze=False, sharex=True, height_ratios=[3, 1])
    for index, model in enumerate(models):
        _draw(panels[0, index], panels[1, index], model, SERIES[index % len(SERIES)], few)
    panels[0, 0].set_ylabel("accuracy (%)")
    panels[1, 0].set_ylabel("images (%)")
    handles: list[Artist] = [
        Line2D([], [], color=GREY, linestyle="--", linewidth=1, label="accuracy = confidence (below: overconfident)")
    ]
    if any(((count > 0) & (count < few)).any() for count in (np.asarray(model.count) for model in models)):
        handles.append(Patch(facecolor="none", edgecolor=_PALE, label=f"fewer than {few} images"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) if len(models) > 1 else 1)
    figure.set_figheight(figure.get_figheight() + 0.17 * (1 if len(models) > 1 else len(handles)))
    heading(figure, "Accuracy by confidence")
    return figure


def _draw(upper: Axes, lower: Axes, model: Calibration, colour: str, few: int) -> None:
    count = as_array(model.count, name="count", axes=("bins",))
    filled = count > 0
    if (
        not filled.any()
        or len(np.asarray(model.accuracy)) != len(count)
        or len(np.asarray(model.confidence)) != len(count)
    ):
        raise InputError(f"expected confidence, accuracy and count of the same bins, some filled, found {model}")
    accuracy = 100 * as_array(np.asarray(model.accuracy)[filled], name="accuracy", axes=("bins",))
    confidence = 100 * as_array(np.asarray(model.confidence)[filled], name="confidence", axes=("bins",))
    width = 100 / len(count)
    middle = (np.arange(len(count))[filled] + 0.5) * width
    known = count[filled] >= few
    bars = upper.bar(middle, accuracy, width * 0.9, color=to_rgba(colour, 0.55))
    for bar in [bar for bar, is_known in zip(bars, known, strict=True) if not is_known]:
        bar.set(facecolor="none", edgecolor=_PALE, linewidth=0.8)
    upper.plot([0, 100], [0, 100], "--", color=GREY, linewidth=1)
    upper.plot(confidence[known], accuracy[known], "o", color=colour, markersize=4)
    upper.plot(confidence[~known], accuracy[~known], "o", color=GREY, markerfacecolor="white", markersize=4)
    upper.set_ylim(0, 103)
    upper.set_xlim(0, 100)
    upper.set_title(f"{shortened(model.name, 24)}: ECE {100 * model.error:.1f} points")
    lower.bar(middle, 100 * count[filled] / count.sum(), width * 0.9, color=GREY)
    lower.set_xlabel(f"confidence (%), n = {count.sum():,.0f}")
