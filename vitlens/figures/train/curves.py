"""Training curves: loss, accuracy and learning rate."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.style import BLUE, GREY, SMALL, VERMILLION, WIDE, heading, sheet, styled

Row = Mapping[str, object]
_TRAIN, _TEST = ("--o", VERMILLION, "training"), ("-s", BLUE, "test")


@styled
def training_curves(*, history: Sequence[Row], title: str = "Training") -> Figure:
    """Loss, accuracy and learning rate by epoch, from the rows of metrics.jsonl in order.

    Each row has epoch and train_loss (nats), and where measured test_loss (nats), train_accuracy and test_accuracy
    (fractions) and learning_rate; None or a missing key is left out. The best test accuracy is marked. Raises
    InputError for an empty history, a row without epoch or train_loss, or a number that is not finite.
    """
    if not history or any(row.get(key) is None for row in history for key in ("epoch", "train_loss")):
        raise InputError(f"expected epoch and train_loss in every row of the history, found {list(history)[:1]}")
    figure = sheet(WIDE, 2.3)
    loss, accuracy, rate = figure.subplots(1, 3)
    epochs = _column(history, "epoch")
    measured = 100 * _column(history, "test_accuracy")
    _draw(loss, epochs, _column(history, "train_loss"), *_TRAIN)
    _draw(loss, epochs, _column(history, "test_loss"), *_TEST)
    _draw(accuracy, epochs, 100 * _column(history, "train_accuracy"), *_TRAIN)
    _draw(accuracy, epochs, measured, _TEST[0], _TEST[1], _best(epochs, measured))
    _draw(rate, epochs, _column(history, "learning_rate"), "-", GREY, "learning rate")
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate.yaxis.get_offset_text().set_fontsize(SMALL)
    for axes, name in ((loss, "Loss (nats)"), (accuracy, "Accuracy (%)"), (rate, "Learning rate")):
        _finish(axes, name, epochs)
    for axes in (loss, accuracy):
        if axes.lines:
            axes.legend()
    heading(figure, title)
    return figure


def _column(history: Sequence[Row], key: str) -> Array:
    """One number per row, NaN where it was not measured."""
    column = np.full(len(history), np.nan)
    measured = {index: row[key] for index, row in enumerate(history) if row.get(key) is not None}
    if measured:
        values = list(measured.values())
        column[list(measured)] = as_array(values, name=key, axes=("epochs",))  # type: ignore[arg-type]
    return column


def _draw(axes: Axes, epochs: Array, values: Array, style: str, colour: str, label: str) -> None:
    """Draw a column over its epochs, connected across gaps; nothing where nothing was measured."""
    measured = ~np.isnan(values)
    if measured.any():
        size = 3 if measured.sum() <= 30 else 0
        axes.plot(epochs[measured], values[measured], style, color=colour, label=label, markersize=size)


def _best(epochs: Array, values: Array) -> str:
    """The test curve's name in the legend, with its highest value."""
    if np.isnan(values).all():
        return _TEST[2]
    index = int(np.nanargmax(values))
    return f"{_TEST[2]}, best {values[index]:.1f} (epoch {epochs[index]:.0f})"


def _finish(axes: Axes, title: str, epochs: Array) -> None:
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.set_xlim(epochs.min() - 0.5, epochs.max() + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(axis="y")
    if not axes.lines:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
