"""The views of `vitlens attention`: of one patch, of one head over training or in full, and of windows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.views import PatchView, key_maps, query_maps
from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.analysis.attention.windows import WindowLayer, reached, window_layers
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import (
    CheckpointArrays,
    CheckpointRow,
    MatrixArrays,
    MatrixRow,
    PatchRow,
    ViewArrays,
    WindowArrays,
    WindowRow,
)
from vitlens.commands.scaffold.options import ModelOptions
from vitlens.commands.scaffold.receptive.measure import field_rows
from vitlens.commands.scaffold.receptive.record import FieldArrays, FieldRow
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.layers import layer_of
from vitlens.lens.places.capture import capture
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import parse_model
from vitlens.shapes import Images
from vitlens.training.checkpoint import KeptWeights, weights_over_training

CHECKPOINTS: Final = 6  # kept weights in the figure of a head over training, at most
Head = tuple[int, int]


def query_view(model: Model, images: Images, options: AttentionOptions) -> tuple[Sequence[PatchView], list[PatchRow]]:
    """The attention of --query in every layer. Raises InputError for a patch that is not there."""
    views = () if options.query is None else query_maps(model, images, query=options.query)
    rows = []
    for view in views:
        prefix, received = view.prefix.sum(-1), view.maps.sum((2, 3))
        row = _patch_row(view)
        if view.prefix.shape[-1]:
            row = replace(row, prefix=float(prefix.mean()), head_prefix=_of_head(prefix, options.head))
        if view.site.windows is not None:
            row = replace(row, padding=max(0.0, float((1 - received - prefix).mean())))
        rows.append(row)
    return views, rows


def key_view(model: Model, images: Images, options: AttentionOptions) -> tuple[Sequence[PatchView], list[PatchRow]]:
    """The attention to --key in every layer. Raises InputError for a patch that is not there."""
    views = () if options.key is None else key_maps(model, images, key=options.key)
    rows = []
    for view in views:
        received = view.maps.sum((2, 3))
        row = replace(_patch_row(view), received=float(received.mean()), head_received=_of_head(received, options.head))
        rows.append(replace(row, prefix=float(view.prefix.mean())) if view.prefix.shape[-1] else row)
    return views, rows


def _patch_row(view: PatchView) -> PatchRow:
    row, column = view.patch
    grid = (view.maps.shape[-2], view.maps.shape[-1])
    return PatchRow(view.site.layer, row, column, grid, float(view.maps[:, :, row, column].mean()))


def _of_head(values: Tensor, head: Head | None) -> float | None:
    """The mean over images of one head's values (images, heads), or None where the layer has no such head."""
    return None if head is None or head[1] >= values.shape[1] else float(values[:, head[1]].mean())


def view_arrays(views: Sequence[PatchView], head: Head | None) -> ViewArrays:
    """Each layer's mean over heads, and the chosen head in the layers that have it."""
    chosen = {
        index: view.maps[:, head[1]].float().cpu().numpy()
        for index, view in enumerate(views)
        if head is not None and head[1] < view.site.heads
    }
    return ViewArrays({index: view.maps.mean(1).float().cpu().numpy() for index, view in enumerate(views)}, chosen)


def kept_weights(model: str, *, needed: bool) -> tuple[KeptWeights, ...]:
    """The weights that the model's run kept, and its final ones. Raises InputError for none where they are needed."""
    folder = Path(parse_model(model).name)
    checkpoints = weights_over_training(folder) if folder.is_dir() else ()
    if needed and not checkpoints:
        raise InputError(
            f"expected a run that kept its weights for --head, found none kept in {model}; "
            "train one with vitlens train PRESET --keep-every N, or add --query or --key"
        )
    return checkpoints


def require_layer(layers: Sequence[LayerMaps], number: int, *, option: str) -> LayerMaps:
    """The layer of that number. Raises InputError where it does not exist or has no map."""
    known = [layer.site.layer for layer in layers]
    if number not in known:
        whole = known == list(range(len(known)))
        words = f"from 0 to {known[-1]}" if whole else f"one of {', '.join(map(str, dict.fromkeys(known)))}"
        raise InputError(f"expected {option} with a layer {words}, found {number}")
    return layers[known.index(number)]


def require_head(layers: Sequence[LayerMaps], head: Head) -> LayerMaps:
    """The layer of that head. Raises InputError where the layer or the head does not exist."""
    layer = require_layer(layers, head[0], option="--head LAYER,HEAD")
    if not 0 <= head[1] < layer.site.heads:
        raise InputError(
            f"expected --head LAYER,HEAD with a head from 0 to {layer.site.heads - 1} in layer {head[0]}, "
            f"found {head[1]}"
        )
    return layer


