"""Attention by layer and head, and over the image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from vitlens.figures.board import BAR_ROOM, Board, Margins, board, without_frames
from vitlens.figures.inputs import Array, as_array, as_image, require_length
from vitlens.figures.overlay import (
    Scale,
    colour_bar,
    draw_map,
    enlarged,
    is_constant,
    joint_scale,
    with_common_decimals,
)
from vitlens.figures.style import SMALL, TALL, WIDE, styled
from vitlens.figures.views import panel_view

GridScale = Literal["figure", "layer"]
_PICTURE = 1.05  # inch to the left, for the image


@styled
def attention_grid(
    *,
    maps: ArrayLike,
    image: ArrayLike | None = None,
    scale: GridScale = "figure",
    query: str = "CLS token",
    numbers: Sequence[int] | None = None,
) -> Figure:
    """One map for every layer and head: maps (layers, heads, rows, columns), fractions of the query's row.

    image: (3, height, width) in [0, 1], shown beside them; scale: one range of colours for the figure, or one per
    layer, which is written at its end; query: whose row of the weights it is; numbers: of the layers in the model, from
    0 (None: 0, 1, ...). Layers run down, or across where they are more than twice as many as heads. A map whose values
    are all equal is marked "=". Raises InputError for other shapes or NaN.
    """
    values = 100 * as_array(maps, name="maps", axes=("layers", "heads", "rows", "columns"))
    picture = None if image is None else as_image(image)
    layers, heads = values.shape[:2]
    known = range(layers) if numbers is None else numbers
    require_length(len(known), layers, name="numbers", of="the layers of maps")
    across = layers > 2 * heads
    groups = values if scale == "layer" else [values.reshape(-1, *values.shape[2:])] * layers
    scales = [joint_scale(group) for group in groups]
    drawn = _board(_title(values, query, scale), values, picture, across=across, ranges=scale == "layer")
    panels = np.array(drawn.panels, dtype=object)
    cells = panels.reshape(heads, layers).T if across else panels.reshape(layers, heads)
    for (layer, head), axes in np.ndenumerate(cells):
        draw_map(axes, values[layer, head], scale=scales[layer])
        if is_constant(values[layer, head]):
            axes.text(0.5, 0.5, "=", transform=axes.transAxes, ha="center", va="center", color="white")
    without_frames(drawn.panels)
    _name_layers_and_heads(cells, known, across=across)
    if picture is not None:
        beside = drawn.place(0.06, drawn.top, _PICTURE - 0.1, (_PICTURE - 0.1) * picture.shape[1] / picture.shape[2])
        beside.imshow(enlarged(picture))
        beside.set_title("input")
        without_frames([beside])
    if scale == "layer":
        _write_ranges(cells[:, -1], scales, across=across)
    else:
        colour_bar(drawn.bar(), scale=scales[0], label="attention (%)")
    return drawn.figure


def _title(values: Array, query: str, scale: GridScale) -> str:
    equal = sum(is_constant(panel) for panel in values.reshape(-1, *values.shape[2:]))
    colours = "one scale for all" if scale == "figure" else "one scale per layer"
    note = f"; {equal} of the maps all equal (=)" if equal else ""
    return f"Attention of the {query} to each patch, % of its row; {colours}{note}"


def _board(title: str, values: Array, picture: Array | None, *, across: bool, ranges: bool) -> Board:
    layers, heads, rows, columns = values.shape
    down, wide = (heads, layers) if across else (layers, heads)
    # with an image, its shape, as patches may not be square
    ratio = rows / columns if picture is None else picture.shape[1] / picture.shape[2]
    margins = Margins(
        left=0.62 + (0 if picture is None else _PICTURE),
        right=0.06 if ranges and across else BAR_ROOM,
        top=0.22,
        bottom=0.36 if ranges and across else 0.06,
    )
    gap = 0.05
    panel = min(
        (WIDE - margins.left - margins.right) / wide - gap,
        ((TALL - 0.8 - margins.top - margins.bottom) / down - gap) / ratio,
        0.8,
    )
    size = (panel, panel * ratio)
    if picture is not None:  # room for the image beside a low grid
        missing = _PICTURE * ratio - down * (size[1] + gap)
        margins = replace(margins, bottom=max(margins.bottom, missing))
    return board(title=title, count=down * wide, across=wide, panel=size, gap=(gap, gap), margins=margins)


def _name_layers_and_heads(cells: NDArray[np.object_], layers: Sequence[int], *, across: bool) -> None:
    heads = range(cells.shape[1])
    for word, line, above, numbers in (("layer", cells[:, 0], across, layers), ("head", cells[0], not across, heads)):
        for index, (axes, number) in enumerate(zip(line, numbers, strict=True)):
            name = f"{number}" if index else f"{word} {number}"
            if above:
                axes.set_title(name)
            else:
                axes.set_ylabel(name, rotation=0, ha="right", va="center")


def _write_ranges(ends: NDArray[np.object_], scales: Sequence[Scale], *, across: bool) -> None:
    for axes, scale in zip(ends, scales, strict=True):
        low, high = with_common_decimals([scale.low, scale.high])
        text = f"{low} to\n{'≥ ' if scale.clipped else ''}{high}"
        if across:
            axes.set_xlabel(text, fontsize=SMALL, labelpad=2)
        else:
            axes.text(1.1, 0.5, text, transform=axes.transAxes, fontsize=SMALL, va="center")


def attention_overlays(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    layer: int,
    names: Sequence[str] | None = None,
    scale: Scale | None = None,
    query: str = "CLS token",
) -> Figure:
    """One layer's heads on images: images (batch, 3, height, width), maps (batch, heads, rows, columns) as fractions.

    layer counts from 0; query: whose row it is; scale: in % (default: that of these maps). Errors: as panel_view.
    """
    values = as_array(maps, name="maps", axes=("batch", "heads", "rows", "columns"))
    return panel_view(
        images=images,
        maps=list(values.swapaxes(0, 1)),
        titles=[f"head {head}" for head in range(values.shape[1])],
        title=f"Layer {layer}: attention of the {query} to each patch, by head",
        names=names,
        scale=scale,
    )
