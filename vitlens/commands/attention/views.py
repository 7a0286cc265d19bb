"""The attention from and to one patch, and the windows of a model, layer by layer."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.weights import LayerMaps, Side, patch_views
from vitlens.analysis.attention.windows import WindowLayer, reachable_patches, window_layers
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import PatchRow, ViewArrays, WindowArrays, WindowRow
from vitlens.commands.shared.receptive import field_rows
from vitlens.errors import UnsupportedError
from vitlens.models.model import Model
from vitlens.shapes import Images


def measure_views(model: Model, images: Images, options: AttentionOptions) -> dict[str, Any]:
    """Return the attention of --query, and to --key, in every layer, as fields of the record.

    Raises InputError for a patch outside the grid.
    """
    arrays: dict[str, ViewArrays] = {}
    fields: dict[str, Any] = {"views": arrays}
    patches: dict[Side, tuple[int, int] | None] = {"query": options.query, "key": options.key}
    for side, patch in patches.items():
        if patch is not None:
            views = patch_views(model, images, side=side, patch=patch)
            fields[side] = tuple(_patch_row(view, side) for view in views)
            means = {index: as_array(view.maps.mean(1)) for index, view in enumerate(views)}
            arrays[side] = ViewArrays(means)
    return fields


def _patch_row(view: LayerMaps, side: Literal["query", "key"]) -> PatchRow:
    """Return one layer of a view.

    side: "query" if the maps are the attention from the patch, "key" if they are that to it.
    """
    row, column = view.patch
    patch_row = PatchRow(
        layer=view.site.layer,
        row=row,
        column=column,
        grid=(view.maps.shape[-2], view.maps.shape[-1]),
        itself=float(view.maps[:, :, row, column].mean()),
    )
    has_prefix = view.prefix.shape[-1] > 0
    over_patches = view.maps.sum((2, 3))  # (batch, heads)
    if side == "key":
        if has_prefix:  # the attention from one of the tokens
            patch_row = replace(patch_row, prefix=float(view.prefix.mean(-1).mean()))
        return replace(patch_row, received=float(over_patches.mean()))
    on_prefix = view.prefix.sum(-1)  # (batch, heads)
    if has_prefix:
        patch_row = replace(patch_row, prefix=float(on_prefix.mean()))
    if view.site.windows is None:
        return patch_row
    # the weights of a query sum to 1: what is left is on places without a patch
    padding = float((1 - over_patches - on_prefix).mean())
    return replace(patch_row, padding=max(0.0, padding))


class _Patch(NamedTuple):
    row: int
    column: int


def measure_windows(model: Model, images: Images) -> dict[str, Any]:
    """Return the windows of each layer, and the receptive field, as fields of the record.

    Returns nothing for other models.
    """
    layers = _window_layers(model, images)
    if not layers:
        return {}
    rows = []
    part_by_layer = {}
    reach_by_layer = {}
    mask_by_layer = {}
    for index, layer in enumerate(layers):
        size = layer.windows.resolution  # (rows, columns)
        patch = _middle_patch(size)
        # the layers of this stage up to this one
        stage = [earlier for earlier in layers[: index + 1] if earlier.windows.resolution == size]
        patch_number = torch.tensor([patch.row * size[1] + patch.column])  # row by row
        reach = reachable_patches(stage, patch_number)[0]
        part_by_layer[index] = layer.part.numpy()
        reach_by_layer[index] = reach.view(size).numpy()
        mask_by_layer[index] = layer.allowed[-1].numpy()  # of the last window
        rows.append(_window_row(layer, patch))
    # the keys are the alias of a model, and its name in words: here the same
    fields, field_maps = field_rows({(model.alias, model.alias): receptive_field(model, images)})
    return {
        "windows": tuple(rows),
        "window_maps": WindowArrays(part_by_layer, reach_by_layer, mask_by_layer),
        "receptive_fields": fields,
        "field_maps": field_maps,
    }


def _window_layers(model: Model, images: Images) -> tuple[WindowLayer, ...]:
    """Return the layers whose windows have a place in the image, none for other models."""
    if model.anatomy.family != "windowed":
        return ()
    try:
        return window_layers(model, images)
    except UnsupportedError:  # windows without a known place in the image
        return ()


def _window_row(layer: WindowLayer, patch: _Patch) -> WindowRow:
    return WindowRow(
        layer=layer.site.layer,
        map=layer.windows.resolution,
        window=layer.windows.window,
        shift=layer.shift,
        windows=layer.windows.count,
        padding=layer.padding,
        pairs=layer.pairs,
        reach=layer.reach,
        patch=(patch.row, patch.column),
        new=layer.new,
    )


def _middle_patch(size: tuple[int, int]) -> _Patch:
    """Return the patch above and to the left of the centre."""
    return _Patch(max(size[0] // 2 - 1, 0), max(size[1] // 2 - 1, 0))


def as_array(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor on any device, in any precision, as a float32 array."""
    return np.asarray(values.float().cpu().numpy())
