"""Latency and throughput of models by batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.curves import log_axes, models_legend, positive_columns, series_style
from vitlens.figures.style import WIDE, heading, sheet, styled


@dataclass(frozen=True)
class SpeedCurve:
    """One model by batch size: seconds of a pass, lower quartile, median and upper quartile, each (batch sizes,)."""

    name: str
    batch_sizes: Sequence[int]
    low: ArrayLike
    median: ArrayLike
    high: ArrayLike


@styled
def speed_by_batch(*, speeds: Sequence[SpeedCurve], title: str = "Latency and throughput by batch size") -> Figure:
    """Latency of a pass and throughput against the batch size, medians as lines, quartiles as bands; log axes.

    Raises InputError for no model, for shapes that do not fit, and for a time that is not above 0.
    """
    if not speeds:
        raise InputError("expected the speed of at least one model, found none")
    figure = sheet(WIDE, 2.5)
    left, right = figure.subplots(1, 2)
    every: set[int] = set()
    for index, speed in enumerate(speeds):
        sizes, low, median, high = positive_columns(
            speed.name, batch_sizes=list(speed.batch_sizes), low=speed.low, median=speed.median, high=speed.high
        )
        every |= {int(size) for size in sizes}
        colour, marker = series_style(index)
        for axes, line, ends in (
            (left, 1000 * median, (1000 * low, 1000 * high)),
            (right, sizes / median, (sizes / high, sizes / low)),
        ):
            axes.fill_between(sizes, *ends, color=colour, alpha=0.22, linewidth=0)
            axes.plot(sizes, line, color=colour, marker=marker, markersize=3.2)
    for axes, name in ((left, "latency of a pass (ms)"), (right, "throughput (images/s)")):
        log_axes(axes)
        axes.set_xlabel("batch size (images)")
        axes.set_ylabel(name)
        shown = _spaced(sorted(every))
        axes.set_xticks(shown, [str(size) for size in shown])
        axes.set_xlim(min(every) / 1.15, max(every) * 1.15)
    models_legend(figure, [speed.name for speed in speeds])
    heading(figure, f"{title}; line: median, band: quartiles")
    return figure


def _spaced(sizes: Sequence[int]) -> list[int]:
    """Those batch sizes whose labels do not touch on a logarithmic axis."""
    shown: list[int] = []
    step = max(1.5, (sizes[-1] / sizes[0]) ** (1 / 10))
    for size in sizes:
        if not shown or size >= step * shown[-1]:
            shown.append(size)
    return shown
