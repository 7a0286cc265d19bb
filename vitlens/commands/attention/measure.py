"""Attention maps of every head of every layer on a few images, and what they have in common."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.map_checks import alike, similarity
from vitlens.analysis.attention.positions import distance_correlation, position_similarity, rank_correlation
from vitlens.analysis.attention.rollout import rollout_by_layer
from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import (
    AttentionArrays,
    AttentionRecord,
    DevelopmentArrays,
    ImageRow,
    LayerRow,
    LayoutRow,
    PositionArrays,
    UnplacedRow,
)
from vitlens.commands.attention.views import (
    checkpoint_views,
    head_matrix,
    kept_weights,
    key_view,
    query_view,
    require_head,
    require_layer,
    view_arrays,
    windows,
)
from vitlens.commands.scaffold.explorer.measure import explored
from vitlens.commands.scaffold.load import load_split
from vitlens.commands.scaffold.maps.measured import information_row, on_object_rows
from vitlens.commands.scaffold.maps.on_object import ATTENTION, HEAD, ROLLOUT, OnObjectRow
from vitlens.commands.scaffold.mixed_heads import MixedHeadsRow
from vitlens.commands.scaffold.run import Run
from vitlens.commands.scaffold.sheets import DRAWN, left_out_words, print_left_out
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.lens.mixing import talking_heads
from vitlens.lens.observe import survey_weights
from vitlens.lens.site import NO_PLACE
from vitlens.models.model import Model
from vitlens.shapes import Images, Maps
from vitlens.uncertainty import Estimate, student_mean

SHOWN: Final = 4  # images of --data, unless --limit says otherwise


def measure(options: AttentionOptions) -> Path | None:
    """Draw the attention of a model on images, by layer and head, and write the report; returns the report's path.

    Raises InputError for a layer, head or patch that is not there.
    """
    head, needed = options.head, options.query is None and options.key is None
    weights = () if head is None else kept_weights(options.model, needed=needed)
    run = Run("attention", options, images=False)
    model, given = run.model, replace(run.run, limit=None)
    every = load_split(model, options=given, data=options.data, images=options.images)
    split = _drawn_images(every, options)
    run.splits = (split,)
    print_left_out(len(split), len(every), quiet=run.run.quiet, more="--limit N draws more")
    (batch,) = split.batches(len(split), device=model.device)
    with autocast(model.device, run.run.precision):
        layers = attention_maps(model, batch.images)
        if options.layer is not None:
            require_layer(layers, options.layer, option="--layer")
        if head is not None:
            require_head(layers, head)
        views, query = query_view(model, batch.images, options)
        key_views, key = key_view(model, batch.images, options)
        matrix, matrices = head_matrix(model, batch.images, options.matrix)
        training, checkpoints = checkpoint_views(weights, head, batch.images, options.model_options)
    with run.folder("Attention of") as folder:

        def record() -> AttentionRecord:
            rollouts = _rollouts(model, batch.images, layers)
            explorer, explorer_arrays = explored(model, batch.images[:DRAWN])
            layout, positions = _layout(model, split)
            in_windows, window_maps, fields, field_maps = windows(model, batch.images)
            files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
            pixels = split.source.read(torch.arange(len(split))).numpy()
            mapped = {layer.site.layer for layer in layers}
            without = {s.layer: s for s in survey_weights(model, batch.images) if s.layer not in mapped}
            return AttentionRecord(
                layers=tuple(_layer_rows(model, split, layers)),
                without_map=tuple(UnplacedRow(s.layer, s.module, s.kind, NO_PLACE[s.kind]) for s in without.values()),
                shown=tuple(map(ImageRow, files)),
                on_object=tuple(_on_object(model, split, layers, rollouts)),
                layout=layout,
                query=tuple(query),
                key=tuple(key),
                training=training,
                matrix=matrix,
                mixed_heads=tuple(map(MixedHeadsRow, talking_heads(model, batch.images))),
                windows=in_windows,
                receptive_fields=fields,
                explorer=(explorer,),
                maps=AttentionArrays(pixels, {index: as_array(layer.maps) for index, layer in enumerate(layers)}),
                development=None if rollouts is None else DevelopmentArrays(np.asarray(rollouts)),
                positions=positions,
                views={name: view_arrays(own, head) for name, own in (("query", views), ("key", key_views)) if own},
                checkpoints=checkpoints,
                head_matrix=matrices,
                window_maps=window_maps,
                field_maps=field_maps,
                explorer_arrays={} if explorer_arrays is None else {model.alias: explorer_arrays},
            )

        return folder.publish(record)


def _drawn_images(split: Split, options: AttentionOptions) -> Split:
    """The images that are drawn: as many as --limit says, else the first DRAWN of --images, or SHOWN of a data set."""
    if options.run.limit is None and options.images:
        drawn = split.pick(torch.arange(min(DRAWN, len(split))))
    else:
        drawn = split.limit(options.run.limit or SHOWN, seed=options.run.seed)
    return replace(drawn, notes=(*split.notes, *left_out_words(len(drawn), len(split))))


def _layer_rows(model: Model, split: Split, layers: Sequence[LayerMaps]) -> Iterator[LayerRow]:
    """Every layer, with what its maps tell, how alike they are, and the pointing game of their mean."""
    groups: NDArray[Any] | None = None if split.groups is None else split.groups.numpy()
    means = [layer.maps.float().cpu().mean(1) for layer in layers]
    named = [(str(layer.site.layer), own) for layer, own in zip(layers, means)]
    pointing: Sequence[OnObjectRow] = (
        ()
        if split.masks is None
        else on_object_rows(
            model.alias, named, "pointing", split.masks.cpu(), groups=split.groups, sources=sources(split)
        )
    )
    for index, layer in enumerate(layers):
        site, told = layer.site, information_row(*named[index], groups)
        previous: Estimate | None = None
        if index and layers[index - 1].maps.shape[-2:] == layer.maps.shape[-2:]:
            previous = student_mean(similarity(means[index], means[index - 1]).numpy(), groups=groups, unit="")
        hit = pointing[index] if pointing else None
        yield LayerRow(
            model.alias, site.layer, site.module, site.kind, site.heads, site.queries, site.keys,
            (layer.maps.shape[-2], layer.maps.shape[-1]),
            layer.reading,
            float(layer.prefix.mean()),
            told.information,
            student_mean(alike(layer.maps.float().cpu()).numpy(), groups=groups, unit=""),
            told.by_place,
            previous,
            *((hit.estimate, hit.baseline, hit.of_baseline, hit.difference) if hit else ()),
        )  # fmt: skip


def _rollouts(model: Model, images: Images, layers: Sequence[LayerMaps]) -> Tensor | None:
    """The rollout up to each layer, on the CPU; None where not all layers are those of whole sequences."""
    whole = [layer for layer in layers if layer.site.kind in ("patch", "class")]
    if model.anatomy.layout is None or model.supports("rollout") is not None or len(whole) < len(layers):
        return None
    return rollout_by_layer(model, images).float().cpu()


def _on_object(
    model: Model, split: Split, layers: Sequence[LayerMaps], rollouts: Tensor | None
) -> Iterator[OnObjectRow]:
    """The share of each map on the object, where masks are known: of layers, of the rollout up to them, of heads."""
    if split.masks is None:
        return
    maps: dict[tuple[str, int, int | None], Maps] = {}
    for layer in layers:
        heads = layer.maps.float().cpu()
        maps[ATTENTION, layer.site.layer, None] = heads.mean(1)
        maps |= {(HEAD, layer.site.layer, head): own for head, own in enumerate(heads.transpose(0, 1))}
    if rollouts is not None:
        maps |= {(ROLLOUT, layer.site.layer, None): rollouts[:, layer.site.layer] for layer in layers}
    named = [(kind, own) for (kind, _, _), own in maps.items()]
    rows = on_object_rows(model.alias, named, "mass", split.masks.cpu(), groups=split.groups, sources=sources(split))
    for (_, layer_number, head), row in zip(maps, rows):
        yield replace(row, layer=layer_number, head=head)


def _layout(model: Model, split: Split) -> tuple[tuple[LayoutRow, ...], PositionArrays | None]:
    """The layout of the patches, and the similarity of their position embeddings."""
    layout = model.anatomy.layout
    if layout is None:
        return (), None
    row = LayoutRow(model.alias, layout.grid, layout.prefix, layout.patch_size, (split.size[0], split.size[1]))
    embeddings = position_similarity(model)
    if embeddings is None:
        return (row,), None
    distance = distance_correlation(embeddings, layout)
    ranks = {
        pairs: Estimate(value, n=layout.patches, unit="")  # no interval: pairs of positions are not independent
        for pairs, value in rank_correlation(embeddings, layout)._asdict().items()
        if value is not None
    }
    known = None if distance is None else Estimate(distance, n=layout.patches, unit="")
    return (replace(row, distance=known, ranks=ranks),), PositionArrays(embeddings.float().cpu().numpy())


def as_array(values: Tensor) -> NDArray[np.float32]:
    """A tensor on any device, in any precision, as the float32 array that is stored."""
    return np.asarray(values.float().cpu().numpy())
