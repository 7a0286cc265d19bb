"""Figures of one head: the patch embedding, scores and weights of all pairs of tokens, and vectors of all tokens."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import without_frames
from vitlens.figures.inputs import Array, as_array, as_image
from vitlens.figures.overlay import Scale, blend, colour_bar, joint_scale
from vitlens.figures.style import (
    BLUE,
    GREY,
    MAGNITUDE,
    SIGNED,
    SMALL,
    VERMILLION,
    WIDE,
    heading,
    round_ticks,
    sheet,
    styled,
    tick_words,
)

_TICKS: Final = 6  # numbers along an axis of tokens, at most


@styled
def head_matrices(*, scores: ArrayLike, weights: ArrayLike, prefix: Sequence[str], title: str) -> Figure:
    """Scores and weights (query, key) of one head side by side, each with its own colours.

    Scores are centred at 0, masked ones (-inf) are left white; prefix: the names of the tokens before the patches.
    Raises InputError unless both are of one shape.
    """
    raw = np.asarray(scores, float)
    masked = np.isneginf(raw)
    values = as_array(np.where(masked, 0.0, raw), name="scores", axes=("query", "key"))
    shares = as_array(weights, name="weights", axes=("query", "key"))
    if shares.shape != values.shape:
        raise InputError(f"expected weights of shape {values.shape}, as the scores, found {shares.shape}")
    figure = sheet(WIDE, 3.05)
    left, right = figure.subplots(1, 2)
    draw_matrix(left, np.where(masked, np.nan, values), signed=True, label="score")
    draw_matrix(right, 100 * shares, signed=False, label="weight (% of its row)")
    for axes, name in ((left, "scores q·k / √d"), (right, "weights: softmax of each row")):
        axes.set_title(name)
        name_tokens(axes, prefix)
    right.set_ylabel("")
    heading(figure, title)
    return figure


@styled
def weights_with_row(
    *, weights: ArrayLike, query: int, image: ArrayLike, grid: tuple[int, int], prefix: Sequence[str], title: str
) -> Figure:
    """Weights (query, key) with one query's row marked, and that row over the image (3, height, width), patch by
    patch."""
    values = 100 * as_array(weights, name="weights", axes=("query", "key"))
    figure = sheet(WIDE, 3.5)
    left, right = figure.subplots(1, 2)
    draw_matrix(left, values, signed=False, label="weight (%)")
    name_tokens(left, prefix)
    _outline(left, query, values.shape[1])
    row = values[query, len(prefix) :].reshape(grid)
    right.imshow(blend(as_image(image), row, scale=joint_scale(row[None]), smooth=False))
    right.set_title("its row, over the image")
    without_frames([right])
    heading(figure, title)
    return figure


@styled
def token_vectors(
    *, panels: Sequence[tuple[str, ArrayLike]], marked: Sequence[int | None], prefix: Sequence[str], title: str
) -> Figure:
    """Vectors of all tokens (tokens, numbers), one panel each with one range of colours for all.

    panels: title and values of each; marked: the token that is outlined in each, None for none.
    """
    arrays = [as_array(values, name=name, axes=("tokens", "numbers")) for name, values in panels]
    most = max(float(np.percentile(np.abs(values), 99.5)) for values in arrays) or 1.0
    clipped = any(float(np.abs(values).max()) > most for values in arrays)
    figure = sheet(WIDE, 3.3)
    axes = np.atleast_1d(figure.subplots(1, len(arrays)))
    for each, (name, _), values, token in zip(axes, panels, arrays, marked, strict=True):
        each.imshow(values, cmap=SIGNED, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
        each.set_title(name)
        name_tokens(each, prefix, keys=False)
        each.set_xlabel("number of the vector")
        if token is not None:
            _outline(each, token, values.shape[1])
    bar = figure.colorbar(axes[0].images[0], ax=list(axes), extend="both" if clipped else "neither", pad=0.02)
    bar.outline.set_visible(False)
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
    for index, (response, number) in enumerate(zip(responses, numbers, strict=True)):
        axes = figure.add_subplot(grid[index // columns, 1 + index % columns])
        most = float(np.abs(weights[index]).max()) or 1.0
        axes.imshow(0.5 + weights[index].reshape(shape[1:]).transpose(1, 2, 0) / (2 * most), interpolation="nearest")
        axes.set_title(f"filter {number}\n{response:+.2f}", fontsize=SMALL)
    without_frames(figure.axes)
    axes = figure.add_subplot(grid[:, -1])
    ours: Array = as_array(embedded, name="embedded", axes=("patches", "dim")).ravel()
    own: Array = as_array(convolved, name="convolved", axes=("patches", "dim")).ravel()
    low, high = float(min(own.min(), ours.min())), float(max(own.max(), ours.max()))
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    axes.plot(own, ours, ".", color=BLUE, markersize=1.5, alpha=0.4, rasterized=True)
    axes.set_xlabel("convolution")
    axes.set_ylabel("unfold and linear")
    axes.set_title(f"{own.size:,} numbers")
    heading(figure, title)
    return figure


def draw_matrix(axes: Axes, values: Array, *, signed: bool, label: str) -> None:
    """Fill axes with a matrix and give it a colour bar; up to the 99.5th percentile, with an arrow beyond."""
    finite = values[np.isfinite(values)]
    if signed:
        most = float(np.percentile(np.abs(finite), 99.5)) or 1.0
        beyond = float(np.abs(finite).max()) > most
        image = axes.imshow(values, cmap=SIGNED, vmin=-most, vmax=most, interpolation="nearest")
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.82, extend="both" if beyond else "neither")
        bar.set_label(label)
        bar.outline.set_visible(False)
        return
    scale = joint_scale(values[None])
    image = axes.imshow(values, cmap=MAGNITUDE, norm=scale.norm, interpolation="nearest")
    beside = axes.figure.colorbar(image, ax=axes, shrink=0.82)
    beside.ax.clear()
    colour_bar(beside.ax, scale=Scale(scale.low, scale.high, scale.clipped), label=label)


def name_tokens(axes: Axes, prefix: Sequence[str], *, keys: bool = True) -> None:
    """Number the tokens along the axes; the prefix is named in the label."""
    low, high = axes.get_ylim()
    ticks = round_ticks(0, max(low, high) - 0.5, _TICKS)
    names = ", ".join(dict.fromkeys("CLS" if name == "cls" else name for name in prefix))
    first = f" (first: {names})" if names else ""
    axes.set_yticks(ticks, tick_words(ticks))
    axes.set_ylabel(f"query token{first}" if keys else f"token{first}")
    if keys:
        axes.set_xticks(ticks, tick_words(ticks))
        axes.set_xlabel("key token")


def _outline(axes: Axes, token: int, numbers: int) -> None:
    axes.add_patch(Rectangle((-0.5, token - 0.5), numbers, 1, fill=False, edgecolor=VERMILLION, linewidth=1.2))
