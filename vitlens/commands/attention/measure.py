"""Attention maps of every head of every layer on a few images, and the optional views."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.views import PatchView, key_maps, query_maps
from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.commands.attention.checks import write_checks
from vitlens.commands.attention.development import write_development
from vitlens.commands.attention.matrix import head_matrix, write_matrix
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.positions import write_positions
from vitlens.commands.attention.record import (
    CHECKPOINT_COUNT,
    IMAGES,
    KEY,
    KEY_MAPS,
    LAYERS,
    MAPS,
    QUERY,
    QUERY_MAPS,
    TRAINING,
    TRAINING_MAPS,
    WITHOUT_MAP,
    AttentionArrays,
    AttentionImageRow,
    CheckpointCountRow,
    CheckpointMapArrays,
    CheckpointMapRow,
    KeyRow,
    LayerRow,
    QueryRow,
    UnplacedLayerRow,
    ViewArrays,
)
from vitlens.commands.attention.windows import write_windows
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.explorer.measure import write_explorer
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.mixed_heads import MIXED_HEADS, MixedHeadsRow
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.sheets import DRAWN, left_out_words, print_left_out
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.mixing import talking_heads
from vitlens.lens.observe import survey_weights
from vitlens.lens.site import NO_PLACE, Site
from vitlens.models.loading import load
from vitlens.models.naming import parse_model
from vitlens.shapes import Images, Maps
from vitlens.training.checkpoint import KeptWeights, weights_over_training

CHECKPOINTS: Final = 6  # kept weights in the figure of a head over training, at most
SHOWN: Final = 4  # images of --data, unless --limit says otherwise
Head = tuple[int, int]


@dataclass(frozen=True)
class HeadOverTraining:
    """One head with the weights of one checkpoint: its map of each image, and the fraction on the prefix."""

    kept: KeptWeights
    maps: Maps
    prefix: Float[Tensor, " batch"]


def measure(options: AttentionOptions) -> Path:
    """Draw the attention of a model on images, by layer and head, and write the report; returns the report's path.

    Raises InputError for a layer, head or patch that is not there.
    """
    run, head = options.run, options.head
    needed = options.query is None and options.key is None
    weights = () if head is None else kept_weights(options.model, needed=needed)
    (model,) = load_models((options.model,), command="attention", model_options=options.model_options, options=run)
    all_images = load_split(model, options=replace(run, limit=None), data=options.data, images=options.images)
    split = _drawn_images(all_images, run, named=bool(options.images))
    print_left_out(len(split), len(all_images), quiet=run.quiet, more="--limit N draws more")
    (batch,) = split.batches(len(split), device=model.device)
    with autocast(model.device, run.precision):
        layers = attention_maps(model, batch.images)
        if options.layer is not None:
            require_layer(layers, options.layer, option="--layer")
        if head is not None:
            require_head(layers, head)
        queries = () if options.query is None else query_maps(model, batch.images, query=options.query)
        keys = () if options.key is None else key_maps(model, batch.images, key=options.key)
        matrix = head_matrix(model, batch.images, options.matrix)
        checkpoints = (
            () if head is None else head_over_training(weights, head, batch.images, model_options=options.model_options)
        )
    with RunFolder.create(
        "attention",
        name_parts=(model.alias, split.name),
        title=f"Attention of {model.alias} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        _write_layers(folder, split, layers, survey_weights(model, batch.images))
        write_checks(folder, split, layers)
        write_development(folder, model, batch.images, split, layers)
        write_explorer(folder, model, batch.images[:DRAWN])
        write_windows(folder, model, batch.images)
        write_positions(folder, model, split)
        _write_query(folder, queries, head)
        _write_key(folder, keys, head)
        _write_training(folder, checkpoints, len(weights))
        write_matrix(folder, matrix)
        folder.write(MIXED_HEADS, [MixedHeadsRow(name) for name in talking_heads(model, batch.images)])
        return publish(folder)


def _drawn_images(split: Split, options: RunOptions, *, named: bool) -> Split:
    """The images that are drawn: as many as --limit says, else the first DRAWN of --images, or SHOWN of a data set."""
    if options.limit is None and named:
        drawn = split.pick(torch.arange(min(DRAWN, len(split))))
    else:
        drawn = split.limit(options.limit or SHOWN, seed=options.seed)
    return replace(drawn, notes=(*split.notes, *left_out_words(len(drawn), len(split))))


def _write_layers(folder: RunFolder, split: Split, layers: Sequence[LayerMaps], sites: Sequence[Site]) -> None:
    """Write the maps of each layer, and the layers whose attention cannot be mapped to the image."""
    folder.write(LAYERS, [_layer_row(layer) for layer in layers])
    mapped = {layer.site.layer for layer in layers}
    without = {site.layer: site for site in sites if site.layer not in mapped}
    folder.write(
        WITHOUT_MAP,
        [UnplacedLayerRow(site.layer, site.module, site.kind, NO_PLACE[site.kind]) for site in without.values()],
    )
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    folder.write(IMAGES, [AttentionImageRow(file) for file in files])
    pixels = split.source.read(torch.arange(len(split))).numpy()
    maps = {index: as_array(layer.maps) for index, layer in enumerate(layers)}
    folder.save(MAPS, AttentionArrays(pixels, maps))


def _layer_row(layer: LayerMaps) -> LayerRow:
    site = layer.site
    size = "x".join(str(side) for side in layer.maps.shape[-2:])
    shape = (site.heads, site.queries, site.keys)
    return LayerRow(site.layer, site.module, site.kind, *shape, size, layer.reading, float(layer.prefix.mean()))


def _write_query(folder: RunFolder, views: Sequence[PatchView], head: Head | None) -> None:
    rows = []
    for view in views:
        prefix = view.prefix.sum(-1)
        on_prefix = of_head = padding = None
        if view.prefix.shape[-1]:
            on_prefix = float(prefix.mean())
            of_head = _mean_of_head(prefix, view, head)
        if view.site.windows is not None:
            padding = max(0.0, float((1 - view.maps.sum((2, 3)) - prefix).mean()))
        rows.append(QueryRow(*_place(view), on_prefix, of_head, padding))
    folder.write(QUERY, rows)
    if views:
        folder.save(QUERY_MAPS, _view_arrays(views, head))


def _write_key(folder: RunFolder, views: Sequence[PatchView], head: Head | None) -> None:
    rows = []
    for view in views:
        received = view.maps.sum((2, 3))
        of_head = _mean_of_head(received, view, head)
        from_prefix = float(view.prefix.mean()) if view.prefix.shape[-1] else None
        rows.append(KeyRow(*_place(view), float(received.mean()), of_head, from_prefix))
    folder.write(KEY, rows)
    if views:
        folder.save(KEY_MAPS, _view_arrays(views, head))


def _place(view: PatchView) -> tuple[int, int, int, str, float]:
    """Layer, row, column, grid, and the attention of the patch to itself."""
    row, column = view.patch
    grid = "x".join(str(side) for side in view.maps.shape[-2:])
    return view.site.layer, row, column, grid, float(view.maps[:, :, row, column].mean())


def _mean_of_head(values: Tensor, view: PatchView, head: Head | None) -> float | None:
    """The mean over images of one head's values (images, heads), or None where the layer has no such head."""
    return None if head is None or head[1] >= view.site.heads else float(values[:, head[1]].mean())


