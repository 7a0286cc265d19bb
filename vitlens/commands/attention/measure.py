"""Attention maps of every head of every layer on a few images, their common properties, and views
of one patch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.chain import require_chain
from vitlens.analysis.attention.map_checks import alike, map_bits
from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.attention.positions import (
    distance_correlation,
    position_similarity,
    rank_correlation,
)
from vitlens.analysis.attention.tokens import rollout_by_layer
from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.commands.attention import record as rows
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.selection import (
    choose_images,
    contents_of,
    read_earlier,
    require_layers,
    with_images_of,
)
from vitlens.commands.attention.views import as_array, measure_views, measure_windows
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.kept import kept_weights, models_over_training, spaced
from vitlens.commands.shared.maps.measure import map_rows, on_object_rows
from vitlens.commands.shared.maps.record import (
    ATTENTION,
    HEAD,
    ROLLOUT,
    MixedHeadsRow,
    OnObjectRow,
    mass_of,
)
from vitlens.commands.shared.sheets import DRAWN, EACH
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.observe import survey_weights
from vitlens.lens.one_softmax import talking_heads
from vitlens.lens.site import NO_PLACE
from vitlens.models.model import Model
from vitlens.shapes import Images, Maps
from vitlens.training.checkpoint import KeptWeights
from vitlens.uncertainty import Estimate, student_mean

CHECKPOINTS: Final = 8  # most columns of the sheet over a training


def measure(options: AttentionOptions) -> Path | None:
    """Draw the attention of a model on images, by layer and head, and write the report.

    Returns the report's path. Raises InputError for a layer, head, patch or image that does not
    exist.
    """
    if options.same_as is not None and options.run.limit is not None:
        raise InputError("expected --same-as or --limit, found both; leave one out")
    checkpoints = kept_weights(options.model) if options.over_training else ()
    earlier = None
    if options.same_as is not None:
        earlier = read_earlier(options.same_as)
        if options.data is None and not options.images:
            options = with_images_of(earlier, options)
    run = Run("attention", options)
    model = run.model
    split = choose_images(run, earlier)
    run = run.with_images([split])
    (batch,) = split.batches(len(split), device=model.device)  # one batch has all images
    images = batch.images
    with phase("Attention of every layer"), autocast(model.device, run.run_options.precision):
        layers = attention_maps(model, images)
        require_layers(layers, options)
        views = measure_views(model, images, options)
    layers = tuple(replace(layer, maps=layer.maps.float().cpu()) for layer in layers)
    if checkpoints:
        views |= _over_training(checkpoints, model, images, split.groups)
    with run.folder("Attention of") as folder:
        return folder.publish(lambda: replace(_record(model, split, images, layers), **views))


@phase("Attention of the weights that were kept")
def _over_training(
    checkpoints: Sequence[KeptWeights], model: Model, images: Images, groups: Tensor | None
) -> dict[str, Any]:
    """Return the table and the maps of evenly spaced checkpoints, by their names in the record."""
    epochs = []
    maps = []
    for epoch, checkpoint in models_over_training(spaced(checkpoints, CHECKPOINTS), model.device):
        epochs.append(epoch)
        maps.append(_final_maps(checkpoint, images))
    group_array = None if groups is None else groups.numpy()
    mean = partial(student_mean, groups=group_array)
    map_name = "rollout" if require_chain.is_met(model) else "attention"
    last_maps = maps[-1]
    table = []
    for epoch, epoch_maps in zip(epochs, maps):
        # the cosine of centred values is Pearson's correlation
        correlation = F.cosine_similarity(_centred(epoch_maps), _centred(last_maps))
        row = rows.CheckpointRow(
            model.alias,
            epochs=epoch,
            map=map_name,
            information=mean(map_bits(epoch_maps).numpy(), unit="bits", least=0.0),
            final=mean(correlation.numpy(), unit="", least=-1.0, most=1.0),
        )
        table.append(row)
    drawn = torch.stack(maps, 1)[:EACH]  # (images, checkpoints, rows, columns)
    return {
        "over_training": tuple(table),
        "training_maps": rows.TrainingArrays(as_array(drawn)),
    }


def _centred(maps: Maps) -> Float[Tensor, "batch patches"]:
    """Return maps minus their mean: nearly uniform maps are alike in everything but this."""
    flat = maps.flatten(1)
    return flat - flat.mean(1, keepdim=True)


def _final_maps(model: Model, images: Images) -> Maps:
    """Return the rollout of each image, or the mean attention of the last layer without one."""
    if require_chain.is_met(model):
        return rollout(model, images).float().cpu()
    return attention_maps(model, images)[-1].maps.mean(1).float().cpu()


def _record(
    model: Model, split: Split, images: Images, layers: Sequence[LayerMaps]
) -> rows.AttentionRecord:
    by_image = _head_arrays(split, layers)
    arrays = rows.AttentionArrays(
        images=split.source.read(torch.arange(len(split))).numpy(),
        layer={index: as_array(layer.maps) for index, layer in enumerate(layers)},
    )
    rollouts = _rollouts(model, images, layers)
    if rollouts is not None:
        arrays = replace(arrays, rollout=as_array(rollouts))
    similarity = None
    if model.anatomy.layout is not None:
        similarity = position_similarity(model)  # None without position embeddings
    if similarity is not None:
        arrays = replace(arrays, similarity=as_array(similarity))
    on_object = tuple(_on_object(model, split, layers, rollouts))
    return rows.AttentionRecord(
        layers=tuple(_layer_rows(model, split, layers, on_object, by_image)),
        without_map=tuple(_layers_without_map(model, images, layers)),
        shown=tuple(map(rows.ImageRow, split.names, contents_of(split))),
        on_object=on_object,
        layout=tuple(_layout(model, similarity)),
        mixed_heads=tuple(map(MixedHeadsRow, talking_heads(model, images))),
        maps=arrays,
        by_image=by_image,
        **explored(model, images[:DRAWN]),
        **measure_windows(model, images),
    )


def _layers_without_map(
    model: Model, images: Images, layers: Sequence[LayerMaps]
) -> Iterator[rows.UnplacedRow]:
    """Yield the layers whose attention has no place in the image, each once, with the reason."""
    mapped = {layer.site.layer for layer in layers}
    unplaced = {}
    for site in survey_weights(model, images):
        if site.layer not in mapped:
            unplaced[site.layer] = rows.UnplacedRow(
                site.layer, site.module, site.kind, NO_PLACE[site.kind]
            )
    yield from unplaced.values()


def _head_arrays(split: Split, layers: Sequence[LayerMaps]) -> rows.HeadArrays:
    """Return the statistics of every head on every image, the heads of the first layer first."""
    information = []
    prefix_mass = []
    for layer in layers:
        # maps (images, heads, rows, columns), prefix (images, heads, prefix tokens)
        for head in range(layer.maps.shape[1]):
            information.append(as_array(map_bits(layer.maps[:, head])))
            prefix_mass.append(as_array(layer.prefix[:, head].sum(-1)))
    groups = None if split.groups is None else split.groups.numpy()
    return rows.HeadArrays(np.stack(information), np.stack(prefix_mass), groups)


class _HeadMeans(NamedTuple):
    """Means of one layer's heads over images, by head."""

    information: dict[str, Estimate]
    prefix_mass: dict[str, Estimate]


