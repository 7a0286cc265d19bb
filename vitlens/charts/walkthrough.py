"""Figures of one head: its patch embedding, scores and weights of pairs of tokens, and vectors."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpecBase
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from vitlens.charts import style
from vitlens.charts.overlay import Array, blend, colour_bar, joint_scale
from vitlens.charts.panels import BAR_ROOM, Margins, board, without_frames

_TICKS: Final = 6  # numbers along an axis of tokens, at most
_ABREAST: Final = 4  # heads in a row of a page
_PATH_SIDE: Final = 1.6  # inch of a head's weights, at most
_PATH_GAP: Final = 0.4  # inch between two heads, for their titles
_OUTLINED: Final = 32  # tokens up to which cells are large enough for an outline
_MOST: Final = 99.5  # percentile of absolute values that has the full colour


@style.styled
def head_matrices(scores: Array, weights: Array, prefix: Sequence[str], title: str) -> Figure:
    """Draw scores and weights (query, key) of one head side by side, each with a colour bar.

    Masked scores (-inf) are left white. prefix: the names of the tokens before the patches.
    """
    figure, (left, right) = _abreast(2, 3.05)
    values = np.where(np.isneginf(scores), np.nan, scores)
    image = _draw_signed(left, values, _most(values), "equal")
    bar = figure.colorbar(image, ax=left, shrink=0.82, extend="both", label="score")
    bar.outline.set_visible(False)
    left.set_title("scores q·k / √d")
    _draw_shares(right, 100 * weights, "weight (% of its row)")
    right.set_title("weights: softmax of each row")
    for axes in (left, right):
        _name_tokens(axes, prefix)
    right.set_ylabel("")
    style.heading(figure, title)
    return figure


@style.styled
def weights_with_row(
    weights: Array,
    query: int,
    image: Array,
    grid: tuple[int, int],
    prefix: Sequence[str],
    title: str,
) -> Figure:
    """Draw weights with one query's row marked, and that row over the image.

    weights: (query, key).
    image: (3, height, width).
    """
    figure, (left, right) = _abreast(2, 3.5)
    _draw_shares(left, 100 * weights, "weight (%)")
    _name_tokens(left, prefix)
    _outline_row(left, query, weights.shape[1])
    row = 100 * weights[query, len(prefix) :].reshape(grid)
    right.imshow(blend(image, row, scale=joint_scale(row), smooth=False))
    right.set_title("its row, over the image")
    without_frames([right])
    style.heading(figure, title)
    return figure


@style.styled
def path_maps(weights: Array, title: str, *, is_reversed: bool) -> Figure:
    """Draw the weights (heads, query, key) of each head on one scale, with the path outlined.

    is_reversed: True if the path is the anti-diagonal, else it is the diagonal.
    """
    heads = len(weights)
    across = min(heads, style.abreast(_ABREAST))
    side = min(_PATH_SIDE, (style.full_width() - BAR_ROOM - 0.5) / across - _PATH_GAP)
    drawn = board(
        title=title,
        count=heads,
        across=across,
        panel=(side, side),
        gap=(_PATH_GAP, _PATH_GAP),
        margins=Margins(left=0.5, right=BAR_ROOM, top=0.25, bottom=0.4),
    )
    scale = joint_scale(100 * weights)
    for head, axes in enumerate(drawn.panels):
        axes.imshow(100 * weights[head], cmap=style.MAGNITUDE, norm=scale.norm)
        axes.set_title(f"head {head}")
        _name_tokens(axes, ())
        axes.set_ylabel("query token" if head % across == 0 else "")
        axes.set_xlabel("key token" if head >= heads - across else "")
        if weights.shape[-1] <= _OUTLINED:
            _outline_path(axes, weights.shape[-1], is_reversed=is_reversed)
    colour_bar(drawn.bar(), scale=scale, label="weight (% of its row)")
    return drawn.figure


def _outline_path(axes: Axes, length: int, *, is_reversed: bool) -> None:
    """Outline the cells of the diagonal or the anti-diagonal."""
    for query in range(length):
        key = length - 1 - query if is_reversed else query
        cell = Rectangle(
            (key - 0.5, query - 0.5), 1, 1, fill=False, edgecolor=style.VERMILLION, linewidth=0.6
        )
        axes.add_patch(cell)


@style.styled
def score_by_dimension(
    image: Array,
    patches: Sequence[tuple[int, int] | None],
    grid: tuple[int, int],
    values: Sequence[tuple[str, Array]],
    title: str,
) -> Figure:
    """Draw an image with the patches of a query and a key outlined, and vectors as bars.

    image: (3, height, width).
    values: the name and the numbers of each vector, one below the other.
    patches: (row, column) of the query and the key, None for a token that is no patch.
    """
    figure = style.sheet(style.full_width(), 3.4)
    room = figure.add_gridspec(len(values), 2, width_ratios=[1, 2.6])
    picture = figure.add_subplot(room[:, 0])
    picture.imshow(image.transpose(1, 2, 0))
    words = []
    for patch, colour, name in zip(patches, (style.VERMILLION, style.SKY), ("query", "key")):
        if patch is None:
            words.append(f"{name}: not a patch")
            continue
        height = image.shape[1] / grid[0]
        width = image.shape[2] / grid[1]
        corner = (patch[1] * width - 0.5, patch[0] * height - 0.5)
        picture.add_patch(
            Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=2.0)
        )
        words.append(f"{name}: {'orange' if name == 'query' else 'blue'}")
    without_frames([picture])
    picture.set_xlabel("\n".join(words))
    for index, (name, vector) in enumerate(values):
        axes = figure.add_subplot(room[index, 1])
        colours = [style.BLUE if value >= 0 else style.VERMILLION for value in vector]
        axes.bar(np.arange(len(vector)), vector, color=colours, width=0.85)
        axes.axhline(0.0, color=style.GREY, linewidth=0.6)
        axes.set_ylabel(name)
        axes.set_xlim(-0.7, len(vector) - 0.3)
        if index < len(values) - 1:
            axes.set_xticklabels([])
        else:
            axes.set_xlabel("dimension")
    style.heading(figure, title)
    return figure


@style.styled
def token_vectors(
    panels: Sequence[tuple[str, Array]],
    marked: Sequence[int | None],
    prefix: Sequence[str],
    title: str,
) -> Figure:
    """Draw vectors of all tokens, a panel for each kind, all on one range of colours.

    panels: the title of each panel, and its vectors (tokens, numbers).
    marked: the token that is outlined in each panel.
    """
    most = max(_most(values) for _, values in panels)
    figure, grid = _abreast(len(panels), 3.3)
    for axes, (name, values), token in zip(grid, panels, marked, strict=True):
        image = _draw_signed(axes, values, most)
        axes.set_title(name)
        _name_tokens(axes, prefix, keys=False)
        axes.set_xlabel("dimension")
        if token is not None:
            _outline_row(axes, token, values.shape[1])
    figure.colorbar(image, ax=grid, extend="both", pad=0.02).outline.set_visible(False)
    style.heading(figure, title)
    return figure


@style.styled
def weighted_values(weights: Array, values: Array, output: Array, title: str) -> Figure:
    """Draw one query's weights next to the values, and the weighted sum of the values below.

    weights: (key,).
    values: (key, numbers).
    output: (numbers,), the weighted sum.
    """
    figure = style.sheet(style.full_width(), 3.6)
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 4], height_ratios=[7, 1])
    left = figure.add_subplot(grid[0, 0])
    middle = figure.add_subplot(grid[0, 1])
    below = figure.add_subplot(grid[1, 1])
    left.barh(np.arange(len(weights)), 100 * weights, color=style.BLUE, height=1.0)
    left.set(xlabel="weight (%)", ylabel="key token", ylim=(len(weights) - 0.5, -0.5))
    most = _most(values)
    _draw_signed(middle, values, most)
    middle.set(yticks=[], title="values of all tokens")
    image = _draw_signed(below, output[None], most)
    below.set(yticks=[], xlabel="weighted sum: the output of the head")
    figure.colorbar(image, ax=[middle, below], extend="both", pad=0.02).outline.set_visible(False)
    style.heading(figure, title)
    return figure


@style.styled
def patch_embedding(
    *,
    patch: Array,
    filters: Array,
    responses: Sequence[float],
    numbers: Sequence[int],
    embedded: Array,
    convolved: Array,
    title: str,
) -> Figure:
    """Draw a patch, some filters with their responses, and two ways to compute the patch embedding.

    patch: (3, height, width) in [0, 1].
    filters: (n, 3, height, width). They are drawn as pictures in which 0 is grey, divided by their
        largest weight.
    responses: the response of each filter to the patch.
    numbers: the numbers of the filters.
    embedded: all numbers of all patches, computed by unfold and a linear map.
    convolved: the same numbers, computed by the convolution.
    """
    columns = (len(responses) + 1) // 2
    if style.in_column():
        figure = style.sheet(style.full_width(), 5.6)
        rows = figure.add_gridspec(3, 1, height_ratios=[1.2, 1.7, 2.2])
        patch_place = rows[0, 0]
        filters_grid: GridSpecBase = rows[1, 0].subgridspec(2, columns)
        plot_place = rows[2, 0]
        first_column = 0
    else:
        figure = style.sheet(style.full_width(), 2.7)
        # the patch, the filters, a gap, and the plot
        widths = [1.6, *[0.9] * columns, 0.35, 2.6]
        grid = figure.add_gridspec(2, len(widths), width_ratios=widths)
        patch_place = grid[:, 0]
        filters_grid = grid
        plot_place = grid[:, -1]
        first_column = 1
    first = figure.add_subplot(patch_place)
    first.imshow(patch.transpose(1, 2, 0))
    first.set_title("one patch")
    for index, (weights, response, number) in enumerate(
        zip(filters, responses, numbers, strict=True)
    ):
        row, column = divmod(index, columns)
        axes = figure.add_subplot(filters_grid[row, first_column + column])
        largest = float(np.abs(weights).max()) or 1.0
        axes.imshow(0.5 + weights.transpose(1, 2, 0) / (2 * largest))
        axes.set_title(f"filter {number}\n{response:+.2f}", fontsize=style.SMALL)
    without_frames(figure.axes)
    axes = figure.add_subplot(plot_place)
    ends = [min(convolved.min(), embedded.min()), max(convolved.max(), embedded.max())]
    axes.plot(ends, ends, color=style.GREY, linewidth=0.8)
    axes.plot(
        convolved.ravel(),
        embedded.ravel(),
        ".",
        color=style.BLUE,
        markersize=1.5,
        alpha=0.4,
        rasterized=True,
    )
    axes.set(xlabel="convolution", ylabel="unfold and linear", title=f"{convolved.size:,} numbers")
    style.heading(figure, title)
    return figure


def _abreast(panels: int, tall: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels in a row; in a figure of one column they are below one another.

    tall: the height of a panel, inch.
    """
    down = panels if style.in_column() else 1
    figure = style.sheet(style.full_width(), tall * down)
    return figure, list(figure.subplots(down, panels // down, squeeze=False).flat)


def _most(values: Array) -> float:
    """Return the absolute value that has the full colour."""
    magnitudes = np.abs(values[np.isfinite(values)])
    return float(np.percentile(magnitudes, _MOST)) or 1.0


def _draw_signed(axes: Axes, values: Array, most: float, aspect: str = "auto") -> AxesImage:
    return axes.imshow(values, cmap=style.SIGNED, vmin=-most, vmax=most, aspect=aspect)  # type: ignore[arg-type]


def _draw_shares(axes: Axes, values: Array, label: str) -> None:
    """Draw a matrix and its colour bar."""
    scale = joint_scale(values)
    image = axes.imshow(values, cmap=style.MAGNITUDE, norm=scale.norm)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.82)
    bar.ax.clear()  # keep its place, and fill it as all other bars
    colour_bar(bar.ax, scale=scale, label=label)


def _name_tokens(axes: Axes, prefix: Sequence[str], *, keys: bool = True) -> None:
    """Label the axes with the numbers of the tokens; the label names the prefix."""
    ticks = style.round_ticks(0, max(axes.get_ylim()) - 0.5, _TICKS)
    words = style.tick_words(ticks)
    label = "query token" if keys else "token"
    if prefix:
        names = ["CLS" if name == "cls" else name for name in prefix]
        label += f" (first: {', '.join(dict.fromkeys(names))})"
    axes.set_yticks(ticks, words)
    axes.set_ylabel(label)
    if keys:
        axes.set_xticks(ticks, words)
        axes.set_xlabel("key token")


def _outline_row(axes: Axes, token: int, numbers: int) -> None:
    axes.add_patch(
        Rectangle(
            (-0.5, token - 0.5), numbers, 1, fill=False, edgecolor=style.VERMILLION, linewidth=1.2
        )
    )
