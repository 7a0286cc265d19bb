"""Norms by layer before training, and the loss on one batch at several learning rates."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.style import (
    BLUE,
    GREY,
    HALF,
    SERIES,
    SMALL,
    TALL,
    VERMILLION,
    WIDE,
    heading,
    sheet,
    shortened,
    styled,
)

_NAMED = 45  # layers whose names fit one below the other


@styled
def layer_norms(
    *,
    names: Sequence[str],
    outputs: Sequence[float | None],
    gradients: Sequence[float | None],
    title: str = "Norms by layer",
) -> Figure:
    """The root mean square of each layer's output, and its gradient relative to its weights, from top to bottom.

    None or a number that is 0 or not finite is marked by a cross at the left. Raises InputError for no layers, and for
    numbers of another length.
    """
    if not names:
        raise InputError("expected layers, found none")
    for values, name in ((outputs, "outputs"), (gradients, "gradients")):
        require_length(len(values), len(names), name=name, of="names")
    step = -(-len(names) // _NAMED)
    figure = sheet(WIDE, min(0.9 + 0.15 * len(names), TALL))
    left, right = figure.subplots(1, 2, sharey=True)
    _dots(left, outputs, BLUE)
    _dots(right, gradients, VERMILLION)
    left.set_title("Output (root mean square)")
    right.set_title("Gradient / weights (norms)")
    shown = range(0, len(names), step)
    left.set_yticks(list(shown), [shortened(names[place], 34) for place in shown], fontsize=SMALL)
    left.set_ylim(len(names) - 0.4, -0.6)
    heading(figure, title)
    return figure


def _dots(axes: Axes, values: Sequence[float | None], colour: str) -> None:
    """Points on a logarithmic axis; a cross at the left for what has no logarithm."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
    known = np.isfinite(numbers) & (numbers > 0)
    places = np.arange(len(numbers))
    axes.set_xscale("log")
    low, high = (numbers[known].min(), numbers[known].max()) if known.any() else (0.1, 1.0)
    axes.set_xlim(10 ** np.floor(np.log10(low) - 0.2), 10 ** np.ceil(np.log10(high) + 0.2))
    axes.plot(numbers[known], places[known], "o", color=colour, markersize=3.5)
    axes.plot(
        np.full((~known).sum(), 0.02),
        places[~known],
        "x",
        color=GREY,
        markersize=5,
        transform=axes.get_yaxis_transform(),
    )
    axes.grid(axis="both")


@styled
def batch_losses(
    *, curves: Mapping[float, Sequence[float]], constant: float, fitted: float, title: str = "Loss on one batch"
) -> Figure:
    """The loss (nats) before each step by learning rate; lines at that of a constant prediction and at `fitted` of it.

    Losses far above the first are cut off at the top. Raises InputError for no curves or a loss that is not finite.
    """
    if not curves:
        raise InputError("expected the losses of a training, found none")
    figure = sheet(HALF + 1.2, 2.6)
    axes = figure.subplots()
    for place, (rate, losses) in enumerate(curves.items()):
        values = as_array(losses, name="losses", axes=("steps",))
        style = "-" if place == 0 else "--"
        axes.plot(
            values, style, color=SERIES[place % len(SERIES)], label=f"{rate:.3g}{' (recipe)' if not place else ''}"
        )
    first = max(losses[0] for losses in curves.values())
    axes.axhline(constant, color=GREY, linestyle="--", linewidth=0.8)
    axes.axhline(fitted * constant, color=GREY, linestyle=":", linewidth=0.8)
    axes.set_ylim(0, 1.6 * max(constant, first))
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.legend(title="learning rate", title_fontsize=SMALL)
    heading(figure, title)
    return figure