def _head_means(layers: Sequence[LayerMaps], by_image: rows.HeadArrays) -> Iterator[_HeadMeans]:
    """Yield the means of each layer's heads.

    by_image: the statistics of all heads, as `_head_arrays` returns them.
    """
    groups = by_image.groups
    start = 0  # the row of the layer's first head
    for layer in layers:
        heads = layer.maps.shape[1]
        means = _HeadMeans({}, {})
        for head in range(heads):
            bits = by_image.information[start + head]
            masses = by_image.prefix_mass[start + head]
            means.information[str(head)] = student_mean(bits, groups=groups, unit="bits", least=0.0)
            means.prefix_mass[str(head)] = student_mean(masses, groups=groups, least=0.0, most=1.0)
        start += heads
        yield means


def _layer_rows(
    model: Model,
    split: Split,
    layers: Sequence[LayerMaps],
    on_object: Sequence[OnObjectRow],
    by_image: rows.HeadArrays,
) -> Iterator[rows.LayerRow]:
    """Yield every layer with the properties of its maps: information, similarity, share on the
    object.
    """
    groups = None if split.groups is None else split.groups.numpy()
    cosine = partial(student_mean, groups=groups, unit="", least=-1.0, most=1.0)
    mean_maps = [layer.maps.mean(1) for layer in layers]
    names = [str(layer.site.layer) for layer in layers]
    checked = map_rows(model.alias, list(zip(names, mean_maps)), split)
    shares = {row.layer: row for row in mass_of(on_object, ATTENTION)}
    for index, (layer, map_row, heads) in enumerate(
        zip(layers, checked, _head_means(layers, by_image))
    ):
        site = layer.site
        previous = None
        if index > 0 and mean_maps[index - 1].shape == mean_maps[index].shape:
            pair = torch.stack(mean_maps[index - 1 : index + 1], 1)
            previous = cosine(alike(pair).numpy())
        head_prefix_mass = heads.prefix_mass if layer.prefix.shape[-1] else None
        row = rows.LayerRow(
            **vars(map_row),
            layer=site.layer,
            module=site.module,
            kind=site.kind,
            heads=site.heads,
            map=(layer.maps.shape[-2], layer.maps.shape[-1]),
            reading=layer.reading,
            prefix_mass=float(layer.prefix.sum(-1).mean()),
            alike=cosine(alike(layer.maps).numpy()),
            previous=previous,
            head_information=heads.information,
            head_prefix_mass=head_prefix_mass,
        )
        yield _with_share(row, shares.get(site.layer))


