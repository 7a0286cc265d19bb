"""Confusion matrices: every count for a few classes, the most confused pairs for many."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.style import COUNTS, SMALL, WIDE, heading, sheet, shortened, styled

_MOST_LABELLED = 20  # classes up to which each cell is labelled with its count
_CELLS = 125  # cells along a side that can still be distinguished
_PAIRS = 15


@styled
def confusion_matrix(*, counts: ArrayLike, classes: Sequence[str], model: str = "") -> Figure:
    """Counts (truth, prediction) as colours, each row in % of the images of its class, on a square-root scale.

    Up to 20 classes every cell is labelled with its count; for more, the most confused pairs are listed beside the
    matrix, and beyond 125 classes a cell is the maximum of several. The row of a class without images is grey. Raises
    InputError unless counts are square, as many as the classes, not negative and not all zero.
    """
    numbers = as_array(counts, name="counts", axes=("truth", "prediction"))
    if numbers.shape[0] != numbers.shape[1] or numbers.min() < 0 or not numbers.any():
        raise InputError(f"expected square counts, not negative and not all 0, found shape {numbers.shape}")
    require_length(len(numbers), len(classes), name="rows of counts", of="the classes")
    many = len(classes) > _MOST_LABELLED
    side = 1.9 + 0.26 * max(6, len(classes))
    figure = sheet(WIDE, 3.4) if many else sheet(side, side - 0.5)
    left, *right = figure.subplots(1, 2, width_ratios=[1, 1]) if many else [figure.add_subplot()]
    total = numbers.sum(axis=1, keepdims=True)
    share = np.divide(100 * numbers, total, out=np.full_like(numbers, np.nan), where=total > 0)
    _draw(left, share)
    if many:
        _list_pairs(right[0], numbers, classes)
    else:
        _write(left, numbers, share, classes)
    correct = f"{np.trace(numbers):,.0f} of {numbers.sum():,.0f} on the diagonal"
    heading(figure, f"Confusions{' of ' + model if model else ''}: {correct}")
    return figure


def _draw(axes: Axes, share: Array) -> None:
    """Draw the matrix (truth, prediction), in %, with its bar."""
    classes = len(share)
    step = -(-classes // _CELLS)
    shown = _block_maximum(share, step)
    colours = colormaps[COUNTS].with_extremes(bad="#C8C8C8")
    norm = PowerNorm(0.5, 0, 100)
    extent = (-0.5, shown.shape[1] * step - 0.5, shown.shape[0] * step - 0.5, -0.5)
    axes.imshow(np.ma.masked_invalid(shown), cmap=colours, norm=norm, interpolation="nearest", extent=extent)
    bar_axes = axes.inset_axes((1.03, 0, 0.035, 1))
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=bar_axes, ticks=[0, 5, 20, 50, 100])
    bar.outline.set_visible(False)
    bar_axes.tick_params(labelsize=SMALL)
    bar.set_label("% of the images of the class" + (f", maximum of {step}×{step} cells" if step > 1 else ""))
    note = " (classes shown, counted from 0)" if classes > _MOST_LABELLED else ""
    axes.set_xlabel("prediction" + note)
    axes.set_ylabel("truth" + note)


def _block_maximum(share: Array, step: int) -> Array:
    """The maximum of each block of step by step cells; NaN only where all are NaN."""
    room = -len(share) % step
    blocks = np.pad(share, (0, room), constant_values=np.nan).reshape(len(share) // step + (room > 0), step, -1, step)
    filled = np.where(np.isnan(blocks), -1.0, blocks).max(axis=(1, 3))
    return np.where(filled < 0, np.nan, filled)


def _write(axes: Axes, numbers: Array, share: Array, classes: Sequence[str]) -> None:
    names = [shortened(name, 14) for name in classes]
    axes.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) <= 2 else 90)
    axes.set_yticks(range(len(names)), names)
    for (truth, prediction), number in np.ndenumerate(numbers):
        if number:
            colour = "white" if share[truth, prediction] > 35 else "black"
            axes.text(prediction, truth, f"{number:.0f}", ha="center", va="center", color=colour, fontsize=SMALL)


def _list_pairs(axes: Axes, numbers: Array, classes: Sequence[str]) -> None:
    """List the largest off-diagonal counts in descending order."""
    wrong = np.where(np.eye(len(numbers), dtype=bool), 0, numbers)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    axes.set_axis_off()
    axes.set_title("Most confused: images, truth → prediction", loc="left")
    for line, place in enumerate(order.tolist()):
        truth, prediction = divmod(place, len(numbers))
        if wrong[truth, prediction]:
            y = 1 - (line + 0.5) / _PAIRS
            axes.text(0.09, y, f"{wrong[truth, prediction]:.0f}", ha="right", va="center", weight="bold")
            pair = f"{shortened(classes[truth])} → {shortened(classes[prediction])}"
            axes.text(0.13, y, pair, va="center", fontsize=SMALL)
    if not wrong.any():
        axes.text(0.0, 0.9, "none")
