"""Where a model looks: attention by layer and head, on the image, and over the layers."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array, as_image
from vitlens.figures.overlay import Scale, colour_bar, draw_map, enlarged, is_constant, joint_scale
from vitlens.figures.overlays import overlay_rows
from vitlens.figures.style import HALF, SMALL, TALL, WIDE, bare, heading, sheet, styled

GridScale = Literal["figure", "layer"]


@styled
def attention_grid(
    *, maps: ArrayLike, image: ArrayLike | None = None, scale: GridScale = "figure", reader: str = "CLS token"
) -> Figure:
    """One map for every layer and head: maps (layers, heads, rows, columns), fractions of what the reader attends to.

    image: (3, height, width) in [0, 1], shown beside them; scale: one range of colours for the figure, or one a
    layer, written at its end; reader: whose row of the weights it is. Layers and heads are labelled from 1. Layers
    run down, or across where they are more than twice as many as heads. Raises InputError for other shapes or NaN.
    """
    values = 100 * as_array(maps, name="maps", axes=("layers", "heads", "rows", "columns"))
    layers, heads = values.shape[:2]
    across = layers > 2 * heads
    figure, cells, first = _grid(values, across=across, image=image)
    scales = [joint_scale(layer if scale == "layer" else values.reshape(-1, *values.shape[2:])) for layer in values]
    for (layer, head), axes in np.ndenumerate(cells):
        draw_map(axes, values[layer, head], scale=scales[layer])
        if is_constant(values[layer, head]):
            axes.text(0.5, 0.5, "=", transform=axes.transAxes, ha="center", va="center", color="white")
    bare(cells.flat)
    _name_layers_and_heads(cells, across=across)
    if first is not None:
        first.imshow(enlarged(as_image(image)))  # type: ignore[arg-type]
        first.set_title("input")
        bare([first])
    equal = sum(is_constant(one) for one in values.reshape(layers * heads, -1))
    colours = "one scale of colours for all"
    if scale == "layer":
        colours = "each layer has its own scale"
        _write_ranges(cells, scales, across=across)
    else:
        colour_bar(figure, list(figure.axes), scale=scales[0], label="attention (%)")
    note = f"; {equal} maps are all equal (=)" if equal else ""
    heading(figure, f"Attention of the {reader} to each patch, % of its row; {colours}{note}")
    return figure


def _grid(values: Array, *, across: bool, image: ArrayLike | None) -> tuple[Figure, Array, Axes | None]:
    """A figure, its axes (layers, heads), and one for the image if there is one."""
    layers, heads, rows, columns = values.shape
    down, wide = (heads, layers) if across else (layers, heads)
    extra = 0 if image is None else 1
    ratio = rows / columns
    panel = min((WIDE - 1.3) / (wide + 1.5 * extra), (TALL - 0.8) / down / ratio, 1.2)
    figure = sheet(max(HALF, panel * (wide + 1.5 * extra) + 1.3), panel * down * ratio + 0.35)
    grid = figure.add_gridspec(down, wide + extra, width_ratios=[1.5] * extra + [1] * wide, wspace=0.02, hspace=0.02)
    cells = np.empty((layers, heads), dtype=object)
    for layer, head in np.ndindex(layers, heads):
        y, x = (head, layer) if across else (layer, head)
        cells[layer, head] = figure.add_subplot(grid[y, x + extra])
    return figure, cells, figure.add_subplot(grid[: min(2, down), 0]) if extra else None


def _name_layers_and_heads(cells: Array, *, across: bool) -> None:
    for layer, axes in enumerate(cells[:, 0]):
        name = f"{layer + 1}" if layer else "layer 1"
        axes.set_title(name) if across else axes.set_ylabel(name, rotation=0, ha="right", va="center")
    for head, axes in enumerate(cells[0]):
        name = f"{head + 1}" if head else "head 1"
        axes.set_ylabel(name, rotation=0, ha="right", va="center") if across else axes.set_title(name)


def _write_ranges(cells: Array, scales: Sequence[Scale], *, across: bool) -> None:
    for axes, scale in zip(cells[:, -1], scales, strict=True):
        text = f"{scale.low:.2g} to\n{'≥ ' if scale.clipped else ''}{scale.high:.2g}"
        if across:
            axes.set_xlabel(text, fontsize=SMALL)
        else:
            axes.text(1.08, 0.5, text, transform=axes.transAxes, fontsize=SMALL, va="center")


def attention_overlays(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    layer: int,
    names: Sequence[str] | None = None,
    scale: Scale | None = None,
    reader: str = "CLS token",
) -> Figure:
    """One layer's heads on images: images (batch, 3, height, width), maps (batch, heads, rows, columns) as fractions.

    layer is counted from 0 and labelled from 1. scale: in %, see overlay_rows, as are the errors.
    """
    values = 100 * as_array(maps, name="maps", axes=("batch", "heads", "rows", "columns"))
    return overlay_rows(
        images=images,
        maps=values,
        titles=[f"head {head + 1}" for head in range(values.shape[1])],
        title=f"Layer {layer + 1}: attention of the {reader} to each patch, by head",
        label="attention (%)",
        names=names,
        scale=scale,
    )


def evolution(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    layers: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    reader: str = "CLS token",
) -> Figure:
    """How attention changes with depth: images (batch, 3, height, width), maps (batch, layers, rows, columns).

    layers: which to show, counted from 0 (default: all for one image, else six evenly spaced; the title says which
    share). Maps are means over heads, fractions of the reader's row; all panels share one scale. Raises InputError
    for a layer that is not there, and as overlay_rows.
    """
    values = 100 * as_array(maps, name="maps", axes=("batch", "layers", "rows", "columns"))
    batch, depth = values.shape[:2]
    few = depth if batch == 1 else min(depth, 6)
    chosen = list(layers) if layers is not None else [round(x) for x in np.linspace(0, depth - 1, few)]
    wrong = [layer for layer in chosen if not 0 <= layer < depth]
    if wrong or not chosen:
        raise InputError(f"expected layers from 0 to {depth - 1}, found {wrong or 'none'}")
    share = "every layer" if len(chosen) == depth else f"{len(chosen)} of {depth} layers"
    return overlay_rows(
        images=images,
        maps=values[:, chosen],
        titles=[f"layer {layer + 1}" for layer in chosen],
        title=f"Attention of the {reader} to each patch, mean of heads, {share}",
        label="attention (%)",
        names=names,
    )
