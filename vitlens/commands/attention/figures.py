"""The pictures and figures of `vitlens attention`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture
from vitlens.charts.pictures import images_on_a_page, of_heads, with_maps
from vitlens.charts.windows import windows_and_shift
from vitlens.commands.attention.options import ALL, MANY_IMAGES, MANY_LAYERS, SOME_LAYERS
from vitlens.commands.attention.record import AttentionRecord
from vitlens.commands.shared.sheets import EACH, evenly

_MEAN: Final = "mean over "  # how the reading of a map begins that is no single query's


def layer_pictures(record: AttentionRecord) -> Iterator[Picture]:
    """Yield every image with the mean map of the drawn layers."""
    if record.maps is not None:
        # maps of a layer are (images, heads, rows, columns)
        means = {index: maps.mean(1) for index, maps in record.maps.layer.items()}
        yield from _pictures(record, means)


def rollout_pictures(record: AttentionRecord) -> Iterator[Picture]:
    """Yield every image with the rollout up to the drawn layers."""
    if record.maps is not None and record.maps.rollout is not None:
        by_layer = record.maps.rollout.swapaxes(0, 1)  # from (images, layers, rows, columns)
        yield from _pictures(record, dict(enumerate(by_layer)))


def _pictures(record: AttentionRecord, maps: Mapping[int, Any]) -> Iterator[Picture]:
    """Yield every image with its maps in the drawn layers.

    A sheet has at most EACH images and SOME_LAYERS layers. With --layers, it has at most
    MANY_IMAGES images and MANY_LAYERS layers.

    maps: (images, rows, columns) by row of the table of layers.
    """
    assert record.maps is not None
    layers = _drawn_layers(record)
    images_a_sheet = EACH
    layers_a_sheet = SOME_LAYERS
    if record.options.get("layers"):
        images_a_sheet = MANY_IMAGES
        layers_a_sheet = MANY_LAYERS
    groups_of_layers = []
    for start in range(0, len(layers), layers_a_sheet):
        groups_of_layers.append(layers[start : start + layers_a_sheet])
    for image_index, (name, image) in enumerate(zip(record.names, record.maps.pixels)):
        # sheets are numbered by group of images, and within one by group of layers
        group_of_images = image_index // images_a_sheet
        first_sheet = group_of_images * len(groups_of_layers)
        for sheet, group in enumerate(groups_of_layers, start=first_sheet):
            yield Picture(image, row=name, column="image", sheet=sheet)
            for index in group:
                layer = record.layers[index].layer
                percent = 100 * maps[index][image_index]
                yield Picture(image, percent, row=name, column=f"layer {layer}", sheet=sheet)


def _drawn_layers(record: AttentionRecord) -> list[int]:
    """Return the rows of the layers of --layers, without it at most SOME_LAYERS evenly spaced
    ones."""
    chosen = tuple(record.options.get("layers") or ())
    if not chosen:
        return evenly(len(record.layers), SOME_LAYERS)
    if chosen == (ALL,):
        return list(range(len(record.layers)))
    numbers = {int(number) for number in chosen}  # "05" is layer 5, too
    return [index for index, row in enumerate(record.layers) if row.layer in numbers]


def training_pictures(record: AttentionRecord) -> Iterator[Picture]:
    """Yield the first images with their map after each of the epochs of a training."""
    if record.maps is None or record.training_maps is None:
        return
    titles = []
    for row in record.over_training:
        title = f"epoch {row.epochs}" if row.epochs else "before training"
        titles.append(title)
    # from (images, epochs, rows, columns) to one array an epoch
    percent_by_epoch = 100 * record.training_maps.maps.swapaxes(0, 1)
    count = len(record.training_maps.maps)
    pixels = record.maps.pixels[:count]
    yield from with_maps(pixels, list(percent_by_epoch), titles, record.names[:count])


@dataclass(frozen=True)
class HeadPicture(Picture):
    """A map of a head in the figure of one stage.

    attention: which attention it shows, "Attention of the CLS token".
    """

    stage: int = 0
    attention: str = ""


def head_pictures(record: AttentionRecord) -> Iterator[HeadPicture]:
    """Yield every head on the first image.

    A stage is a sequence of layers with equal heads and maps.
    """
    if record.maps is None:
        return
    rows = record.layers
    stages = groupby(range(len(rows)), key=lambda index: (rows[index].heads, rows[index].map))
    for stage, (_heads_and_map, indices) in enumerate(stages, start=1):
        maps = []
        layers = []
        readings = []
        for index in indices:
            maps.append(100 * record.maps.layer[index][0])  # of the first image
            layers.append(rows[index].layer)
            readings.append(rows[index].reading)
        for picture in of_heads(np.stack(maps), layers, record.maps.pixels[0]):
            yield HeadPicture(**vars(picture), stage=stage, attention=_attention_of(readings[0]))


def _attention_of(reading: str) -> str:
    """Return which attention a map shows, from the query or the mean that it is read from."""
    if reading.startswith(_MEAN):
        return f"Mean attention of {reading.removeprefix(_MEAN)}"
    return f"Attention of {reading}"


def heads_of_one_layer(record: Any) -> list[Picture]:
    """Return every head of --layer, by default of the last one, on the first images."""
    chosen = len(record.layers) - 1
    for index, row in enumerate(record.layers):
        if row.layer == record.options.get("layer"):
            chosen = index
            break
    maps = record.maps.layer[chosen].swapaxes(0, 1)
    titles = [f"head {head}" for head in range(len(maps))]
    return _over(record, list(maps), titles)


def view_pictures(view: Literal["query", "key"], record: Any) -> list[Picture]:
    """Return the attention from a patch, or to it, layer by layer, the mean of heads."""
    arrays = record.views.get(view)
    if arrays is None:
        return []
    titles = []
    patches = []
    for index in arrays.mean:
        row = getattr(record, view)[index]
        titles.append(f"layer {row.layer}")
        patches.append((row.row, row.column))
    return _over(record, list(arrays.mean.values()), titles, patches=patches)


def _over(record: Any, maps: Sequence[Any], titles: Sequence[str], **marks: Any) -> list[Picture]:
    """Return the images that fit on a page, each next to its maps (images, rows, columns) in
    percent.

    marks: as those of with_maps.
    """
    count = images_on_a_page(len(titles))
    shares = [100 * values[:count] for values in maps]
    return list(
        with_maps(record.maps.pixels[:count], shares, titles, record.names[:count], **marks)
    )


def windows_figure(record: Any, title: str) -> Figure:
    """Draw two consecutive layers: the first pair whose second layer connects new patches, or else
    the first pair.
    """
    rows = record.windows
    arrays = record.window_maps
    second = _connecting_row(rows)
    first = second - 1
    if rows[first].map != rows[second].map:
        first = second
    return windows_and_shift(
        image=record.maps.pixels[0],
        parts=[arrays.part[first], arrays.part[second]],
        reach=[arrays.reach[first], arrays.reach[second]],
        mask=arrays.mask[second],
        patch=rows[second].patch,
        layers=(rows[first].layer, rows[second].layer),
        title=title,
    )


def _connecting_row(rows: Sequence[Any]) -> int:
    """Return the row of the first layer that connects patches which the layer before it does not.

    Both must have the same map. If there is none, it is the first row with the map of the row
    before it, or else row 1.
    """
    on_same_map = []
    for index in range(1, len(rows)):
        if rows[index].map != rows[index - 1].map:
            continue
        if rows[index].new:
            return index
        on_same_map.append(index)
    if on_same_map:
        return on_same_map[0]
    return 1
