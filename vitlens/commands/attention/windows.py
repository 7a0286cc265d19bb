"""The windows of a windowed model, and its effective receptive field by depth."""

from collections.abc import Sequence

import torch

from vitlens.analysis.attention.windows import WindowLayer, reached, window_layers
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.commands.attention.window_rows import WINDOW_MAPS, WINDOWS, WindowArrays, WindowRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.receptive.measure import write_fields
from vitlens.errors import UnsupportedError
from vitlens.models.model import Model
from vitlens.shapes import Images


def write_windows(folder: RunFolder, model: Model, images: Images) -> None:
    """Write the windows of each layer that has some, and the receptive field; nothing for other models."""
    layers: Sequence[WindowLayer] = ()
    if model.anatomy.family == "windowed":
        try:
            layers = window_layers(model, images)
        except UnsupportedError:  # windows whose place in the image is not known
            layers = ()
    shown = [_middle(layer) for layer in layers]
    folder.write(WINDOWS, [_row(layer, patch) for layer, patch in zip(layers, shown)])
    write_fields(folder, {(model.alias, model.alias): receptive_field(model, images)} if layers else {})
    if not layers:
        return
    maps = [_reached(layers[: index + 1], patch).numpy() for index, patch in enumerate(shown)]
    folder.save(
        WINDOW_MAPS,
        WindowArrays(
            part=dict(enumerate(layer.part.numpy() for layer in layers)),
            reach=dict(enumerate(maps)),
            mask=dict(enumerate(layer.allowed[-1].numpy() for layer in layers)),
        ),
    )


def _middle(layer: WindowLayer) -> tuple[int, int]:
    """The patch above and to the left of the centre of the map.

    It is a corner of its window where the number of windows along a side is even.
    """
    rows, columns = layer.windows.resolution
    return max(rows // 2 - 1, 0), max(columns // 2 - 1, 0)


def _reached(layers: Sequence[WindowLayer], patch: tuple[int, int]) -> torch.Tensor:
    """The patches (rows, columns) that one patch depends on after the last layer, through those on the same map."""
    size = layers[-1].windows.resolution
    first = next(index for index in range(len(layers)) if all(one.windows.resolution == size for one in layers[index:]))
    return reached(layers[first:], torch.tensor([patch[0] * size[1] + patch[1]]))[0].view(size)


def _row(layer: WindowLayer, patch: tuple[int, int]) -> WindowRow:
    windows = layer.windows
    return WindowRow(
        layer=layer.site.layer,
        map=windows.resolution,
        window=windows.window,
        shift=layer.shift,
        windows=windows.count,
        parts=len(layer.part.unique()),
        padding=layer.padding,
        pairs=layer.pairs,
        new=layer.new,
        reach=layer.reach,
        patch=patch,
    )
