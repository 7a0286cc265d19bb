"""Attention maps of every head of every layer on a few images, what they have in common, and the views asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.map_checks import alike, map_bits
from vitlens.analysis.attention.positions import distance_correlation, position_similarity, rank_correlation
from vitlens.analysis.attention.tokens import rollout_by_layer
from vitlens.analysis.attention.weights import (
    LayerMaps,
    Side,
    attention_maps,
    patch_views,
    reached,
    window_layers,
)
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.commands.attention import record as kept
from vitlens.commands.attention.options import ALL, AttentionOptions
from vitlens.commands.run.load import load_split
from vitlens.commands.run.progress import phase
from vitlens.commands.run.publish import read_folder
from vitlens.commands.run.run import Run
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.maps.measure import map_rows, on_object_rows
from vitlens.commands.shared.maps.record import ATTENTION, HEAD, ROLLOUT, MixedHeadsRow, OnObjectRow, mass_of
from vitlens.commands.shared.receptive import field_rows
from vitlens.commands.shared.sheets import DRAWN, left_out_words, print_left_out
from vitlens.data.identity import image_numbers, sources
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.observe import survey_weights, talking_heads
from vitlens.lens.site import NO_PLACE
from vitlens.models.model import Model
from vitlens.shapes import Images, Maps
from vitlens.uncertainty import Estimate, student_mean


def measure(options: AttentionOptions) -> Path | None:
    """Draw the attention of a model on images, by layer and head, and write the report; returns the report's path.

    Raises InputError for a layer, head, patch or image that is not there.
    """
    if options.same_as is not None and options.run.limit is not None:
        raise InputError("expected --same-as or --limit, found both; leave one out")
    earlier = None if options.same_as is None else _read_earlier(options.same_as)
    if earlier is not None and options.data is None and not options.images:
        options = _with_images_of(earlier, options)
    run = Run("attention", options, images=False)
    model = run.model
    given = replace(run.run, limit=None)
    every = load_split(model, options=given, data=options.data, images=options.images)
    if earlier is not None:
        split = _same_images(earlier, every, model)
    elif options.run.limit is None and options.images:
        split = every.pick(torch.arange(min(DRAWN, len(every))))
    else:
        split = every.limit(options.run.limit or DRAWN, seed=options.run.seed)
    split = replace(split, notes=(*every.notes, *left_out_words(len(split), len(every))))
    run.splits = (split,)
    print_left_out(len(split), len(every), quiet=run.run.quiet, more="--limit N measures and draws more")
    ((images, _, _),) = split.batches(len(split), device=model.device)
    with phase("Attention of every layer"), autocast(model.device, run.run.precision):
        layers = attention_maps(model, images)
        if options.layer is not None:
            _require_layer(layers, options.layer, "--layer")
        for number in () if options.layers == (ALL,) else options.layers:
            _require_layer(layers, int(number), "--layers")
        asked = _views(model, images, options)
    layers = tuple(replace(layer, maps=layer.maps.float().cpu()) for layer in layers)
    with run.folder("Attention of") as folder:

        def record() -> kept.AttentionRecord:
            rollouts = _rollouts(model, images, layers)
            similar = None if model.anatomy.layout is None else position_similarity(model)
            mapped = {layer.site.layer for layer in layers}
            without = {s.layer: s for s in survey_weights(model, images) if s.layer not in mapped}
            masses = tuple(_on_object(model, split, layers, rollouts))
            by_image = _head_arrays(split, layers)
            return kept.AttentionRecord(
                layers=tuple(_layer_rows(model, split, layers, masses, by_image)),
                without_map=tuple(
                    kept.UnplacedRow(s.layer, s.module, s.kind, NO_PLACE[s.kind]) for s in without.values()
                ),
                shown=tuple(map(kept.ImageRow, split.names, _contents_of(split))),
                on_object=masses,
                layout=tuple(_layout(model, similar)),
                mixed_heads=tuple(map(MixedHeadsRow, talking_heads(model, images))),
                maps=kept.AttentionArrays(
                    split.source.read(torch.arange(len(split))).numpy(),
                    {index: as_array(layer.maps) for index, layer in enumerate(layers)},
                    None if rollouts is None else as_array(rollouts),
                    None if similar is None else as_array(similar),
                ),
                by_image=by_image,
                **explored(model, images[:DRAWN]),
                **asked,
                **_windows(model, images),
            )

        return folder.publish(record)


def _read_earlier(folder: Path) -> kept.AttentionRecord:
    """Return the record of an earlier folder. Raises InputError where it cannot say which images it measured."""
    record = read_folder(folder)
    if not isinstance(record, kept.AttentionRecord):
        raise InputError(f"expected --same-as with a folder of attention, found one of {record.command} in {folder}")
    if not record.shown or not all(row.content for row in record.shown):
        raise InputError(
            f"expected --same-as with a folder that says which images it measured, found none of them in {folder}; "
            "run its attention again"
        )
    return record


def _with_images_of(earlier: kept.AttentionRecord, options: AttentionOptions) -> AttentionOptions:
    """Return the options with the data or the image files that an earlier run was given."""
    given = earlier.options
    return replace(options, data=given.get("data"), images=tuple(given.get("images") or ()))


def _same_images(earlier: kept.AttentionRecord, every: Split, model: Model) -> Split:
    """Return the images of an earlier record in its order, found by content among those of the model.

    Raises InputError where some of them are not there.
    """
    places: dict[str, list[int]] = {}
    for index, content in enumerate(_contents_of(every)):
        places.setdefault(content, []).append(index)
    indices = []
    for row in earlier.shown:
        remaining = places.get(row.content)
        if remaining:
            indices.append(remaining.pop(0))
    if len(indices) < len(earlier.shown):
        raise InputError(
            f"expected the {len(earlier.shown)} images of {earlier.folder} among those that {model.alias} is measured "
            f"on, found {len(indices)}; measure first the model that was trained on some of the images, and name "
            "its folder"
        )
    return every.pick(torch.tensor(indices))


def _contents_of(split: Split) -> list[str]:
    """Return the number of each image by its content, in hexadecimal digits."""
    return [f"{number:016x}" for number in image_numbers(split).tolist()]


def _head_arrays(split: Split, layers: Sequence[LayerMaps]) -> kept.HeadArrays:
    """Return the statistics of every head on every image."""
    information = []
    prefix_mass = []
    for layer in layers:
        for head in range(layer.maps.shape[1]):
            information.append(as_array(map_bits(layer.maps[:, head])))
            prefix_mass.append(as_array(layer.prefix[:, head].sum(-1)))
    groups = None if split.groups is None else split.groups.numpy()
    return kept.HeadArrays(np.stack(information), np.stack(prefix_mass), groups)


def _head_means(layers: Sequence[LayerMaps], by_image: kept.HeadArrays) -> Iterator[dict[str, Any]]:
    """Return the means of each layer's heads over images, as fields of its row."""
    groups = by_image.groups
    start = 0
    for layer in layers:
        heads = layer.maps.shape[1]
        information = {}
        prefix_mass = {}
        for head in range(heads):
            bits = by_image.information[start + head]
            masses = by_image.prefix_mass[start + head]
            information[str(head)] = student_mean(bits, groups=groups, unit="bits", least=0.0)
            prefix_mass[str(head)] = student_mean(masses, groups=groups, least=0.0, most=1.0)
        start += heads
        has_prefix = layer.prefix.shape[-1] > 0
        yield {"head_information": information, "head_prefix_mass": prefix_mass if has_prefix else None}


