"""The summary of a study: accuracy of the models, and the pointing game of the maps."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlens.figures.inputs import as_array
from vitlens.figures.style import BLUE, GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled


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
