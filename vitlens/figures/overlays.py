"""Rows of overlays: an image, then maps of it, every panel in one scale of colours."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, as_images, require_length
from vitlens.figures.overlay import Scale, blend, colour_bar, enlarged, is_constant, joint_scale, upsample
from vitlens.figures.style import (
    HALF,
    RIGHT,
    RIGHT_SYMBOL,
    SMALL,
    TALL,
    WIDE,
    WRONG,
    WRONG_SYMBOL,
    bare,
    heading,
    sheet,
    shortened,
    styled,
)

_WRAP = 7  # panels side by side before one image's are broken into lines
_BAR = 0.75  # inch for the colour bar


@styled
def overlay_rows(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    title: str,
    label: str,
    names: Sequence[str] | None = None,
    masks: ArrayLike | None = None,
    hits: ArrayLike | None = None,
    scale: Scale | None = None,
    smooth: bool = True,
) -> Figure:
    """Images (batch, 3, height, width) in [0, 1], each followed by overlays of its maps (batch, panels, rows, columns).

    titles: one a panel; title: what is shown; label: the maps' unit, at the colour bar; names: one an image;
    masks: (batch, height, width), outlined in white; hits: (batch, panels), whether each map's highest point lies on
    the mask, marked by colour and symbol; scale: shared range of colours (default: the joint range of these maps).
    Raises InputError when shapes do not fit or a number is not finite.
    """
    pictures = as_images(images)
    values = as_array(maps, name="maps", axes=("batch", "panels", "rows", "columns"))
    batch, panels = values.shape[:2]
    require_length(batch, len(pictures), name="sets of maps", of="the images")
    require_length(len(titles), panels, name="titles", of="the maps of an image")
    require_length(len(names or pictures), batch, name="names", of="the images")
    outlines = None if masks is None else _checked(masks, "masks", ("batch", "height", "width"), pictures[:, 0].shape)
    found = None if hits is None else _checked(hits, "hits", ("batch", "panels"), (batch, panels))
    shared = scale or joint_scale(values.reshape(-1, *values.shape[2:]))

    figure, cells = _cells(batch, panels + 1, ratio=pictures.shape[2] / pictures.shape[3])
    for index, picture in enumerate(pictures):
        first = cells[index][0]
        first.imshow(enlarged(picture))
        _caption(first, "input", names[index] if names else "", above=index == 0 or batch == 1)
        for panel, axes in enumerate(cells[index][1:]):
            axes.imshow(blend(picture, values[index, panel], scale=shared, smooth=smooth))
            below = ""
            if is_constant(values[index, panel]):
                below = "all equal"
            elif found is not None:
                below = _mark_peak(axes, values[index, panel], hit=bool(found[index, panel]))
            _caption(axes, titles[panel], below, above=index == 0 or batch == 1)
        if outlines is not None:
            for axes in cells[index]:
                _outline(axes, outlines[index])
    every = [axes for row in cells for axes in row]
    bare(every)
    colour_bar(figure, every, scale=shared, label=label)
    heading(figure, title)
    return figure


def _checked(values: ArrayLike, name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    array = as_array(values, name=name, axes=axes)
    if array.shape != shape:
        raise InputError(f"expected {name} of shape {shape}, found {array.shape}")
    return array


def _cells(batch: int, panels: int, *, ratio: float) -> tuple[Figure, list[list[Axes]]]:
    """A figure and its axes, one list an image; one image's many panels are broken into lines of equal length."""
    lines = -(-panels // _WRAP) if batch == 1 else 1
    across, down = -(-panels // lines), lines * batch
    width = min((WIDE - _BAR) / across, (TALL - 1) / down / ratio - 0.2, 1.7)
    figure = sheet(max(width * across + _BAR, HALF), (width * ratio + 0.22) * down)
    grid = figure.add_gridspec(down, across)
    places = [divmod(index, across) for index in range(panels)]
    return figure, [[figure.add_subplot(grid[image * lines + y, x]) for y, x in places] for image in range(batch)]


def _caption(axes: Axes, title: str, below: str, *, above: bool) -> None:
    if above:
        axes.set_title(title)
    if below:
        axes.set_xlabel(shortened(below), fontsize=SMALL, labelpad=2)


def _mark_peak(axes: Axes, values: Array, *, hit: bool) -> str:
    """Mark the highest point of a map and say whether it is a hit."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    y, x = np.unravel_index(upsample(values, (height, width)).argmax(), (height, width))
    colour, symbol, word = (RIGHT, RIGHT_SYMBOL, "hit") if hit else (WRONG, WRONG_SYMBOL, "miss")
    axes.plot(x, y, "o" if hit else "X", color=colour, markeredgecolor="white", markersize=6, markeredgewidth=0.9)
    axes.xaxis.label.set_color(colour)
    return f"{symbol} {word}"


def _outline(axes: Axes, mask: Array) -> None:
    """Draw the border of a mask (height, width) in white over black, seen on any ground."""
    height, width = np.asarray(axes.images[0].get_array()).shape[:2]
    edge = np.pad(upsample(mask, (height, width), smooth=False), 1)
    where = np.arange(-1, height + 1), np.arange(-1, width + 1)
    for colour, thickness in (("black", 1.8), ("white", 0.9)):
        axes.contour(where[1], where[0], edge, levels=[0.5], colors=colour, linewidths=thickness)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