def _layer_rows(
    model: Model,
    split: Split,
    layers: Sequence[LayerMaps],
    masses: Sequence[OnObjectRow],
    by_image: kept.HeadArrays,
) -> Iterator[kept.LayerRow]:
    """Yield every layer, with what its maps tell, how alike they are, and where their mean lies."""
    groups: NDArray[Any] | None = None if split.groups is None else split.groups.numpy()
    cosine = partial(student_mean, groups=groups, unit="", least=-1.0, most=1.0)
    means = [layer.maps.mean(1) for layer in layers]
    shares = {row.layer: row for row in mass_of(masses, ATTENTION)}
    known = map_rows(model.alias, [(str(layer.site.layer), own) for layer, own in zip(layers, means)], split)
    for index, (layer, row, of_heads) in enumerate(zip(layers, known, _head_means(layers, by_image))):
        site = layer.site
        share = shares.get(layer.site.layer)
        beside: dict[str, Any] = (
            {}
            if share is None
            else {
                "share": share.estimate,
                "share_of_baseline": share.of_baseline,
                "share_difference": share.difference,
            }
        )
        same = index > 0 and means[index - 1].shape == means[index].shape
        likeness = alike(torch.stack(means[index - 1 : index + 1], 1)) if same else None
        yield kept.LayerRow(
            **vars(row),
            layer=site.layer,
            module=site.module,
            kind=site.kind,
            heads=site.heads,
            map=(layer.maps.shape[-2], layer.maps.shape[-1]),
            reading=layer.reading,
            prefix_mass=float(layer.prefix.sum(-1).mean()),
            alike=cosine(alike(layer.maps).numpy()),
            previous=None if likeness is None else cosine(likeness.numpy()),
            **beside,
            **of_heads,
        )


@phase("Rollout up to each layer")
def _rollouts(model: Model, images: Images, layers: Sequence[LayerMaps]) -> Tensor | None:
    """Return the rollout up to each layer, on the CPU; None where not all layers are those of whole sequences."""
    whole = [layer for layer in layers if layer.site.kind in ("patch", "class")]
    if model.anatomy.layout is None or model.supports("rollout") is not None or len(whole) < len(layers):
        return None
    return rollout_by_layer(model, images).float().cpu()


