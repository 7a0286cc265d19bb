"""Attention maps over all layers by several methods, and whether their maximum lies on a known object."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.attention.map_checks import rank_agreement
from vitlens.analysis.attention.methods import MethodSettings, maps_in_one_pass, require_possible
from vitlens.analysis.attention.registry import ATTENTION_METHODS, attention_method
from vitlens.analysis.faithfulness.localisation import pointing_hits
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import (
    CHECKS,
    IMAGES,
    MAP_PAIRS,
    MAPS,
    PATCH_MASS,
    POINTING,
    ROLLOUT,
    MapPairRow,
    MapRow,
    RolloutArrays,
    RolloutImageRow,
)
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.explorer.measure import write_explorer
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.maps.information import InformationRow
from vitlens.commands.scaffold.maps.measured import information_row, on_object_rows
from vitlens.commands.scaffold.maps.on_object import ON_OBJECT
from vitlens.commands.scaffold.mixed_heads import MIXED_HEADS, MixedHeadsRow
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.sheets import DRAWN, EACH, print_left_out
from vitlens.commands.scaffold.targets import chosen_targets
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.lens.mixing import talking_heads
from vitlens.models.model import Model
from vitlens.names import Readout
from vitlens.processes import Processes, share_of
from vitlens.uncertainty import bootstrap_mean, student_mean

DEFAULT_METHODS: Final = tuple(name for name, entry in ATTENTION_METHODS.items() if entry.default)
_MARKED: Final = 0.5  # of tied maxima: more on the object, and the map is marked as a hit
KEPT: Final = 2000  # images whose maps are kept as arrays


def measure(options: RolloutOptions) -> Path | None:
    """Compute a model's attention maps of images by each method and write the report; returns the report's path.

    Of several processes each takes its share of the images; all but the first return None. Raises UnsupportedError for
    a method that needs a classifier where the model has none.
    """
    ways = [
        MethodSettings(name, fused, options.discard, options.alpha, options.start_layer, options.layer)
        for name in options.method or DEFAULT_METHODS
        for fused in (options.fusion if "fusion" in attention_method(name).options else ("mean",))
    ]
    processes, run = join_run(options.run)
    with processes.main_process_first():
        # the attention of one layer needs no model whose layers can be multiplied
        chained = any(attention_method(way.method).needs == "chain" for way in ways)
        command: str = "rollout" if chained else "attention"
        (model,) = load_models((options.model,), command=command, model_options=options.model_options, options=run)
        split = load_split(model, options=run, data=options.data, images=options.images)
    ways = _supported(model, ways, requested=bool(options.method))
    targets = chosen_targets(options.target, model, split)
    (first,) = split.pick(torch.arange(1)).batches(1, device=model.device)
    require_possible(model, first.images, ways)
    share_of(split, processes)
    readout = options.readout or model.anatomy.readout
    if not processes.is_first:
        _maps(model, split, ways, targets, readout, processes, run)
        return None
    with RunFolder.create(
        "rollout",
        name_parts=(model.alias, split.name),
        title=f"Rollout and other attention maps of {model.alias} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        maps, logits = _maps(model, split, ways, targets, readout, processes, run)
        hits = _localise(folder, model, split, ways, maps)
        for index, way in enumerate(ways):
            if way.method == "rollout":
                mass = maps[:, index].flatten(1).sum(1).numpy()
                folder.metric(PATCH_MASS(model=model.alias, fusion=way.fusion), bootstrap_mean(mass))
        folder.write(CHECKS, _check_rows(split, ways, maps))
        folder.write(MAP_PAIRS, _pair_rows(split, ways, maps))
        folder.write(MAPS, _map_rows(ways, maps, readout))
        folder.write(IMAGES, _image_rows(model, split, logits, targets))
        drawn = min(DRAWN if options.images else EACH, len(split))
        print_left_out(drawn, len(split), quiet=run.quiet, more="maps of all are in arrays/")
        folder.save(ROLLOUT, _arrays(split, maps, hits, drawn))
        (shown,) = split.pick(torch.arange(drawn)).batches(drawn, device=model.device)
        write_explorer(folder, model, shown.images)
        folder.write(MIXED_HEADS, [MixedHeadsRow(name) for name in talking_heads(model, shown.images)])
        return publish(folder)


def _supported(model: Model, ways: Sequence[MethodSettings], *, requested: bool) -> list[MethodSettings]:
    """The ways; for a model without a classifier those that need no class.

    Raises UnsupportedError where others were requested, or none is left.
    """
    classless = [way for way in ways if not attention_method(way.method).gradients]
    if len(classless) < len(ways) and (requested or not classless):
        model.require_classifier()
    return list(ways) if model.has_classifier else classless


def _maps(
    model: Model,
    split: Split,
    ways: Sequence[MethodSettings],
    targets: Tensor | None,
    readout: Readout | None,
    processes: Processes,
    options: RunOptions,
) -> tuple[Tensor, Tensor]:
    """Maps (n, ways, rows, columns) and logits (n, classes) of every image, of all processes, on the CPU."""
    maps, logits = [], []
    split = share_of(split, processes)
    targets = None if targets is None else targets[processes.index :: processes.count]
    size = options.batch_size or fitting_batch_size(model)
    if options.batch_size is None and any(attention_method(way.method).gradients for way in ways):
        size = max(1, size // BACKWARD)
    with progress("Computing attention maps", len(split), quiet=options.quiet) as advance:
        for batch in split.batches(size, device=model.device):
            own = None if targets is None else targets[batch.indices.cpu()]
            with autocast(model.device, options.precision):
                traced = maps_in_one_pass(model, batch.images, ways, targets=own, readout=readout)
            maps.append(torch.stack(traced.maps, 1).float().cpu())
            logits.append(traced.logits.float().cpu())
            advance(len(batch.images))
    return processes.gathered(torch.cat(maps)), processes.gathered(torch.cat(logits))


def _map_rows(ways: Sequence[MethodSettings], maps: Tensor, readout: Readout | None) -> list[MapRow]:
    empty = (maps.flatten(2) == 0).all(-1).sum(0).tolist()
    fusions = [way.fusion if "fusion" in attention_method(way.method).options else None for way in ways]
    return [MapRow(way.name, way.method, fusion, readout, count) for way, fusion, count in zip(ways, fusions, empty)]


def _check_rows(split: Split, ways: Sequence[MethodSettings], maps: Tensor) -> list[InformationRow]:
    groups = None if split.groups is None else split.groups.numpy()
    return [information_row(way.name, maps[:, index], groups) for index, way in enumerate(ways)]


def _pair_rows(split: Split, ways: Sequence[MethodSettings], maps: Tensor) -> list[MapPairRow]:
    """The agreement of any two kinds of map."""
    groups = None if split.groups is None else split.groups.numpy()
    rows = []
    for one, two in combinations(range(len(ways)), 2):
        rho = student_mean(rank_agreement(maps[:, one], maps[:, two]).numpy(), groups=groups, unit="")
        rows.append(MapPairRow(ways[one].name, ways[two].name, rho.value, rho.low, rho.high, rho.n or 0))
    return rows


def _image_rows(model: Model, split: Split, logits: Tensor, targets: Tensor | None) -> list[RolloutImageRow]:
    """The prediction of each image, and the target class; None where the model has no classifier."""
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    indices = range(min(len(split), KEPT))
    if not model.has_classifier:
        return [RolloutImageRow(files[index], None, None, None) for index in indices]
    confidence, predicted = logits.softmax(-1).max(-1)
    classes = predicted if targets is None else targets
    return [
        RolloutImageRow(
            files[index],
            model.classes[int(predicted[index])],
            round(float(confidence[index]), 4),
            model.classes[int(classes[index])],
        )
        for index in indices
    ]


def _localise(
    folder: RunFolder, model: Model, split: Split, ways: Sequence[MethodSettings], maps: Tensor
) -> Tensor | None:
    """The share of each map's maxima that lies on the object (n, ways), where masks are known; writes its metrics."""
    if split.masks is None:
        folder.write(ON_OBJECT, [])
        return None
    named = [(way.name, maps[:, index]) for index, way in enumerate(ways)]
    rows = on_object_rows(model.alias, named, "pointing", split.masks, groups=split.groups, sources=sources(split))
    folder.write(ON_OBJECT, rows)
    for row in rows:
        folder.metric(POINTING(model=model.alias, method=row.maps), row.estimate)
    return torch.stack([pointing_hits(own, split.masks) for _, own in named], 1)


def _arrays(split: Split, maps: Tensor, hits: Tensor | None, drawn: int) -> RolloutArrays:
    shown = torch.arange(drawn)
    images, kept = split.source.read(shown).numpy(), maps[:KEPT].numpy()
    if split.masks is None or hits is None:
        return RolloutArrays(images, kept)
    return RolloutArrays(images, kept, split.masks[shown].numpy(), (hits[:KEPT] > _MARKED).numpy())
