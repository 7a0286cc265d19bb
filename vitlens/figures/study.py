"""The summary of a study: accuracy of the models, and the pointing game of the maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.gaps import as_array_with_gaps
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import BLUE, GREY, SERIES, SIGNED, SMALL, WIDE, heading, sheet, shortened, styled


@dataclass(frozen=True)
class SummaryBar:
    """A named fraction with its 95 % interval and the number of images it is measured on."""

    name: str
    value: float
    low: float
    high: float
    n: int


@styled
def study_summary(
    *, accuracy: Sequence[SummaryBar], pointing: Sequence[SummaryBar] = (), mask_area: float | None = None, title: str
) -> Figure:
    """Accuracy of the models, and hit rates of the maps in the pointing game, with the mask area as baseline.

    All are fractions, drawn as % from 0 to 100. mask_area: the mean share of the image that the mask covers, which is
    the hit rate of a random point. Without pointing there is one panel. Raises InputError for an empty accuracy or
    a number that is not finite.
    """
    panels = 2 if pointing else 1
    rows = max(len(accuracy), len(pointing) + (mask_area is not None))
    figure = sheet(WIDE * (0.6 if panels == 1 else 1), 0.75 + 0.34 * rows)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _bars(axes[0], accuracy, SERIES)
    axes[0].set_title("Accuracy on test images (%)")
    if pointing:
        _bars(axes[1], pointing, (BLUE,))
        axes[1].set_title("Pointing game: highest point on the object (%)")
        if mask_area is not None:
            _baseline(axes[1], float(as_array([mask_area], name="mask_area", axes=("1",))[0]))
    heading(figure, f"{title} (lines: 95 % intervals)")
    return figure


def _bars(axes: Axes, estimates: Sequence[SummaryBar], colours: Sequence[str]) -> None:
    numbers = 100 * as_array([[e.value, e.low, e.high] for e in estimates], name="estimates", axes=("bars", "3"))
    for place, (value, low, high) in enumerate(numbers):
        axes.barh(place, value, height=0.6, color=colours[place % len(colours)], alpha=0.85)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        axes.text(102, place, f"{value:.1f}  [{low:.1f}, {high:.1f}]", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(numbers)), [f"{shortened(e.name)}\n(n = {e.n:,})" for e in estimates])
    axes.set_ylim(len(numbers) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="x")


def _baseline(axes: Axes, area: float) -> None:
    axes.axvline(100 * area, color=GREY, linestyle="--", linewidth=1.2)
    axes.set_xlabel(f"dashed: mean mask area, {100 * area:.1f} % (a random point)")


@styled
def labelled_heads(*, values: ArrayLike, labels: Sequence[Sequence[str]], title: str) -> Figure:
    """The rise of the loss without each head (layers, heads), in nats, as colour, with the head's label in its cell.

    NaN: a head that does not exist. Layers run down, heads across, both from 0. Raises InputError for labels of another
    shape.
    """
    rises = as_array_with_gaps(values, name="values", axes=("layers", "heads"))
    layers, heads = rises.shape
    require_length(sum(map(len, labels)), rises.size, name="labels", of="the heads")
    figure = sheet(WIDE, 0.6 + 0.34 * layers)
    axes = figure.add_subplot()
    most = float(np.nanpercentile(np.abs(rises), 98)) or 1.0
    shown = axes.imshow(rises, cmap=SIGNED, vmin=-most, vmax=most, aspect="auto")
    for (layer, head), rise in np.ndenumerate(rises):
        dark = abs(rise) > 0.6 * most
        text = shortened(labels[layer][head].replace("-", " "), max(6, 78 // heads))
        axes.text(head, layer, text, ha="center", va="center", fontsize=SMALL - 1, color="white" if dark else "black")
    axes.set_xticks(range(heads), [f"H{head}" for head in range(heads)])
    axes.set_yticks(range(layers), [f"L{layer}" for layer in range(layers)])
    axes.tick_params(length=0)
    figure.colorbar(shown, ax=axes, label="rise of the loss (nats)", extend="both", pad=0.01)
    heading(figure, title)
    return figure