def _on_object(
    model: Model, split: Split, layers: Sequence[LayerMaps], rollouts: Tensor | None
) -> Iterator[OnObjectRow]:
    """Yield the share of each map on the object, where masks are known: of layers, of the rollout up to them, of
    heads."""
    if split.masks is None:
        return
    maps: dict[tuple[str, int, int | None], Maps] = {}
    for layer in layers:
        maps[ATTENTION, layer.site.layer, None] = layer.maps.mean(1)
        maps |= {(HEAD, layer.site.layer, head): own for head, own in enumerate(layer.maps.transpose(0, 1))}
    if rollouts is not None:
        maps |= {(ROLLOUT, layer.site.layer, None): rollouts[:, at] for at, layer in enumerate(layers)}
    named = [(kind, own) for (kind, _, _), own in maps.items()]
    rows = on_object_rows(model.alias, named, "mass", split.masks.cpu(), groups=split.groups, sources=sources(split))
    for (_, layer_number, head), row in zip(maps, rows):
        yield replace(row, layer=layer_number, head=head)


def _layout(model: Model, similar: Tensor | None) -> Iterator[kept.LayoutRow]:
    """Yield the layout of the patches, and how the similarity of their position embeddings follows their places:
    numbers without intervals, as pairs of positions are not independent."""
    layout = model.anatomy.layout
    distance = None
    ranks = None
    if layout is None:
        return
    if similar is not None:
        distance = distance_correlation(similar, layout)
        known = dict(zip(("all", "rows", "columns"), rank_correlation(similar, layout)))
        ranks = {pairs: Estimate(each, n=layout.patches, unit="") for pairs, each in known.items() if each is not None}
    yield kept.LayoutRow(
        model.alias,
        layout.grid,
        layout.prefix,
        layout.patch_size,
        model.preprocessing.size,
        None if distance is None else Estimate(distance, n=layout.patches, unit=""),
        ranks,
    )


def _views(model: Model, images: Images, options: AttentionOptions) -> dict[str, Any]:
    """Return the attention of --query, and to --key, in every layer. Raises InputError for a patch that is not
    there."""
    found: dict[str, Any] = {"views": {}}
    given: dict[Side, tuple[int, int] | None] = {"query": options.query, "key": options.key}
    for name, patch in given.items():
        if patch is not None:
            views = patch_views(model, images, side=name, patch=patch)
            found[name] = tuple(_patch_row(view, name) for view in views)
            found["views"][name] = kept.ViewArrays({at: as_array(view.maps.mean(1)) for at, view in enumerate(views)})
    return found


def _patch_row(view: LayerMaps, name: str) -> kept.PatchRow:
    """Return one layer of a view."""
    (row, column), received = view.patch, view.maps.sum((2, 3))
    prefix = view.prefix.sum(-1) if name == "query" else view.prefix.mean(-1)
    own = kept.PatchRow(
        view.site.layer,
        row,
        column,
        (view.maps.shape[-2], view.maps.shape[-1]),
        float(view.maps[:, :, row, column].mean()),
        float(prefix.mean()) if view.prefix.shape[-1] else None,
    )
    if name == "key":
        return replace(own, received=float(received.mean()))
    padded = None if view.site.windows is None else max(0.0, float((1 - received - prefix).mean()))
    return replace(own, padding=padded)


def _require_layer(layers: Sequence[LayerMaps], number: int, option: str) -> None:
    """Raise InputError where no layer of this number has a map."""
    known = [layer.site.layer for layer in layers]
    if number not in known:
        whole = known == list(range(len(known)))
        words = f"from 0 to {known[-1]}" if whole else f"one of {', '.join(map(str, dict.fromkeys(known)))}"
        raise InputError(f"expected {option} with a layer {words}, found {number}")


def _windows(model: Model, images: Images) -> dict[str, Any]:
    """Return the windows of each layer that has some, and the receptive field; nothing for other models."""
    try:
        layers = window_layers(model, images) if model.anatomy.family == "windowed" else ()
    except UnsupportedError:  # windows whose place in the image is not known
        layers = ()
    if not layers:
        return {}
    rows = []
    reach = {}
    for index, layer in enumerate(layers):
        own = layer.windows
        size = layer.windows.resolution
        patch = (max(size[0] // 2 - 1, 0), max(size[1] // 2 - 1, 0))  # above and to the left of the centre
        stage = [each for each in layers[: index + 1] if each.windows.resolution == size]
        reach[index] = reached(stage, torch.tensor([patch[0] * size[1] + patch[1]]))[0].view(size).numpy()
        rows.append(
            kept.WindowRow(
                layer.site.layer,
                size,
                own.window,
                layer.shift,
                own.count,
                layer.padding,
                layer.pairs,
                layer.reach,
                patch,
                layer.new,
            )
        )
    maps = kept.WindowArrays(
        part={index: layer.part.numpy() for index, layer in enumerate(layers)},
        reach=reach,
        mask={index: layer.allowed[-1].numpy() for index, layer in enumerate(layers)},
    )
    fields, field_maps = field_rows({(model.alias, model.alias): receptive_field(model, images)})
    return {"windows": tuple(rows), "window_maps": maps, "receptive_fields": fields, "field_maps": field_maps}


def as_array(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor on any device, in any precision, as the float32 array that is stored."""
    return np.asarray(values.float().cpu().numpy())
