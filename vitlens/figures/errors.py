"""Errors of two models: which is wrong, by class and by properties of the images, and what differs in failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import legend_in
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    SERIES,
    SMALL,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

_COLOURS: Final = ("#D0D0D0", BLUE, VERMILLION, PURPLE, ORANGE)
_MOST_ROWS = 30
_MARKERS: Final = ("o", "s")


@styled
def error_cells(*, counts: Mapping[str, Sequence[int]], cells: Sequence[str], all_name: str = "all") -> Figure:
    """Which of two models is wrong, as shares of the images of each row.

    counts: images in each cell, by row ("all", then classes); cells: their names, first that of the cell in
    which both are right. Of more than 30 classes those with most errors are drawn. Raises InputError for a row
    without images or of another length.
    """
    rows = {name: as_array(values, name=f"counts of {name}", axes=("cells",)) for name, values in counts.items()}
    for name, values in rows.items():
        require_length(len(values), len(cells), name=f"counts of {name}", of="the cells")
        if values.sum() <= 0 or values.min() < 0:
            raise InputError(f"expected images in row {name}, found {values.tolist()}")
    names = [name for name in rows if name != all_name]
    if len(names) > _MOST_ROWS:
        names = sorted(names, key=lambda name: rows[name][0] / rows[name].sum())[:_MOST_ROWS]
    shown = [*([all_name] if all_name in rows else []), *names]
    figure = sheet(WIDE * 0.85, 0.9 + 0.21 * len(shown))
    axes = figure.add_subplot()
    place = np.arange(len(shown))
    left = np.zeros(len(shown))
    for index, cell in enumerate(cells):
        share = np.array([100 * rows[name][index] / rows[name].sum() for name in shown])
        axes.barh(place, share, 0.78, left=left, color=_COLOURS[index % len(_COLOURS)], label=cell)
        left += share
    axes.set_yticks(place.tolist(), [f"{shortened(name)} ({rows[name].sum():,.0f})" for name in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlim=(0, 100), xlabel="images (%); in brackets: their number")
    figure.legend(loc="outside lower center", ncols=2)
    note = f": the {_MOST_ROWS} of {len(rows) - 1} classes with most errors" if len(rows) - 1 > _MOST_ROWS else ""
    heading(figure, f"Which model is wrong, by class{note}")
    return figure


@dataclass(frozen=True)
class AccuracyBySlice:
    """Accuracy of both models over slices of one property of the images.

    title: the property; edges: of the slices, ascending (slices + 1,); n: images in each; first, second: rows value,
    low, high as fractions (3, slices).
    """

    title: str
    edges: Sequence[float]
    n: Sequence[int]
    first: ArrayLike
    second: ArrayLike


@styled
def errors_by_number(*, numbers: Sequence[AccuracyBySlice], names: tuple[str, str]) -> Figure:
    """Accuracy of both models by properties of the images, one panel per property, with 95 % intervals.

    Raises InputError where lengths differ.
    """
    if not numbers:
        raise InputError("expected at least one property to divide images by, found none")
    across = min(3, len(numbers))
    down = -(-len(numbers) // across)
    figure = sheet(WIDE, 0.15 + 1.85 * down)
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, number in zip(panels.flat, numbers):
        for index, values in enumerate((number.first, number.second)):
            value, low, high = 100 * as_array(values, name=number.title, axes=("ends", "slices"))
            require_length(len(value), len(number.edges) - 1, name="accuracies", of=f"the slices of {number.title}")
            place = np.arange(len(value)) + (index - 0.5) * 0.16
            spread = np.stack([value - low, high - value]).clip(min=0)
            axes.errorbar(
                place, value, spread, color=SERIES[index], marker=_MARKERS[index], markersize=4, linewidth=1,
                elinewidth=0.9, capsize=2, label=names[index],
            )  # fmt: skip
        slices = len(number.edges) - 1
        axes.set_xticks(np.arange(slices + 1) - 0.5, [_edge(edge) for edge in number.edges])
        axes.set_xlim(-0.5, slices - 0.5)
        axes.set_title(number.title)
        axes.set_ylim(0, 105)
        axes.grid()
    for row in panels:
        row[0].set_ylabel("accuracy (%)")
    handles, _ = panels.flat[0].get_legend_handles_labels()
    legend_in(figure, handles, columns=2, spare=panels.flat[len(numbers) :])
    heading(figure, "Accuracy by properties of the images, in quarters of the images; lines: 95 % intervals")
    return figure


def _edge(value: float) -> str:
    """The limit of a slice in two digits, and whole from 10."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}" if abs(value) >= 1e-3 or not value else f"{value:.0e}"


@dataclass(frozen=True)
class SeparationMark:
    """The probability that a property is greater in a failure than in a success: area, low and high (None: too few
    images); clear: whether the test rejects after Holm's correction."""

    name: str
    area: float
    low: float | None
    high: float | None
    clear: bool


@styled
def separation_chart(*, rows: Mapping[str, Sequence[SeparationMark]], title: str) -> Figure:
    """For each model, which properties are greater in its failures (right of the middle) or in its successes (left).

    Filled marks are significant after Holm's correction. Raises InputError when there is nothing to draw.
    """
    shown = {model: list(marks) for model, marks in rows.items() if marks}
    if not shown:
        raise InputError("expected at least one property that separates failures from successes, found none")
    names = list(dict.fromkeys(row.name for marks in shown.values() for row in marks))
    figure = sheet(WIDE * 0.8, 0.8 + 0.25 * len(names))
    axes = figure.add_subplot()
    for index, (model, marks) in enumerate(shown.items()):
        shift = (index - (len(shown) - 1) / 2) * 0.26
        for row in marks:
            _mark(axes, row, names.index(row.name) + shift, SERIES[index % len(SERIES)], _MARKERS[index % 2])
        axes.plot([], [], _MARKERS[index % 2], color=SERIES[index % len(SERIES)], label=shortened(model, 30))
    axes.axvline(0.5, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlim=(0, 1), xlabel="probability that a failure has the greater value")
    axes.grid(axis="x")
    axes.text(0.01, 1.01, "← greater in successes", transform=axes.transAxes, fontsize=SMALL, color=GREY)
    axes.text(0.99, 1.01, "greater in failures →", transform=axes.transAxes, fontsize=SMALL, color=GREY, ha="right")
    figure.legend(loc="outside lower center", ncols=2)
    heading(figure, title)
    return figure


def _mark(axes: Axes, row: SeparationMark, place: float, colour: str, marker: str) -> None:
    if row.low is not None and row.high is not None:
        axes.hlines(place, row.low, row.high, color=colour, linewidth=1.1)
    face = colour if row.clear else "white"
    axes.plot([row.area], [place], marker, color=colour, markerfacecolor=face, markersize=4.5)
