"""An animation of a training: statistics of heads and similarity of positions, with fixed scales."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Margins, board
from vitlens.figures.gaps import as_measured
from vitlens.figures.inputs import Array, require_length
from vitlens.figures.overlay import colour_bar
from vitlens.figures.stats.training import as_similarity, draw_offsets, similarity_scale
from vitlens.figures.style import BLUE, SIGNED, WIDE, styled

_AXES = ("checkpoints", "layers", "heads")
_MOST = 2  # statistics beside the positions


@dataclass(frozen=True)
class Animation:
    """figure: the figure that changes; frames: their number; show: updates the figure to a frame, from 0."""

    figure: Figure
    frames: int
    show: Callable[[int], None]


def training_animation(
    *,
    epochs: Sequence[int],
    values: Mapping[str, ArrayLike],
    similarity: ArrayLike | None = None,
    name: str = "",
) -> Animation:
    """Each head as a dot at its layer and the mean of heads as a line; beside them the similarity of positions.

    epochs: done at each evaluation; values: one or two statistics by name and unit, (checkpoints, layers, heads), NaN
    where there is no such head; similarity: (checkpoints, 2 down + 1, 2 across + 1) as in positions_over_training, or
    None; name: of the model. Axes and colours are the same in all frames. Raises InputError when shapes do not fit.
    """
    measured = {key: as_measured(value, name=key, axes=_AXES) for key, value in values.items()}
    if not 1 <= len(measured) <= _MOST:
        raise InputError(f"expected 1 or {_MOST} statistics, found {len(measured)}")
    maps = None if similarity is None else as_similarity(similarity)
    for key, array in {**measured, **({} if maps is None else {"similarity": maps})}.items():
        require_length(len(array), len(epochs), name=f"checkpoints of {key}", of="the epochs")
    of = f"{name}: " if name else ""
    words = [f"{of}epoch {epoch} of {epochs[-1]} (dots: heads; line: their mean)" for epoch in epochs]
    return _animated(measured, maps, words)


def _animated(values: Mapping[str, Array], maps: Array | None, words: Sequence[str]) -> Animation:
    figure, changes = _panels(values, maps, words[-1])

    def show(frame: int) -> None:
        figure.texts[0].set_text(words[frame])
        for change in changes:
            change(frame)

    show(0)
    return Animation(figure, len(words), show)


def _panels(
    values: Mapping[str, Array], maps: Array | None, longest: str
) -> tuple[Figure, list[Callable[[int], None]]]:
    """The figure with its fixed parts, and the functions that update it for a frame."""
    changes: list[Callable[[int], None]] = []

    @styled
    def drawn() -> Figure:
        count = len(values) + (maps is not None)
        margins = Margins(left=0.6, right=BAR_ROOM if maps is not None else 0.1, top=0.25, bottom=0.45)
        wide = min(2.6, (WIDE - margins.left - margins.right - 0.6 * (count - 1)) / count)
        panels = board(title=longest, count=count, across=count, panel=(wide, 1.8), gap=(0.6, 0.0), margins=margins)
        for axes, (key, array) in zip(panels.panels, values.items(), strict=False):
            changes.append(_dots(axes, array, key))
        if maps is not None:
            changes.append(_map(panels.panels[-1], maps))
            colour_bar(panels.bar(), scale=similarity_scale(maps), label="cosine similarity", colours=SIGNED)
        return panels.figure

    return drawn(), changes


def _dots(axes: Axes, values: Array, name: str) -> Callable[[int], None]:
    """Draw one statistic, heads side by side at their layer; returns the function that updates it."""
    _, layers, heads = values.shape
    places = np.arange(layers)[:, None] + 0.6 * (np.arange(heads) - (heads - 1) / 2) / max(heads, 2)
    dots: Line2D = axes.plot(places.ravel(), values[0].ravel(), "o", color=BLUE, markersize=2.8, markeredgewidth=0)[0]
    middle: Line2D = axes.plot(np.arange(layers), _mean(values[0]), color=BLUE, linewidth=0.9)[0]
    least, most = min(0.0, float(np.nanmin(values))), float(np.nanmax(values))
    axes.set_ylim(least, most + 0.05 * (most - least) or 1.0)
    axes.set_xlim(-0.5, layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    axes.set_title(name)
    axes.set_xlabel("layer")

    def change(frame: int) -> None:
        dots.set_ydata(values[frame].ravel())
        middle.set_ydata(_mean(values[frame]))

    return change


def _map(axes: Axes, maps: Array) -> Callable[[int], None]:
    draw_offsets(axes, maps[0], scale=similarity_scale(maps))
    axes.set_title("similarity of positions")
    axes.set_ylabel("rows apart", labelpad=0)
    (image,) = axes.images

    def change(frame: int) -> None:
        image.set_data(maps[frame])

    return change


def _mean(values: Array) -> Array:
    """Mean over heads, NaN for a layer without any value."""
    mean: Array = np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)
    return mean
