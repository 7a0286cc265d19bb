"""Models side by side on the same test images: accuracy, and agreement with the teacher."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlens.figures.inputs import as_array
from vitlens.figures.style import SERIES, SMALL, WIDE, heading, sheet, shortened, styled


@dataclass(frozen=True)
class Bar:
    """A fraction with its 95 % interval; name: of the model; role: its relation to the others ("its teacher")."""

    name: str
    role: str
    value: float
    low: float
    high: float


@styled
def side_by_side(*, accuracy: Sequence[Bar], agreement: Sequence[Bar] = (), n: int, title: str) -> Figure:
    """Accuracy of the models, and the share of images with the same prediction as the teacher; % from 0 to 100.

    A model has the same colour in both panels. Raises InputError for no accuracy or a number that is not finite.
    """
    colours = {bar.name: SERIES[place % len(SERIES)] for place, bar in enumerate(accuracy)}
    figure = sheet(WIDE, 0.7 + 0.4 * max(len(accuracy), len(agreement)))
    panels = figure.subplots(1, 2 if agreement else 1, squeeze=False)[0]
    _bars(panels[0], accuracy, colours)
    panels[0].set_title(f"Accuracy on {n:,} test images (%)")
    if agreement:
        _bars(panels[1], agreement, colours)
        panels[1].set_title("Same prediction as the teacher (%)")
    heading(figure, f"{title} (lines: 95 % intervals)")
    return figure


def _bars(axes: Axes, bars: Sequence[Bar], colours: dict[str, str]) -> None:
    numbers = 100 * as_array([[bar.value, bar.low, bar.high] for bar in bars], name="bars", axes=("bars", "3"))
    for place, (bar, (value, low, high)) in enumerate(zip(bars, numbers)):
        axes.barh(place, value, height=0.6, color=colours[bar.name], alpha=0.85)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        axes.text(102, place, f"{value:.1f}  [{low:.1f}, {high:.1f}]", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(bars)), [f"{shortened(bar.name)}\n{bar.role}" for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="x")
