"""Scaling, values, output projection and residual stream of one head, at the token that is followed."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.inputs import as_array
from vitlens.figures.style import BLUE, GREY, ORANGE, SIGNED, SMALL, VERMILLION, WIDE, heading, sheet, styled


@styled
def scaling(*, products: ArrayLike, scores: ArrayLike, weights: ArrayLike, unscaled: ArrayLike, title: str) -> Figure:
    """Histograms of products and scores of all pairs, and one query's weights (key,) sorted, with and without scaling.

    Scores that are masked (-inf) are left out.
    """
    shown = [np.asarray(values, float).ravel() for values in (products, scores)]
    shown = [values[np.isfinite(values)] for values in shown]
    rows = [as_array(row, name="weights", axes=("key",)) for row in (unscaled, weights)]
    figure = sheet(WIDE, 2.6)
    left, right = figure.subplots(1, 2)
    edges = np.linspace(min(values.min() for values in shown), max(values.max() for values in shown), 80)
    names = ("q·k, not scaled", "scores, scaled")
    for values, colour, name in zip(shown, (VERMILLION, BLUE), names, strict=True):
        left.hist(
            values, bins=edges, color=colour, alpha=0.6, density=True, label=f"{name}: deviation {values.std():.2f}"
        )
    left.set_yticks([])
    left.set_xlabel("score of a pair of tokens")
    left.set_title("all pairs")
    left.set_ylim(0, 1.45 * left.get_ylim()[1])  # room for the legend
    left.legend(loc="upper left")
    for row, colour, name in zip(rows, (VERMILLION, BLUE), ("not scaled", "scaled"), strict=True):
        right.plot(
            np.arange(1, len(row) + 1), np.sort(row)[::-1], color=colour, label=f"{name}: largest {row.max():.2f}"
        )
    right.axhline(1 / len(rows[0]), color=GREY, linewidth=0.8, linestyle="--", label="uniform")
    right.set_xscale("log")
    right.set_xlabel("keys, the largest weight first")
    right.set_ylabel("weight")
    right.set_title("the row of the query")
    right.legend()
    heading(figure, title)
    return figure


@styled
def weighted_values(*, weights: ArrayLike, values: ArrayLike, output: ArrayLike, title: str) -> Figure:
    """One query's weights (key,) beside the values (key, numbers), and below them their weighted sum (numbers,)."""
    row = as_array(weights, name="weights", axes=("key",))
    matrix = as_array(values, name="values", axes=("key", "numbers"))
    summed = as_array(output, name="output", axes=("numbers",))
    figure = sheet(WIDE, 3.6)
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 4], height_ratios=[7, 1])
    left, middle, below = (figure.add_subplot(grid[place]) for place in ((0, 0), (0, 1), (1, 1)))
    left.barh(np.arange(len(row)), 100 * row, color=BLUE, height=1.0)
    left.set_ylim(len(row) - 0.5, -0.5)
    left.set_xlabel("weight (%)")
    left.set_ylabel("key token")
    most = float(np.percentile(np.abs(matrix), 99.5)) or 1.0
    middle.imshow(matrix, cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    middle.set_yticks([])
    middle.set_title("values of all tokens")
    image = below.imshow(summed[None], cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    below.set_yticks([])
    below.set_xlabel("weighted sum: the output of the head")
    bar = figure.colorbar(image, ax=[middle, below], extend="both", pad=0.02)
    bar.outline.set_visible(False)
    heading(figure, title)
    return figure


@styled
def head_parts(*, norms: Sequence[float], head: int, part: ArrayLike, title: str) -> Figure:
    """The norm of each head's part of the output projection at one token, and the part (numbers,) of one head."""
    vector = as_array(part, name="part", axes=("numbers",))
    figure = sheet(WIDE, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.8])
    colours = [VERMILLION if index == head else BLUE for index in range(len(norms))]
    left.bar(range(len(norms)), norms, color=colours, width=0.7)
    left.set_xticks(range(len(norms)) if len(norms) <= 16 else range(0, len(norms), 4))
    left.set_xlabel("head")
    left.set_ylabel("norm of its part")
    right.bar(range(len(vector)), vector, color=VERMILLION, width=1.0)
    right.axhline(0, color=GREY, linewidth=0.6)
    right.set_xlabel("number of the residual stream")
    right.set_title(f"what head {head} adds")
    heading(figure, title)
    return figure


@styled
def norms(*, parts: Sequence[tuple[str, float]], title: str) -> Figure:
    """Norms of vectors as bars with their numbers: the residual stream before and after a block, and what is added."""
    figure = sheet(WIDE, 0.55 + 0.34 * len(parts))
    axes = figure.subplots()
    names, values = [name for name, _ in parts], [value for _, value in parts]
    added = [BLUE if index in (0, len(parts) - 1) else ORANGE for index in range(len(parts))]
    axes.barh(range(len(parts)), values, color=added, height=0.65)
    for index, value in enumerate(values):
        axes.text(value, index, f" {value:.3g}", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(parts)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(values))
    axes.set_xlabel("norm of the vector")
    heading(figure, title)
    return figure
