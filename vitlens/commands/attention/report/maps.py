"""The maps of every head: one image, one layer on every image, and the mean of heads over depth."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import IMAGES, LAYERS, MAPS, AttentionArrays, LayerRow
from vitlens.commands.scaffold.sheets import sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_SHOWN: Final = "High attention to a patch does not show that the prediction depends on it."
SHARED: Final = "All panels share one colour scale."
_ON_A_SHEET: Final = 8  # images in the figure of attention by depth, one a row


def map_figures(record: Record) -> Iterator[FigureSpec]:
    """Grids of all heads on the first image, one layer on every image, and the mean of heads over depth."""
    arrays = record.arrays(MAPS)
    yield from _grids(record, arrays)
    yield from _one_layer(record, arrays)
    yield from _evolution(record, arrays)


def _shared_by(figures: int) -> str:
    return SHARED if figures == 1 else f"All panels of these {figures} figures share one colour scale."


def pixels(arrays: AttentionArrays) -> Any:
    """The images (batch, 3, height, width) in [0, 1]."""
    return arrays.images / np.float32(255)


def image_names(record: Record) -> list[str]:
    """The images' file names, or their numbers in the data."""
    return [Path(row.image).name for row in record.rows(IMAGES)]


def reader_of(row: LayerRow) -> str:
    """The query whose attention a layer's map shows, as in a figure's title."""
    return row.reading.removeprefix("the ")


def _grids(record: Record, arrays: AttentionArrays) -> Iterator[FigureSpec]:
    """One grid for each sequence of layers with equal heads and maps: one for a ViT, one for each stage of Swin."""
    rows, count = record.rows(LAYERS), len(arrays.layer)
    shapes = [arrays.layer[index].shape[1:] for index in range(count)]
    starts = [index for index in range(count) if index == 0 or shapes[index] != shapes[index - 1]]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], count])):
        which = "Every" if len(starts) == 1 else f"Layers {rows[start].layer} to {rows[stop - 1].layer}, every"
        yield FigureSpec(
            "heads" if len(starts) == 1 else f"heads_{number + 1}",
            f"{which} head on the first image, attention of {rows[start].reading}. {SHARED} {NOT_SHOWN}",
            partial(_draw_grid, arrays, rows[start:stop], range(start, stop)),
        )


def _draw_grid(arrays: AttentionArrays, rows: Sequence[LayerRow], indices: Sequence[int]) -> "Figure":
    from vitlens.figures.attention import attention_grid

    return attention_grid(
        maps=np.stack([arrays.layer[index][0] for index in indices]),
        image=pixels(arrays)[0],
        query=reader_of(rows[0]),
        numbers=[row.layer for row in rows],
    )


def _one_layer(record: Record, arrays: AttentionArrays) -> Iterator[FigureSpec]:
    """All heads of the chosen layer, by default the last, on each image; on several figures where needed."""
    from vitlens.figures.views import images_on_a_page

    rows, layer = record.rows(LAYERS), record.options(AttentionOptions).layer
    index = len(rows) - 1 if layer is None else [row.layer for row in rows].index(layer)
    which = "The last layer" if index == len(rows) - 1 else f"Layer {rows[index].layer}"
    name = "last_layer" if layer is None else "layer"
    pages = sheets(name, len(arrays.images), images_on_a_page(rows[index].heads))
    shared = _shared_by(len(pages))
    for figure, part in pages:
        yield FigureSpec(
            figure,
            f"{which}: each head on each image, attention of {rows[index].reading}. {shared} {NOT_SHOWN}",
            partial(_draw_layer, arrays, image_names(record), rows[index], index, part),
        )


def _draw_layer(arrays: AttentionArrays, names: Sequence[str], row: LayerRow, index: int, part: slice) -> "Figure":
    from vitlens.figures.attention import attention_overlays
    from vitlens.figures.views import shared_scale

    maps: Any = arrays.layer[index]
    return attention_overlays(
        images=pixels(arrays)[part],
        maps=maps[part],
        layer=row.layer,
        names=names[part],
        scale=shared_scale(list(maps.swapaxes(0, 1))),
        query=reader_of(row),
    )


def _evolution(record: Record, arrays: AttentionArrays) -> Iterator[FigureSpec]:
    """The mean of each layer's heads on each image, with one colour scale on all sheets."""
    readers = {reader_of(row) for row in record.rows(LAYERS)}
    reader = readers.pop() if len(readers) == 1 else "readout"
    pages = sheets("evolution", len(arrays.images), _ON_A_SHEET)
    shared = _shared_by(len(pages))
    numbers = [row.layer for row in record.rows(LAYERS)]
    for name, part in pages:
        yield FigureSpec(
            name,
            f"Attention by depth: the mean over the heads of each layer. {shared} {NOT_SHOWN}",
            partial(_draw_evolution, arrays, image_names(record), numbers, reader, part),
        )


def _draw_evolution(
    arrays: AttentionArrays, names: Sequence[str], numbers: Sequence[int], reader: str, part: slice
) -> "Figure":
    from vitlens.figures.attention import evolution
    from vitlens.figures.views import shared_scale

    maps = head_means(arrays)
    return evolution(
        images=pixels(arrays)[part],
        maps=maps[part],
        numbers=numbers,
        names=names[part],
        query=reader,
        scale=shared_scale(list(maps.swapaxes(0, 1))),
    )


def head_means(arrays: AttentionArrays) -> NDArray[np.floating]:
    """Head means (batch, layers, rows, columns), at the finest layer's resolution (nearest neighbour)."""
    means = [arrays.layer[index].mean(1) for index in range(len(arrays.layer))]
    rows, columns = max((mean.shape[1:] for mean in means), key=lambda size: size[0] * size[1])
    return np.stack([_nearest(_nearest(mean, rows, 1), columns, 2) for mean in means], 1)


def _nearest(values: NDArray[np.floating], size: int, axis: int) -> NDArray[np.floating]:
    """Nearest values along an axis, by the centres of cells."""
    indices = np.floor((np.arange(size) + 0.5) * values.shape[axis] / size).astype(int)
    nearest: NDArray[np.floating] = values.take(indices, axis)
    return nearest
