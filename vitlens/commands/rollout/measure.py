"""Attention maps over all layers by several methods, and whether their maximum lies on a known object."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.methods import maps_in_one_pass, require_possible
from vitlens.analysis.attention.registry import ATTENTION_METHODS, MethodSettings, attention_method
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.evaluation.intervals import spearman
from vitlens.analysis.faithfulness.localisation import pointing_hits
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import ImageRow, PairRow, RolloutArrays, RolloutRecord, RolloutRow
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.maps.measure import map_rows
from vitlens.commands.shared.maps.record import MixedHeadsRow
from vitlens.commands.shared.sheets import DRAWN, EACH, left_out_words, print_left_out
from vitlens.data.split import Split
from vitlens.lens.observe import talking_heads
from vitlens.models.model import Model
from vitlens.names import Readout
from vitlens.uncertainty import bootstrap_mean, student_mean

DEFAULT_METHODS: Final = tuple(name for name, entry in ATTENTION_METHODS.items() if entry.default)
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
    # the attention of one layer needs no model whose layers can be multiplied
    chained = any(attention_method(way.method).needs == "chain" for way in ways)
    run = Run("rollout", options, scenes=1, needs=None if chained else "attention")
    model = run.model
    split = run.split
    classless = [way for way in ways if not attention_method(way.method).gradients]
    if len(classless) < len(ways) and (options.method or not classless):
        model.require_classifier()
    ways = ways if model.has_classifier else classless
    targets = chosen_targets(options.target, model, split)
    require_possible(model, ways)
    readout = options.readout or model.anatomy.readout
    drawn = min(DRAWN if options.images else EACH, len(split))
    split = replace(split, notes=(*split.notes, *left_out_words(drawn, len(split))))
    run.splits = (split,)
    with run.folder("Rollout and other attention maps of") as folder:
        maps, logits = _maps(run, ways, targets, readout)

        def record() -> RolloutRecord:
            print_left_out(drawn, len(split), quiet=run.run.quiet, more="maps of all are in arrays/")
            (shown,) = split.pick(torch.arange(drawn)).batches(drawn, device=model.device)
            masks = split.masks
            hits = None
            if masks is not None:  # where most of the tied maxima lie on the object
                hits = np.stack([(pointing_hits(own, masks) > 0.5)[:KEPT].numpy() for own in maps.unbind(1)], 1)
                masks = masks[:drawn]
            pixels = split.source.read(torch.arange(drawn)).numpy()
            return RolloutRecord(
                methods=tuple(_rows(model, split, ways, maps, readout)),
                pairs=tuple(_pair_rows(split, ways, maps)),
                shown=tuple(_image_rows(model, split, logits, targets)),
                mixed_heads=tuple(map(MixedHeadsRow, talking_heads(model, shown.images))),
                maps=RolloutArrays(pixels, maps[:KEPT].numpy(), None if masks is None else masks.numpy(), hits),
                **explored(model, shown.images),
            )

        return folder.publish(record)


def _maps(
    run: Run[RolloutOptions], ways: Sequence[MethodSettings], targets: Tensor | None, readout: Readout | None
) -> tuple[Tensor, Tensor]:
    """Return maps (n, ways, rows, columns) and logits (n, classes) of every image, of all processes, on the CPU."""
    maps = []
    logits = []
    size = fitting_batch_size(run.model)
    if any(attention_method(way.method).gradients for way in ways):
        size = max(1, size // BACKWARD)
    for (batch,) in run.batches("Computing attention maps", size=size):
        own = None if targets is None else targets[run.numbers(batch).cpu()]
        found, each = maps_in_one_pass(run.model, batch.images, ways, targets=own, readout=readout)
        maps.append(torch.stack(each, 1).float().cpu())
        logits.append(found.float().cpu())
    return run.processes.gathered(torch.cat(maps)), run.processes.gathered(torch.cat(logits))


def _rows(
    model: Model, split: Split, ways: Sequence[MethodSettings], maps: Tensor, readout: Readout | None
) -> Iterator[RolloutRow]:
    """Yield each kind of map, with the pointing game where masks are known."""
    named = [(way.name, maps[:, at]) for at, way in enumerate(ways)]
    groups = None if split.groups is None else split.groups.numpy()
    for way, (_, each), row in zip(ways, named, map_rows(model.alias, named, split)):
        own = each.flatten(1)
        fused = "fusion" in attention_method(way.method).options
        mass = bootstrap_mean(own.sum(1).numpy(), groups=groups, least=0.0, most=1.0)
        yield RolloutRow(
            **vars(row),
            name=_name(way),
            method=way.method,
            zero=int((own == 0).all(1).sum()),
            fusion=way.fusion if fused else None,
            readout=readout,
            patch_mass=mass if way.method == "rollout" else None,
        )


def _pair_rows(split: Split, ways: Sequence[MethodSettings], maps: Tensor) -> Iterator[PairRow]:
    """Yield the agreement of any two kinds of map."""
    groups = None if split.groups is None else split.groups.numpy()
    for one, two in combinations(range(len(ways)), 2):
        found = spearman(maps[:, one].flatten(1), maps[:, two].flatten(1)).nan_to_num(0.0).numpy()
        rho = student_mean(found, groups=groups, unit="", least=-1.0, most=1.0)
        yield PairRow(_name(ways[one]), _name(ways[two]), rho)


def _name(way: MethodSettings) -> str:
    """Return what a kind of map is called in figures."""
    return f"{way.method} ({way.fusion})" if "fusion" in attention_method(way.method).options else way.method


def _image_rows(model: Model, split: Split, logits: Tensor, targets: Tensor | None) -> Iterator[ImageRow]:
    """Yield the prediction of each image, and the target class; None where the model has no classifier."""
    files = split.names[:KEPT]
    if not model.has_classifier:
        yield from map(ImageRow, files)
        return
    confidence, predicted = logits.softmax(-1).max(-1)
    classes = predicted if targets is None else targets
    for file, most, chance, target in zip(files, predicted, confidence, classes):
        yield ImageRow(file, model.classes[int(most)], round(float(chance), 4), model.classes[int(target)])
