"""Accuracy of simple classifiers on the features of each layer, over the depth of one or more models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import series_style
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import GREY, WIDE, heading, sheet, shortened, styled

_MOST: Final = 4  # most legible panels
_LONG: Final = 34  # characters of a legend's entry of which three do not fit side by side
_FAMILY: Final = {"vit": "ViT", "cnn": "CNN", "windowed": "windowed ViT"}
_OBJECTIVE: Final = {  # marker and line
    "supervised": ("o", "-"),
    "self-supervised": ("s", "--"),
    "language-image": ("^", "-."),
    "random weights": ("x", ":"),
    "not known": ("D", "-"),
}


@dataclass(frozen=True)
class DepthCurve:
    """One model in one panel: values, low, high: fractions (layers,), in order; family: that of its anatomy; embedded:
    whether the first value is of the embedding, before all layers; objective: its pretraining's, "" where it is not
    shown."""

    name: str
    values: ArrayLike
    low: ArrayLike
    high: ArrayLike
    family: str = ""
    embedded: bool = False
    objective: str = ""


@styled
def accuracy_by_depth(
    *,
    panels: Mapping[str, Sequence[DepthCurve]],
    chance: float | Mapping[str, float],
    n: int,
    title: str = "Accuracy of classifiers on features",
) -> Figure:
    """Accuracy (%) of classifiers on each layer's features, one panel per classifier, one line per model.

    panels: by the classifier's name, the models' curves; chance: fraction, or one for each panel, dashed; n: test
    images. A layer is drawn at its share of the model's depth, so that models of different depth share an axis, and the
    embedding at 0; bands are 95 % intervals. Where objectives of pretraining are given, each has a marker and a kind of
    line. Raises InputError for none or more than four panels, and where lengths differ.
    """
    if not 1 <= len(panels) <= _MOST:
        raise InputError(f"expected 1 to {_MOST} panels, found {len(panels)}")
    embedded = any(curve.embedded for curves in panels.values() for curve in curves)
    figure = sheet(WIDE if len(panels) > 1 else WIDE * 0.6, 2.5)
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, curves) in zip(every, panels.items(), strict=True):
        for index, curve in enumerate(curves):
            ends = (curve.values, curve.low, curve.high)
            value, low, high = (100 * as_array(end, name=f"{name} of {curve.name}", axes=("layers",)) for end in ends)
            for end in (low, high):
                require_length(len(end), len(value), name=f"ends of {name}", of=f"the layers of {curve.name}")
            colour, marker = series_style(index)
            own_marker, line = _OBJECTIVE.get(curve.objective, (marker, "-"))
            about = ", ".join(word for word in (_FAMILY.get(curve.family, ""), curve.objective) if word)
            layers = max(1, len(value) - curve.embedded)
            place = np.arange(1 - curve.embedded, layers + 1) / layers
            axes.fill_between(place, low, high, color=colour, alpha=0.15, linewidth=0)
            label = shortened(curve.name, 28) + (f" ({about})" if about else "")
            axes.plot(place, value, marker=own_marker, markersize=3.6, color=colour, linestyle=line, label=label)
        by_chance = chance if isinstance(chance, float | int) else chance[name]
        axes.axhline(100 * by_chance, color=GREY, linestyle="--", linewidth=0.8)
        axes.set(title=name, xlabel="share of the model's depth", xlim=(-0.04 if embedded else 0, 1.04), ylim=(0, 102))
        axes.set_xticks([0, 0.5, 1], ["embedding" if embedded else "0", "half", "last layer"])
        axes.grid(axis="y")
    every[0].set_ylabel(f"accuracy (%), {n:,} test images")
    handles, labels = every[0].get_legend_handles_labels()
    across = 2 if max(map(len, labels)) > _LONG else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=min(across, len(labels)))
    heading(figure, f"{title}, layer by layer; bands: 95 % intervals; dashed: chance")
    return figure
