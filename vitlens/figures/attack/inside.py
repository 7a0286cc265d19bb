"""What an attack changes inside models, by block and by layer; both count from 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.gaps import as_array_with_gaps
from vitlens.figures.inputs import as_array
from vitlens.figures.style import GREY, SERIES, WIDE, heading, sheet, shortened, styled

_LINES: Final = ("-", "--", ":")
_LEAST: Final = 1e-7  # of 1 - cosine, about the rounding error


@styled
def block_distances(*, models: Mapping[str, Mapping[str, ArrayLike]], title: str) -> Figure:
    """The distance of each block's output from that for the clean image, one panel per model, a line per counterpart.

    The distance is 1 - cosine, on a logarithmic scale, as an attack often changes representations by a thousandth.

    models: by name, by counterpart ("adversarial", "noise", "another image"): rows value, low, high (3, blocks), cosine
    similarities. Raises InputError when there is nothing to draw.
    """
    if not models or not all(models.values()):
        raise InputError("expected at least one model with one counterpart, found none")
    across = min(2, len(models))
    down = -(-len(models) // across)
    figure = sheet(WIDE if across > 1 else WIDE * 0.65, 0.3 + 2.3 * down)
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    kinds = list(dict.fromkeys(kind for curves in models.values() for kind in curves))
    for axes, (model, curves) in zip(panels.flat, models.items()):
        for kind, values in curves.items():
            value, low, high = as_array(values, name=f"{kind} of {model}", axes=("ends", "blocks"))
            place, index = np.arange(len(value)), kinds.index(kind)
            value, low, high = (np.clip(1 - ends, _LEAST, None) for ends in (value, high, low))
            axes.fill_between(place, low, high, color=SERIES[index], alpha=0.18, linewidth=0)
            axes.plot(place, value, _LINES[index % len(_LINES)], color=SERIES[index], marker="o", markersize=2.6)
        axes.set(title=shortened(model, 44), xlabel="block", yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
    for axes in panels.flat[len(models) :]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel("1 − cosine with the clean image's")
    for index, kind in enumerate(kinds):
        panels.flat[0].plot([], [], _LINES[index % len(_LINES)], color=SERIES[index], label=kind)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    heading(figure, f"{title}; bands: 95 % intervals")
    return figure


@dataclass(frozen=True)
class LayerShift:
    """One statistic of attention: title; axis: its label with the unit; models: by name, rows value, low, high of
    after minus before (3, layers), NaN where a layer has none."""

    title: str
    axis: str
    models: Mapping[str, ArrayLike]


@styled
def attention_shifts(*, shifts: Sequence[LayerShift], title: str) -> Figure:
    """The change of each layer's attention, one panel per statistic, with 95 % intervals; 0 is no change.

    Raises InputError when there is nothing to draw.
    """
    if not shifts or not all(shift.models for shift in shifts):
        raise InputError("expected at least one statistic of one model, found none")
    figure = sheet(WIDE if len(shifts) > 1 else WIDE * 0.6, 2.5)
    panels = figure.subplots(1, len(shifts), squeeze=False)[0]
    names = list(dict.fromkeys(name for shift in shifts for name in shift.models))
    for axes, shift in zip(panels, shifts):
        for name, values in shift.models.items():
            value, low, high = as_array_with_gaps(values, name=f"{shift.title} of {name}", axes=("ends", "layers"))
            index = names.index(name)
            place = np.arange(len(value)) + (index - (len(shift.models) - 1) / 2) * 0.15
            spread = np.stack([value - low, high - value]).clip(min=0)
            axes.errorbar(
                place, value, spread, color=SERIES[index], marker="o", markersize=3.2, linewidth=1, elinewidth=0.9,
                capsize=2, label=shortened(name, 30),
            )  # fmt: skip
        axes.axhline(0, color=GREY, linewidth=0.8, linestyle="--")
        axes.set(title=shift.title, xlabel="layer", ylabel=shift.axis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    heading(figure, f"{title}; lines: 95 % intervals")
    return figure
