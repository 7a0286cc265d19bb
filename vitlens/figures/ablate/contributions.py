"""The logit lens, and direct contributions of heads and MLPs to a logit."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.ablate.head_board import head_board
from vitlens.figures.gaps import as_measured
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.signed import rounded
from vitlens.figures.style import (
    BLUE,
    GREY,
    SERIES,
    SMALL,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

_LINE_STYLES: Final = ("-", "--", "-.", ":", "-", "--")  # beside SERIES, for readers and prints without colour


@styled
def logit_lens(
    *,
    values: ArrayLike,
    names: Sequence[str],
    title: str,
    unit: Literal["logit", "probability"] = "logit",
    accuracy: ArrayLike | None = None,
    n: int = 0,
) -> Figure:
    """The logits or probabilities read from the residual stream after each block, one line per class over the layers.

    values: (layers, classes) of one image, logits, or probabilities as fractions (drawn as %); names: of one to six
    classes, the first drawn thickest; accuracy: rows value, low, high of the readout on n images, fractions (3,
    layers), NaN where there is no interval, in a panel before it. Layers count from 0. Raises InputError when shapes do
    not fit, for numbers that are not finite, and for a probability or an accuracy that is not a fraction.
    """
    curves = as_array(values, name="values", axes=("layers", "classes"))
    require_length(len(names), curves.shape[1], name="names", of="the classes of values")
    if len(names) > len(SERIES):
        raise InputError(f"expected 1 to {len(SERIES)} classes, found {len(names)}")
    share = unit == "probability"
    if share and (curves.min() < -1e-6 or curves.max() > 1 + 1e-6):
        raise InputError(f"expected probabilities as fractions, found {curves.min():.3g} to {curves.max():.3g}")
    figure = sheet(WIDE * (0.8 if accuracy is None else 1.0), 2.9)
    panels = figure.subplots(1, 1 if accuracy is None else 2, squeeze=False)[0]
    axes, layers = panels[-1], np.arange(len(curves))
    if accuracy is not None:
        _draw_accuracy(panels[0], accuracy, len(layers), n)
        axes.set_title("example: one image")
    for index, (name, curve) in enumerate(zip(names, curves.T)):
        (line,) = axes.plot(layers, 100 * curve if share else curve, _LINE_STYLES[index], color=SERIES[index])
        line.set(linewidth=1.2 if index else 2.2, marker="o", markersize=2.4, label=shortened(name, 30))
    if share:
        axes.set_ylim(0, 102)
    axes.set(ylabel="probability (%)" if share else "logit")
    for panel in panels:
        panel.set(xlabel="layer (after its block)", xlim=(-0.5, len(curves) - 0.5))
        panel.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        panel.grid(axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2 if accuracy is None else 3)
    heading(figure, title)
    return figure


def _draw_accuracy(axes: Axes, accuracy: ArrayLike, layers: int, n: int) -> None:
    """Draw the accuracy of the readout after each block with its intervals; accuracy: rows value, low, high."""
    rows = as_measured(accuracy, name="accuracy", axes=("ends", "layers"))
    if rows.shape != (3, layers):
        raise InputError(f"expected accuracy of shape (3, {layers}), found {rows.shape}")
    if np.nanmin(rows) < -1e-6 or np.nanmax(rows) > 1 + 1e-6:
        raise InputError(f"expected accuracy as fractions, found {np.nanmin(rows):.3g} to {np.nanmax(rows):.3g}")
    value, low, high = 100 * rows
    axes.fill_between(range(layers), low, high, color=GREY, alpha=0.2, linewidth=0)
    axes.plot(range(layers), value, color=GREY, marker="o", markersize=2.4)
    axes.set(ylim=(0, 102), ylabel="accuracy (%)", title=f"{n:,} images; band: 95 % interval")


@styled
def contribution_bars(*, heads: ArrayLike, mlps: ArrayLike, rest: float, title: str, unit: str = "logit") -> Figure:
    """The contribution of every head and MLP to a logit (or to a difference of two): a map white at 0, and the sums.

    heads: (layers, heads), NaN where there is no such head; mlps: (layers,); rest: of embeddings and biases; all in
    the unit. The bars are the sums over heads and MLPs, the rest, and the sum of all, which is the logit.
    Colours and errors as importance_map; mlps and rest must be finite.
    """
    values = as_measured(heads, name="heads", axes=("layers", "heads"))
    column = as_array(mlps, name="mlps", axes=("layers",))
    other = float(as_array([rest], name="rest", axes=("1",))[0])
    drawn, place = head_board(title=title, heads=values, columns={"MLP": column}, unit=unit, right=2.5, tallest=3.2)
    sums = {"heads": float(np.nansum(values)), "MLPs": float(column.sum()), "rest": other}
    sums[f"all = {shortened(unit, 10)}"] = sum(sums.values())
    axes = drawn.place(place + 0.75, drawn.top + 0.2, 1.2, drawn.bottom - drawn.top - 0.2)
    _draw_sums(axes, sums)
    return drawn.figure


def _draw_sums(axes: Axes, sums: Mapping[str, float]) -> None:
    numbers = list(sums.values())
    colours = [*(BLUE if number < 0 else VERMILLION for number in numbers[:-1]), GREY]  # as the map's
    axes.barh(range(len(sums)), numbers, 0.65, color=colours)
    for row, word in enumerate(rounded(numbers)):
        axes.annotate(
            word,
            (1, row),
            (3, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            size=SMALL,
        )
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(range(len(sums)), list(sums))
    axes.set_ylim(len(sums) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.set_title("sums")
