"""`vitlens attention`: where every head of every layer looks, on a few images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.analysis.attention.views import key_maps, query_maps
from vitlens.analysis.attention.weights import LayerMaps, attention_maps, distance_correlation, position_similarity
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.sheets import DRAWN, left_out_words, say_left_out
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.lens.observe import survey
from vitlens.lens.site import Site
from vitlens.models.model import Model
from vitlens.runs.attention_report import draw, tell
from vitlens.runs.attention_views import (
    as_array,
    find_layer,
    keep_key,
    keep_query,
    keep_training,
    kept_weights,
    over_training,
    require_head,
)
from vitlens.runs.report import publish
from vitlens.uncertainty import Estimate

__all__ = ["attention", "draw", "tell"]  # draw and tell: `vitlens report` asks the command's module for them

SHOWN = 4  # images of --data, unless --limit says otherwise


def attention(
    model: str,
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    layer: int | None = None,
    query: tuple[int, int] | None = None,
    key: tuple[int, int] | None = None,
    head: tuple[int, int] | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Draw the attention of a model on images, by layer and head, and write the report; returns the report's path.

    All from 0. layer: whose heads are drawn large (default: the last); query, key: (row, column) of a patch that looks,
    or is looked at, layer by layer; head: (layer, head) to follow over the training of a run that kept its weights,
    whose number the views of a patch show too. Raises InputError for what is not there.
    """
    kept = () if head is None else kept_weights(model, needed=query is None and key is None)
    (loaded,) = load_models((model,), command="attention", model_options=model_options, options=options)
    found = load_split(loaded, options=replace(options, limit=None), data=data, images=images)
    split = _few(found, options, given=bool(images))
    say_left_out(len(split), len(found), quiet=options.quiet, more="--limit N draws more")
    (batch,) = split.batches(len(split), device=loaded.device)
    with autocast(loaded.device, options.precision):
        layers = attention_maps(loaded, batch.images)
        if layer is not None:
            find_layer(layers, layer, option="--layer")
        if head is not None:
            require_head(layers, head)
        looks = () if query is None else query_maps(loaded, batch.images, query=query)
        seen = () if key is None else key_maps(loaded, batch.images, key=key)
        grown = () if head is None else over_training(kept, head, batch.images, model_options=model_options)
    choices = {"layer": layer, "query": query, "key": key, "head": head, "kept": len(kept)}
    folder = RunFolder.create(
        "attention",
        name_parts=(loaded.alias, split.name),
        title=f"Attention of {loaded.alias} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=_config(loaded, split, options, choices),
        formats=options.formats,
    )
    with folder:
        _keep(folder, loaded, split, layers)
        without = _without_map(survey(loaded, batch.images), layers)
        if without:
            folder.table("without_map", without)
        keep_query(folder, looks, head=head)
        keep_key(folder, seen, head=head)
        keep_training(folder, grown)
        return publish(folder, draw, tell)


def _few(split: Split, options: RunOptions, *, given: bool) -> Split:
    """The images that are drawn: as many as --limit says, else the first DRAWN given, or a few of a data set."""
    if options.limit is None and given:
        few = split.pick(torch.arange(min(DRAWN, len(split))))
    else:
        few = split.limit(options.limit or SHOWN, seed=options.seed)
    return replace(few, notes=(*split.notes, *left_out_words(len(few), len(split))))


def _config(model: Model, split: Split, options: RunOptions, choices: Mapping[str, object]) -> dict[str, object]:
    layout = model.anatomy.layout
    config = described(options, models=(model,), split=split, choices=choices)
    config["readout"] = model.anatomy.readout
    config["layout"] = None if layout is None else {
        "grid": list(layout.grid), "prefix": list(layout.prefix), "patch_size": list(layout.patch_size),
    }  # fmt: skip
    return config


def _keep(folder: RunFolder, model: Model, split: Split, layers: Sequence[LayerMaps]) -> None:
    """The table of layers, and the maps that the figures are drawn from."""
    folder.table("layers", [_row(layer) for layer in layers])
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    folder.table("images", [{"image": file} for file in files])
    maps = {f"layer{index}": as_array(layer.maps) for index, layer in enumerate(layers)}
    folder.arrays("attention", images=split.source.read(torch.arange(len(split))).numpy(), **maps)
    similarity = position_similarity(model)
    if similarity is not None:
        folder.arrays("positions", similarity=as_array(similarity))
        found = distance_correlation(similarity, model.layout)
        if found is not None:
            # no interval: pairs of positions are not independent
            measured = Estimate(found, n=model.layout.patches, unit="")
            folder.metric(f"positions/{model.alias}/distance_correlation", measured)


def _without_map(sites: Sequence[Site], layers: Sequence[LayerMaps]) -> list[dict[str, object]]:
    """The layers whose attention has no place in the image."""
    shown = {layer.site.layer for layer in layers}
    without = {site.layer: site for site in sites if site.layer not in shown}
    return [{"layer": site.layer, "module": site.module, "kind": site.kind} for site in without.values()]


def _row(layer: LayerMaps) -> dict[str, object]:
    site = layer.site
    return {
        "layer": site.layer,
        "module": site.module,
        "kind": site.kind,
        "heads": site.heads,
        "queries": site.queries,
        "keys": site.keys,
        "map": "x".join(str(side) for side in layer.maps.shape[-2:]),
        "reading": layer.reading,
        "prefix_mass": float(layer.prefix.mean()),
    }