def _view_arrays(views: Sequence[PatchView], head: Head | None) -> ViewArrays:
    """Each layer's mean over heads, and the chosen head in the layers that have it."""
    means = {index: as_array(view.maps.mean(1)) for index, view in enumerate(views)}
    chosen = {
        index: as_array(view.maps[:, head[1]])
        for index, view in enumerate(views)
        if head is not None and head[1] < view.site.heads
    }
    return ViewArrays(means, chosen)


def _write_training(folder: RunFolder, checkpoints: Sequence[HeadOverTraining], kept: int) -> None:
    """Write the head's maps by epoch, and the fraction of its attention on prefix tokens."""
    folder.write(CHECKPOINT_COUNT, [CheckpointCountRow(kept)] if checkpoints else [])
    folder.write(
        TRAINING,
        [
            CheckpointMapRow(checkpoint.kept.epochs, checkpoint.kept.file.name, float(checkpoint.prefix.mean()))
            for checkpoint in checkpoints
        ],
    )
    if checkpoints:
        folder.save(
            TRAINING_MAPS, CheckpointMapArrays(np.stack([as_array(checkpoint.maps) for checkpoint in checkpoints], 1))
        )


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


def head_over_training(
    checkpoints: Sequence[KeptWeights], head: Head, images: Images, *, model_options: ModelOptions
) -> tuple[HeadOverTraining, ...]:
    """The head with all kept weights, or at most CHECKPOINTS of them, evenly spaced and with the first and last."""
    chosen = np.linspace(0, len(checkpoints) - 1, min(len(checkpoints), CHECKPOINTS)).round().astype(int)
    of_head = []
    for weights in (checkpoints[index] for index in chosen):
        model = load(
            f"epoch-{weights.epochs}={weights.file}",
            image_size=model_options.image_size,
            mean=model_options.mean,
            std=model_options.std,
            device=images.device,
        )
        layer = require_head(attention_maps(model, images), head)
        of_head.append(HeadOverTraining(weights, layer.maps[:, head[1]], layer.prefix[:, head[1]]))
    return tuple(of_head)


def as_array(values: Tensor) -> NDArray[np.float32]:
    """A tensor on any device, in any precision, as the float32 array that is stored."""
    return np.asarray(values.float().cpu().numpy())
