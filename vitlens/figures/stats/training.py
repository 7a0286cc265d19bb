"""Statistics of every head over a training, and the similarity of position embeddings by offset."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.board import BAR_ROOM, Margins, board
from vitlens.figures.gaps import as_array_with_gaps, as_measured
from vitlens.figures.inputs import Array, as_array, require_length
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import BLUE, GREY, LABEL, SERIES, SIGNED, WIDE, heading, sheet, styled

MOST_MAPS: Final = 6  # most maps of positions side by side
_AXES: Final = ("checkpoints", "layers", "heads")
_FAINT: Final = 0.2  # least similarity of the full colour, so that random embeddings stay pale
_MEAN: Final[dict[str, Any]] = {"color": "black", "linewidth": 1.6}
_ALIKE: Final[dict[str, Any]] = {"color": BLUE, "linewidth": 0.6, "alpha": 0.85}  # too many heads for a colour each
_UNIFORM: Final[dict[str, Any]] = {"color": GREY, "linestyle": "--", "linewidth": 1.0}


@styled
def heads_over_training(
    *, epochs: Sequence[int], values: ArrayLike, title: str, label: str, uniform: ArrayLike | None = None
) -> Figure:
    """One statistic of every head over a training: a panel per layer, a line per head, all with one vertical axis.

    epochs: done at each checkpoint, ascending; values: (checkpoints, layers, heads), NaN where there is no such head;
    label: the statistic and its unit; uniform: (layers,), its value under uniform attention, NaN where undefined. Up to
    six heads have a colour each; more are thin lines of one colour. Layers and heads are labelled from 0; a layer
    without values is left out. Raises InputError when shapes do not fit, for infinite numbers and where all are NaN.
    """
    measured = as_measured(values, name="values", axes=_AXES)
    places = _ascending(epochs, len(measured))
    expected = None if uniform is None else as_array_with_gaps(uniform, name="uniform", axes=("layers",))
    if expected is not None:
        require_length(len(expected), measured.shape[1], name="layers of uniform", of="the layers of values")
    layers = [layer for layer in range(measured.shape[1]) if not np.isnan(measured[:, layer]).all()]
    across = next(count for limit, count in ((3, len(layers)), (6, 3), (12, 4), (np.inf, 6)) if len(layers) <= limit)
    down = -(-len(layers) // across)
    figure = sheet(WIDE * (0.6 if across == 1 else 1), 0.5 + min(1.75, 7.6 / down) * down)
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    coloured = measured.shape[2] <= len(SERIES)
    for axes, layer in zip(panels, layers, strict=False):
        _lines(axes, places, measured[:, layer], coloured=coloured)
        if expected is not None and not np.isnan(expected[layer]):
            axes.axhline(expected[layer], **_UNIFORM)
        axes.set_title(f"layer {layer}")
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    if np.nanmin(measured) >= 0:
        most = np.nanmax(measured if expected is None else [np.nanmax(measured), *expected[layers]])
        panels[0].set_ylim(0.0, 1.06 * most or 1.0)
    _label(figure, panels[: len(layers)], across, places, label)
    _legend(figure, measured.shape[2] if coloured else 0, uniform=expected is not None)
    heading(figure, title)
    return figure


def _lines(axes: Axes, places: Array, values: Array, *, coloured: bool) -> None:
    """Draw the heads of a layer as lines, and their mean."""
    for head, line in enumerate(values.T):
        axes.plot(places, line, **(_head_style(head) if coloured else _ALIKE))
    axes.plot(places, np.ma.masked_invalid(values).mean(axis=1), **_MEAN)


def _head_style(head: int) -> dict[str, Any]:
    return {"color": SERIES[head], "linewidth": 1.1, "alpha": 0.85}


def _label(figure: Figure, panels: Sequence[Axes], across: int, places: Array, label: str) -> None:
    for index, axes in enumerate(panels):
        axes.grid(axis="y")
        axes.set_xlim(places[0], places[-1] if len(places) > 1 else places[0] + 1)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
        if index + across >= len(panels):  # no panel below
            axes.set_xlabel("epoch")
            axes.tick_params(labelbottom=True)
    figure.supylabel(label, fontsize=LABEL)


def _legend(figure: Figure, heads: int, *, uniform: bool) -> None:
    styles: dict[str, dict[str, Any]] = {f"head {head}": _head_style(head) for head in range(heads)}
    styles |= {**({} if heads else {"one head": _ALIKE}), "mean of heads": _MEAN}
    styles |= {"uniform attention": _UNIFORM} if uniform else {}
    handles = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // (1 + (len(handles) > 6))))


@styled
def positions_over_training(*, epochs: Sequence[int], similarity: ArrayLike) -> Figure:
    """The similarity of positions by their offset, at up to six checkpoints of a training, with one colour scale.

    epochs: done at each checkpoint, ascending; similarity: (checkpoints, 2 down + 1, 2 across + 1), mean cosine
    similarity of all pairs of position embeddings by offset, offset 0 in the middle, where it is 1. Colours are
    symmetric around 0, up to the greatest similarity elsewhere and at least 0.2. Raises InputError for other shapes,
    more checkpoints, or values beyond [-1, 1].
    """
    maps = as_similarity(similarity)
    places = _ascending(epochs, len(maps))
    if len(maps) > MOST_MAPS:
        raise InputError(f"expected 1 to {MOST_MAPS} checkpoints, found {len(maps)}; choose some of them")
    scale, ratio = similarity_scale(maps), maps.shape[1] / maps.shape[2]
    wide = min(1.5, (WIDE - 0.5 - BAR_ROOM) / len(maps) - 0.1)
    drawn = board(
        title="Position embeddings: mean cosine similarity of two positions by their offset",
        count=len(maps),
        across=len(maps),
        panel=(wide, wide * ratio),
        gap=(0.1, 0.0),
        margins=Margins(left=0.5, right=BAR_ROOM, top=0.22, bottom=0.45),
    )
    for index, (axes, by_offset, epoch) in enumerate(zip(drawn.panels, maps, places, strict=True)):
        draw_offsets(axes, by_offset, scale=scale)
        axes.set_title(f"epoch {epoch:.0f}")
        axes.set_ylabel("" if index else "rows apart")
        if index:
            axes.tick_params(labelleft=False)
    colour_bar(drawn.bar(), scale=scale, label="cosine similarity", colours=SIGNED)
    return drawn.figure


def near_offsets(similarity: ArrayLike) -> Array:
    """Crop maps (checkpoints, 2 rows - 1, 2 columns - 1) by offset to offsets within half the grid, beyond which means
    are of few pairs."""
    maps = as_array(similarity, name="similarity", axes=("checkpoints", "2 rows - 1", "2 columns - 1"))
    rows, columns = ((side + 1) // 2 for side in maps.shape[1:])
    down, across = rows // 2, columns // 2
    return maps[:, rows - 1 - down : rows + down, columns - 1 - across : columns + across]


def as_similarity(values: ArrayLike) -> Array:
    """Maps (checkpoints, down, across) with odd sides, within [-1, 1]. Raises InputError for others."""
    maps = as_array(values, name="similarity", axes=("checkpoints", "down", "across"))
    if not maps.shape[1] % 2 == maps.shape[2] % 2 == 1:
        raise InputError(
            "expected similarity of shape (checkpoints, 2 down + 1, 2 across + 1), found "
            f"{maps.shape}; sum it by offset"
        )
    if np.abs(maps).max() > 1 + 1e-3:
        raise InputError(f"expected cosine similarity in [-1, 1], found {np.abs(maps).max():.3g}")
    return maps


def similarity_scale(maps: Array) -> Scale:
    """Symmetric around 0, up to the greatest similarity of two different positions, and at least to _FAINT."""
    apart = np.ones(maps.shape[1:], dtype=bool)
    apart[maps.shape[1] // 2, maps.shape[2] // 2] = False
    most = max(float(np.abs(maps[:, apart]).max()) if apart.any() else 0.0, _FAINT)
    return Scale(-most, most, clipped=most < 1)


def draw_offsets(axes: Axes, values: Array, *, scale: Scale) -> None:
    """Fill axes with a map (down, across) by offset, offset 0 in the middle."""
    down, across = (side // 2 for side in values.shape)
    area = (-across - 0.5, across + 0.5, down + 0.5, -down - 0.5)
    axes.imshow(values, cmap=SIGNED, norm=scale.norm, interpolation="nearest", extent=area, aspect="auto")
    axes.set_xticks([-across, 0, across] if across else [0])
    axes.set_yticks([-down, 0, down] if down else [0])
    axes.set_xlabel("columns apart")
    axes.spines[:].set_visible(False)


def _ascending(epochs: Sequence[int], checkpoints: int) -> Array:
    require_length(len(epochs), checkpoints, name="epochs", of="the checkpoints of values")
    places = as_array(list(epochs), name="epochs", axes=("checkpoints",))
    if (np.diff(places) <= 0).any():
        raise InputError(f"expected ascending epochs, found {list(epochs)}")
    return places
