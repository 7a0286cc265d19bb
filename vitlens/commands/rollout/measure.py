"""Attention maps over all layers by several methods, and the pointing game on known objects."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.methods import maps_in_one_pass, require_possible
from vitlens.analysis.attention.registry import ATTENTION_METHODS, MethodSettings, attention_method
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.evaluation.intervals import spearman
from vitlens.analysis.faithfulness.localisation import pointing_hits
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import (
    ImageRow,
    PairRow,
    RolloutArrays,
    RolloutRecord,
    RolloutRow,
)
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.maps.measure import map_rows
from vitlens.commands.shared.maps.record import MixedHeadsRow
from vitlens.commands.shared.sheets import DRAWN, EACH, left_out_words, print_left_out
from vitlens.data.split import Split
from vitlens.lens.one_softmax import talking_heads
from vitlens.models.model import Model
from vitlens.names import Fusion, Readout
from vitlens.uncertainty import bootstrap_mean, student_mean

DEFAULT_METHODS: Final = tuple(name for name, entry in ATTENTION_METHODS.items() if entry.default)
KEPT: Final = 2000  # images of which maps are kept as arrays
_HIT: Final = 0.5  # share of tied maxima on the object, above which a map is a hit


def measure(options: RolloutOptions) -> Path | None:
    """Compute attention maps of images by each method and write the report.

    Returns the report's path. Of several processes, each takes a share of the images, and all
    but the first return None. Raises UnsupportedError for a method that needs a classifier if
    the model has none.
    """
    kinds = _kinds_of_map(options)
    # methods of one layer need only what `vitlens attention` needs, not a product over layers
    is_chained = any(attention_method(kind.method).needs == "chain" for kind in kinds)
    needs = None if is_chained else "attention"  # None: the needs in the registry, "chain"
    run = Run("rollout", options, needs=needs, images=ImageRequest(scenes=1))
    model = run.model
    split = run.split
    kinds = _supported_kinds(kinds, model, options)
    targets = chosen_targets(options.target, model, split)
    require_possible(model, kinds)
    readout = options.readout or model.anatomy.readout
    most_drawn = DRAWN if options.images else EACH
    drawn = min(most_drawn, len(split))
    left_out = tuple(left_out_words(drawn, len(split)))
    split = replace(split, notes=(*split.notes, *left_out))
    run = run.with_images([split])
    with run.folder("Rollout and other attention maps of") as folder:
        maps, logits = _compute_maps(run, kinds, targets, readout)

        def record() -> RolloutRecord:
            print_left_out(left_out, quiet=run.run_options.quiet, more="maps of all are in arrays/")
            drawn_split = split.pick(torch.arange(drawn))
            (drawn_batch,) = drawn_split.batches(drawn, device=model.device)
            return RolloutRecord(
                methods=tuple(_rows(run, split, kinds, maps, readout)),
                pairs=tuple(_pair_rows(split, kinds, maps)),
                shown=tuple(_image_rows(model, split, logits, targets)),
                mixed_heads=tuple(
                    MixedHeadsRow(module) for module in talking_heads(model, drawn_batch.images)
                ),
                maps=_arrays(split, maps, drawn),
                **explored(model, drawn_batch.images),
            )

        return folder.publish(record)


def _kinds_of_map(options: RolloutOptions) -> Sequence[MethodSettings]:
    """Return the methods of the options, those that fuse heads once for each fusion."""
    kinds = []
    for name in options.method or DEFAULT_METHODS:
        fusions: tuple[Fusion, ...] = ("mean",)  # without effect on other methods
        if _fuses_heads(name):
            fusions = options.fusion
        for fusion in fusions:
            kind = MethodSettings(
                method=name,
                fusion=fusion,
                discard=options.discard,
                alpha=options.alpha,
                start_layer=options.start_layer,
                layer=options.layer,
            )
            kinds.append(kind)
    return kinds


def _fuses_heads(method: str) -> bool:
    return "fusion" in attention_method(method).options


def _supported_kinds(
    kinds: Sequence[MethodSettings], model: Model, options: RolloutOptions
) -> Sequence[MethodSettings]:
    """Return all kinds of map, or those without gradients for a model without a classifier.

    Raises UnsupportedError if the user chose a method with gradients, or if no other is left.
    """
    if model.has_classifier:
        return kinds
    without_gradients = [kind for kind in kinds if not attention_method(kind.method).gradients]
    leaves_some_out = len(without_gradients) < len(kinds)
    is_chosen = bool(options.method)
    if leaves_some_out and (is_chosen or not without_gradients):
        model.require_classifier()
    return without_gradients


def _compute_maps(
    run: Run[RolloutOptions],
    kinds: Sequence[MethodSettings],
    targets: Tensor | None,
    readout: Readout | None,
) -> tuple[Tensor, Tensor]:
    """Return maps (n, kinds, rows, columns) and logits (n, classes) of all images, on the CPU."""
    all_maps = []
    all_logits = []
    size = fitting_batch_size(run.model)
    if any(attention_method(kind.method).gradients for kind in kinds):
        size = max(1, size // BACKWARD)  # a backward pass needs more memory for each image
    for (batch,) in run.batches("Computing attention maps", size=size):
        batch_targets = None if targets is None else targets[run.numbers(batch).cpu()]
        logits, maps = maps_in_one_pass(
            run.model, batch.images, kinds, targets=batch_targets, readout=readout
        )
        all_maps.append(torch.stack(maps, 1).float().cpu())
        all_logits.append(logits.float().cpu())
    maps_of_all_processes = run.processes.gathered(torch.cat(all_maps))
    logits_of_all_processes = run.processes.gathered(torch.cat(all_logits))
    return maps_of_all_processes, logits_of_all_processes


def _arrays(split: Split, maps: Tensor, drawn: int) -> RolloutArrays:
    """Return the images that are drawn, and the maps of at most KEPT images.

    If masks are known, these of the drawn images and the hits of the maps are returned, too.
    """
    hits = None
    masks = None
    if split.masks is not None:
        masks = split.masks[:drawn].numpy()
        hits = _hits(maps, split.masks)
    return RolloutArrays(
        images=split.source.read(torch.arange(drawn)).numpy(),
        maps=maps[:KEPT].numpy(),
        masks=masks,
        hits=hits,
    )


def _hits(maps: Tensor, masks: Tensor) -> NDArray[np.bool_]:
    """Return the hits (images, kinds) of the maps of at most KEPT images.

    A map is a hit if most of its tied maxima lie on the object.
    """
    hits = []
    for maps_of_kind in maps.unbind(1):
        shares = pointing_hits(maps_of_kind, masks)[:KEPT]  # (images,)
        hits.append((shares > _HIT).numpy())
    return np.stack(hits, 1)


def _rows(
    run: Run[RolloutOptions],
    split: Split,
    kinds: Sequence[MethodSettings],
    maps: Tensor,
    readout: Readout | None,
) -> Iterator[RolloutRow]:
    """Yield each kind of map, with the pointing game if masks are known."""
    model = run.model
    seed = run.run_options.seed
    groups = None if split.groups is None else split.groups.numpy()
    by_name = [(kind.name, maps[:, index]) for index, kind in enumerate(kinds)]
    for index, (kind, row) in enumerate(zip(kinds, map_rows(model.alias, by_name, split))):
        values = maps[:, index].flatten(1)  # (images, patches)
        patch_mass = None
        if kind.method == "rollout":  # its maps are parts of rows that sum to 1
            patch_mass = bootstrap_mean(
                values.sum(1).numpy(), groups=groups, seed=seed, least=0.0, most=1.0
            )
        yield RolloutRow(
            **vars(row),
            name=_title(kind),
            method=kind.method,
            zero=int((values == 0).all(1).sum()),
            fusion=kind.fusion if _fuses_heads(kind.method) else None,
            readout=readout,
            patch_mass=patch_mass,
        )


def _pair_rows(split: Split, kinds: Sequence[MethodSettings], maps: Tensor) -> Iterator[PairRow]:
    """Yield the rank correlation of any two kinds of map."""
    groups = None if split.groups is None else split.groups.numpy()
    for first, second in combinations(range(len(kinds)), 2):
        ranks = spearman(maps[:, first].flatten(1), maps[:, second].flatten(1))
        agreement = student_mean(
            ranks.nan_to_num(0.0).numpy(),  # NaN: a constant map has no ranks
            groups=groups,
            unit="",
            least=-1.0,
            most=1.0,
        )
        yield PairRow(_title(kinds[first]), _title(kinds[second]), agreement)


def _title(kind: MethodSettings) -> str:
    """Return the name of a kind of map in figures, "rollout (mean)"; in arrays, `kind.name`."""
    if _fuses_heads(kind.method):
        return f"{kind.method} ({kind.fusion})"
    return kind.method


def _image_rows(
    model: Model, split: Split, logits: Tensor, targets: Tensor | None
) -> Iterator[ImageRow]:
    """Yield the prediction and the target class of each image; None without a classifier."""
    names = split.names[:KEPT]
    if not model.has_classifier:
        for name in names:
            yield ImageRow(name)
        return
    probabilities, predictions = logits.softmax(-1).max(-1)
    if targets is None:
        targets = predictions
    for index, name in enumerate(names):
        yield ImageRow(
            name,
            prediction=model.classes[int(predictions[index])],
            probability=round(float(probabilities[index]), 4),
            target=model.classes[int(targets[index])],
        )
