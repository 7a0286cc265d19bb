"""The patch embedding: one patch, the filters that respond to it, and the convolution against a linear map."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.inputs import Array, as_array, as_image
from vitlens.figures.style import BLUE, GREY, SIGNED, SMALL, WIDE, heading, sheet, styled


@styled
def patch_embedding(
    *, patch: ArrayLike, filters: ArrayLike, responses: Sequence[float], numbers: Sequence[int], embedded: ArrayLike,
    convolved: ArrayLike, title: str,
) -> Figure:  # fmt: skip
    """A patch (3, height, width) in [0, 1], filters (n, 3, height, width) with their responses, and all numbers of all
    patches as the convolution gives them against unfold and a linear map.

    Each filter is drawn as a picture, its weights divided by its largest: 0 is grey. numbers: of the filters.
    """
    weights = as_array(np.reshape(filters, (len(responses), -1)), name="filters", axes=("filters", "weights"))
    shape = np.shape(filters)
    figure = sheet(WIDE, 2.7)
    columns = (len(responses) + 1) // 2
    grid = figure.add_gridspec(2, columns + 3, width_ratios=[1.6, *[0.9] * columns, 0.35, 2.6])
    first = figure.add_subplot(grid[:, 0])
    first.imshow(as_image(patch).transpose(1, 2, 0), interpolation="nearest")
    first.set_title("one patch")
    _plain(first)
    for index, (response, number) in enumerate(zip(responses, numbers, strict=True)):
        axes = figure.add_subplot(grid[index // columns, 1 + index % columns])
        most = float(np.abs(weights[index]).max()) or 1.0
        axes.imshow(0.5 + weights[index].reshape(shape[1:]).transpose(1, 2, 0) / (2 * most), interpolation="nearest")
        axes.set_title(f"filter {number}\n{response:+.2f}", fontsize=SMALL)
        _plain(axes)
    _agreement(figure.add_subplot(grid[:, -1]), embedded, convolved)
    heading(figure, title)
    return figure


@styled
def sum_of_vectors(*, parts: Sequence[tuple[str, ArrayLike]], title: str) -> Figure:
    """Vectors (numbers,) as strips under one another with one range of colours: what is added, and the sum."""
    rows = [as_array(values, name=name, axes=("numbers",)) for name, values in parts]
    most = max(float(np.abs(row).max()) for row in rows) or 1.0
    figure = sheet(WIDE, 0.5 + 0.55 * len(rows))
    axes = np.atleast_1d(figure.subplots(len(rows), 1, sharex=True))
    for each, (name, _), row in zip(axes, parts, rows, strict=True):
        each.imshow(row[None], cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
        each.set_yticks([])
        each.set_ylabel(f"{name}\nnorm {np.linalg.norm(row):.3g}", rotation=0, ha="right", va="center", fontsize=SMALL)
    axes[-1].set_xlabel("number of the vector")
    bar = figure.colorbar(axes[0].images[0], ax=list(axes), pad=0.02)
    bar.outline.set_visible(False)
    heading(figure, title)
    return figure


def _agreement(axes: Axes, embedded: ArrayLike, convolved: ArrayLike) -> None:
    ours: Array = as_array(embedded, name="embedded", axes=("patches", "dim")).ravel()
    own: Array = as_array(convolved, name="convolved", axes=("patches", "dim")).ravel()
    low, high = float(min(own.min(), ours.min())), float(max(own.max(), ours.max()))
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    axes.plot(own, ours, ".", color=BLUE, markersize=1.5, alpha=0.4, rasterized=True)
    axes.set_xlabel("convolution")
    axes.set_ylabel("unfold and linear")
    axes.set_title(f"{own.size:,} numbers")


def _plain(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
