"""Ways of training the same model side by side: test accuracy by epoch, and by time."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.style import SERIES, SMALL, WIDE, heading, sheet, styled

Point = tuple[float | int, float | int, float | int]  # epochs done, seconds since the start, test accuracy (fraction)


@styled
def learning_compared(*, ways: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Test accuracy (%) of each way of training by epochs, and by seconds (log scale).

    Raises InputError for a way without a point, or a number that is not finite.
    """
    if not ways:
        raise InputError("expected at least one way of training, found none")
    figure = sheet(WIDE, 2.5)
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    for place, (name, points) in enumerate(ways.items()):
        epochs, seconds, accuracy = as_array(points, name=f"points of {name}", axes=("points", "3")).T
        for axes, across in ((by_epoch, epochs), (by_time, seconds)):
            _line(axes, across, 100 * accuracy, name, SERIES[place % len(SERIES)])
    by_epoch.set_title("Test accuracy (%) by epoch")
    by_epoch.set_xlabel("epochs done")
    by_epoch.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    by_time.set_title("Test accuracy (%) by time")
    by_time.set_xlabel("seconds since the start, caching included (log scale)")
    by_time.set_xscale("log")
    for format_by in (by_time.xaxis.set_major_formatter, by_time.xaxis.set_minor_formatter):
        format_by(LogFormatter(minor_thresholds=(1.5, 0.5)))
    by_time.tick_params(axis="x", which="minor", labelsize=SMALL)
    for axes in (by_epoch, by_time):
        axes.grid(visible=True, axis="y")
    handles, names = by_epoch.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    heading(figure, title)
    return figure


def _line(axes: Axes, across: Array, accuracy: Array, name: str, colour: str) -> None:
    axes.plot(across, accuracy, "-o", color=colour, label=name, markersize=3 if len(across) <= 30 else 0)