def checkpoint_views(
    checkpoints: Sequence[KeptWeights], head: Head | None, images: Images, given: ModelOptions
) -> tuple[tuple[CheckpointRow, ...], CheckpointArrays | None]:
    """The head with all kept weights, or at most CHECKPOINTS of them, evenly spaced and with the first and last."""
    if head is None or not checkpoints:
        return (), None
    chosen = np.linspace(0, len(checkpoints) - 1, min(len(checkpoints), CHECKPOINTS)).round().astype(int)
    rows, maps = [], []
    for weights in (checkpoints[index] for index in chosen):
        model = load(
            f"epoch-{weights.epochs}={weights.file}",
            image_size=given.image_size,
            mean=given.mean,
            std=given.std,
            device=images.device,
        )
        layer = require_head(attention_maps(model, images), head)
        on_prefix = float(layer.prefix[:, head[1]].mean())
        rows.append(CheckpointRow(weights.epochs, weights.file.name, on_prefix, len(checkpoints)))
        maps.append(layer.maps[:, head[1]].float().cpu().numpy())
    return tuple(rows), CheckpointArrays(np.stack(maps, 1))


def head_matrix(model: Model, images: Images, head: Head | None) -> tuple[tuple[MatrixRow, ...], MatrixArrays | None]:
    """Scores and weights of a head (layer, head) on the first image; nothing where no head is given.

    Raises InputError for a layer or head that is not there, UnsupportedError for a layer in which not every token
    attends to every token.
    """
    if head is None:
        return (), None
    layer, number = layer_of(model, head[0]), head[1]
    if not 0 <= number < layer.heads:
        raise InputError(
            f"expected --matrix LAYER,HEAD with a head from 0 to {layer.heads - 1} in layer {layer.index}, found "
            f"{number}"
        )
    name, layout = f"blocks.{layer.index}.attention", model.anatomy.layout
    if layer.windows != 1 or layer.queries != layer.keys or f"{name}.scores" not in model.places().names:
        raise UnsupportedError(
            f"expected --matrix with a layer in which every token attends to every token, found layer {layer.index} of "
            f"{model.alias} with {layer.queries} queries, {layer.keys} keys and {layer.windows} windows; try --query"
        )
    captured = capture(model, images[:1], [f"{name}.scores", f"{name}.weights"])
    scores, weights = (captured[f"{name}.{stage}"][0, number].float().cpu() for stage in ("scores", "weights"))
    received = weights.mean(0)
    prefix = layout.prefix if layout is not None and layout.tokens == len(weights) else ()
    row = MatrixRow(
        layer.index, number, len(weights), prefix, float(weights.diagonal().mean()), int(received.argmax()),
        float(received.max()), float(scores[scores.isfinite()].std()),
    )  # fmt: skip
    return (row,), MatrixArrays(scores.numpy(), weights.numpy())


def windows(
    model: Model, images: Images
) -> tuple[tuple[WindowRow, ...], WindowArrays | None, tuple[FieldRow, ...], FieldArrays | None]:
    """The windows of each layer that has some, and the receptive field; nothing for other models."""
    try:
        layers = window_layers(model, images) if model.anatomy.family == "windowed" else ()
    except UnsupportedError:  # windows whose place in the image is not known
        layers = ()
    if not layers:
        return (), None, (), None
    shown = [_middle(layer) for layer in layers]
    maps = WindowArrays(
        part=dict(enumerate(layer.part.numpy() for layer in layers)),
        reach={index: _reached(layers[: index + 1], patch).numpy() for index, patch in enumerate(shown)},
        mask=dict(enumerate(layer.allowed[-1].numpy() for layer in layers)),
    )
    fields = {(model.alias, model.alias): receptive_field(model, images)}
    return tuple(_window_rows(layers, shown)), maps, *field_rows(fields)


def _middle(layer: WindowLayer) -> tuple[int, int]:
    """The patch above and to the left of the centre of the map.

    It is a corner of its window where the number of windows along a side is even.
    """
    rows, columns = layer.windows.resolution
    return max(rows // 2 - 1, 0), max(columns // 2 - 1, 0)


def _reached(layers: Sequence[WindowLayer], patch: tuple[int, int]) -> Tensor:
    """The patches (rows, columns) that one patch depends on after the last layer, through those on the same map."""
    size = layers[-1].windows.resolution
    first = next(index for index in range(len(layers)) if all(one.windows.resolution == size for one in layers[index:]))
    return reached(layers[first:], torch.tensor([patch[0] * size[1] + patch[1]]))[0].view(size)


def _window_rows(layers: Sequence[WindowLayer], shown: Sequence[tuple[int, int]]) -> Iterator[WindowRow]:
    for layer, patch in zip(layers, shown):
        own = layer.windows
        yield WindowRow(
            layer.site.layer, own.resolution, own.window, layer.shift, own.count, len(layer.part.unique()),
            layer.padding, layer.pairs, layer.reach, patch, layer.new,
        )  # fmt: skip