def _with_share(row: rows.LayerRow, share: OnObjectRow | None) -> rows.LayerRow:
    """Return the row with the share of its map on the object, if masks are known."""
    if share is None:
        return row
    return replace(
        row,
        share=share.estimate,
        share_of_baseline=share.of_baseline,
        share_difference=share.difference,
    )


@phase("Rollout up to each layer")
def _rollouts(model: Model, images: Images, layers: Sequence[LayerMaps]) -> Tensor | None:
    """Return the rollout up to each layer, on the CPU.

    Returns None unless all layers attend over the whole sequence.
    """
    reason_unsupported = model.supports("rollout")
    if model.anatomy.layout is None or reason_unsupported is not None:
        return None
    for layer in layers:
        if layer.site.kind not in ("patch", "class"):
            return None
    return rollout_by_layer(model, images).float().cpu()


class _MapKey(NamedTuple):
    """The maps of a layer, of the rollout up to it, or of one head."""

    kind: str
    layer: int
    head: int | None = None


def _on_object(
    model: Model, split: Split, layers: Sequence[LayerMaps], rollouts: Tensor | None
) -> Iterator[OnObjectRow]:
    """Yield the share of each map on the object, if masks are known: of layers, heads, and the
    rollout up to them.
    """
    if split.masks is None:
        return
    maps: dict[_MapKey, Maps] = {}
    for layer in layers:
        number = layer.site.layer
        maps[_MapKey(ATTENTION, number)] = layer.maps.mean(1)
        for head, head_maps in enumerate(layer.maps.transpose(0, 1)):
            maps[_MapKey(HEAD, number, head)] = head_maps
    if rollouts is not None:
        for position, layer in enumerate(layers):
            maps[_MapKey(ROLLOUT, layer.site.layer)] = rollouts[:, position]
    by_kind = [(key.kind, values) for key, values in maps.items()]
    masks = split.masks.cpu()
    measured = on_object_rows(
        model.alias, by_kind, "mass", masks, groups=split.groups, sources=sources(split)
    )
    for key, row in zip(maps, measured):
        yield replace(row, layer=key.layer, head=key.head)


def _layout(model: Model, similarity: Tensor | None) -> Iterator[rows.LayoutRow]:
    """Yield the layout of the patches, and how the similarity of position embeddings depends on
    their distance.

    The correlations have no intervals, because pairs of positions are not independent.
    """
    layout = model.anatomy.layout
    if layout is None:
        return
    row = rows.LayoutRow(
        model.alias,
        grid=layout.grid,
        prefix=layout.prefix,
        patch_size=layout.patch_size,
        image_size=model.preprocessing.size,
    )
    if similarity is None:
        yield row
        return
    distance = distance_correlation(similarity, layout)
    if distance is not None:
        row = replace(row, distance=Estimate(distance, n=layout.patches, unit=""))
    ranks: dict[str, Any] = {}
    for pairs, rank in rank_correlation(similarity, layout)._asdict().items():
        if rank is not None:
            ranks[pairs] = Estimate(rank, n=layout.patches, unit="")
    yield replace(row, ranks=ranks)
