"""Which class is taken for which: every cell for a few classes, the most confused pairs for many."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import COUNTS, SMALL, VERMILLION, WIDE, heading, sheet, shortened, styled

_WRITTEN = 20  # classes up to which each cell bears its count
_PAIRS = 15


@styled
def confusion_matrix(*, counts: ArrayLike, classes: Sequence[str], model: str = "") -> Figure:
    """Counts (truth, prediction) as colours, each row in % of its truth's images.

    Up to 20 classes every cell bears its count; with more, the most confused pairs are listed beside the matrix. A
    class without images leaves its row grey. Raises InputError unless counts are square, as many as the classes, and
    not negative.
    """
    numbers = as_array(counts, name="counts", axes=("truth", "prediction"))
    if numbers.shape[0] != numbers.shape[1] or numbers.min() < 0 or not numbers.any():
        raise InputError(f"expected square counts, not negative and not all 0, found shape {numbers.shape}")
    require_length(len(numbers), len(classes), name="rows of counts", of="the classes")
    many = len(classes) > _WRITTEN
    figure = sheet(WIDE, 3.5) if many else sheet(*[1.9 + 0.26 * max(6, len(classes))] * 2)
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1]) if many else (figure.add_subplot(), None)
    share = _draw(left, numbers)
    if right is None:
        _write(left, numbers, share, classes)
    else:
        left.set_xlabel(f"prediction (class 1 to {len(classes)})")
        left.set_ylabel("truth")
        _list_pairs(right, numbers, classes)
    colour_bar(figure, [left], scale=Scale(0.0, 100.0), label="% of the truth's images", colours=COUNTS)
    right_ones = f"{np.trace(numbers):,.0f} of {numbers.sum():,.0f} on the diagonal"
    heading(figure, f"Confusions{' of ' + model if model else ''}: {right_ones}")
    return figure


def _draw(axes: Axes, numbers: Array) -> Array:
    """Draw the matrix in % of each row; returns those."""
    total = numbers.sum(axis=1, keepdims=True)
    share = np.divide(100 * numbers, total, out=np.full_like(numbers, np.nan), where=total > 0)
    colours = colormaps[COUNTS].with_extremes(bad="#C8C8C8")
    axes.imshow(np.ma.masked_invalid(share), cmap=colours, vmin=0, vmax=100, interpolation="nearest")
    return np.asarray(share)


def _write(axes: Axes, numbers: Array, share: Array, classes: Sequence[str]) -> None:
    names = [shortened(name, 14) for name in classes]
    axes.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) <= 2 else 90)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("prediction")
    axes.set_ylabel("truth")
    for (truth, prediction), number in np.ndenumerate(numbers):
        if number:
            colour = "white" if share[truth, prediction] > 55 else "black"
            axes.text(prediction, truth, f"{number:.0f}", ha="center", va="center", color=colour, fontsize=SMALL)


def _list_pairs(axes: Axes, numbers: Array, classes: Sequence[str]) -> None:
    """Bars of the off-diagonal counts that are largest, largest first."""
    wrong = np.where(np.eye(len(numbers), dtype=bool), 0, numbers)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    pairs = [(t, p) for t, p in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[t, p]]
    axes.set_title("most confused: truth → prediction")
    if not pairs:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        return
    values = [wrong[pair] for pair in pairs]
    axes.barh(range(len(pairs)), values, 0.7, color=VERMILLION, alpha=0.85)
    axes.set_yticks(range(len(pairs)), [f"{shortened(classes[t], 12)} → {shortened(classes[p], 12)}" for t, p in pairs])
    axes.set_ylim(_PAIRS - 0.5, -0.5)
    axes.set_xlabel("images")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
