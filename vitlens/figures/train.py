"""How a training went: loss, accuracy and the schedule."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array
from vitlens.figures.style import BLUE, GREY, SMALL, VERMILLION, WIDE, heading, sheet, styled

_TRAIN, _TEST = ("o", "--", VERMILLION, "training"), ("s", "-", BLUE, "test")


@styled
def training_curves(*, history: Sequence[Mapping[str, object]], title: str = "Training") -> Figure:
    """Loss, accuracy and learning rate by epoch, from the rows of metrics.jsonl in order.

    Each row has epoch and train_loss (nats), and where measured test_loss (nats), train_accuracy and test_accuracy
    (fractions) and learning_rate; None or a missing key leaves a gap. The best test accuracy is marked. Raises
    InputError for an empty history, a row without epoch or train_loss, or a number that is not finite.
    """
    if not history:
        raise InputError("expected at least one epoch in the history, found none")
    figure = sheet(WIDE, 2.3)
    loss, accuracy, rate = figure.subplots(1, 3)
    _draw(loss, history, "train_loss", _TRAIN)
    _draw(loss, history, "test_loss", _TEST)
    loss.set_title("Loss (nats)")
    _draw(accuracy, history, "train_accuracy", _TRAIN, factor=100)
    best = _draw(accuracy, history, "test_accuracy", _TEST, factor=100)
    accuracy.set_title("Accuracy (%)")
    if best is not None:
        _mark_best(accuracy, *best)
    _draw(rate, history, "learning_rate", ("", "-", GREY, "learning rate"))
    rate.set_title("Learning rate")
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate.yaxis.get_offset_text().set_fontsize(SMALL)
    for axes in (loss, accuracy, rate):
        axes.set_xlabel("epoch")
        axes.grid(axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if not axes.lines:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
        elif axes is not rate:
            axes.legend()
    heading(figure, title)
    return figure


def _draw(
    axes: Axes,
    history: Sequence[Mapping[str, object]],
    key: str,
    look: tuple[str, str, str, str],
    *,
    factor: float = 1.0,
) -> tuple[Array, Array] | None:
    """Draw one column where it was measured; returns its epochs and values."""
    if key == "train_loss" and any(row.get(name) is None for row in history for name in ("epoch", key)):
        raise InputError(f"expected epoch and train_loss in every row of the history, found {sorted(history[0])}")
    rows = [row for row in history if row.get(key) is not None]
    if not rows:
        return None
    epochs = as_array([row["epoch"] for row in rows], name="epoch", axes=("epochs",))  # type: ignore[arg-type]
    values = factor * as_array([row[key] for row in rows], name=key, axes=("epochs",))  # type: ignore[arg-type]
    marker, line, colour, label = look
    marker = marker if len(rows) <= 30 else ""
    axes.plot(
        epochs, values, line, marker=marker or ("o" if len(rows) == 1 else ""), markersize=3, color=colour, label=label
    )
    return epochs, values


def _mark_best(axes: Axes, epochs: Array, values: Array) -> None:
    index = int(np.argmax(values))
    axes.axhline(values[index], color=BLUE, linewidth=0.6, linestyle=":")
    axes.set_title(f"Accuracy (%), best {values[index]:.1f} at epoch {epochs[index]:.0f}")
