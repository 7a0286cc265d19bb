"""The images of one head: exemplars with maps, contributions to classes, attention on objects."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.geometry import geometry_of
from vitlens.analysis.naming.labels import HeadName
from vitlens.analysis.patching.contribution import (
    above_mean,
    class_contributions,
    key_contributions,
)
from vitlens.attribution.explain import explain, preferred_method
from vitlens.commands.head.options import HeadOptions
from vitlens.commands.head.record import ExemplarRow, HeadArrays, PlacedRow, PushedRow
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.data.split import Split
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import Streamed, Targets
from vitlens.shapes import Images
from vitlens.uncertainty import student_mean, student_test

# exemplars are the images at these quantiles of what the head adds
QUANTILES: Final = (1.0, 0.95, 0.75, 0.5, 0.25, 0.0)
PUSHED: Final = 64  # images on which contributions to classes are measured
PLACED: Final = 64  # images on which attention on the object is measured
EVIDENCE: Final = 0.25  # share of the patches, with most evidence, that stand for a mask
_SMALLEST: Final = 1e-30  # sum of weights that attention is divided by, at least


def choose_exemplars(head: HeadName, split: Split) -> tuple[list[int], list[ExemplarRow]]:
    """Return the images at the quantiles of what the head adds to its class, and a row for each.

    Without a class these are the first images.
    """
    count = len(split)
    if head.writes is None:
        indices = list(range(min(len(QUANTILES), count)))
        return indices, [_exemplar(split, index) for index in indices]
    ranked = head.writes.scores.argsort(stable=True).tolist()  # indices, least first
    largest_rank = count - 1
    # quantiles of few images may have the same rank
    ranks = dict.fromkeys(round(quantile * largest_rank) for quantile in QUANTILES)
    indices = []
    exemplars = []
    for rank in ranks:
        index = ranked[rank]
        adds = float(head.writes.scores[index])
        quantile = rank / max(1, largest_rank)
        indices.append(index)
        exemplars.append(replace(_exemplar(split, index), adds=adds, quantile=quantile))
    return indices, exemplars


def _exemplar(split: Split, index: int) -> ExemplarRow:
    label = None
    if split.labels is not None:
        label = split.classes[int(split.labels[index])]
    return ExemplarRow(split.names[index], label, adds=0.0, quantile=0.0)


@dataclass(frozen=True)
class ExemplarMaps:
    """The exemplars with their maps.

    of_contributions: True if a map is what the head adds through each patch, False if it is the
        head's attention.
    """

    arrays: HeadArrays
    of_contributions: bool


def exemplar_maps(model: Model, split: Split, head: HeadName, indices: list[int]) -> ExemplarMaps:
    """Return what the head adds to its class through each patch, above the mean of the classes.

    If that is not known, return the head's attention on the patches.
    """
    (batch,) = split.pick(torch.tensor(indices)).batches(len(indices), device=model.device)
    pixels = (batch.images.float().cpu() * 255).round().byte().numpy()
    contributions = _contributions(model, batch.images, head)
    if contributions is not None:
        maps = contributions.numpy().astype(np.float32)
        return ExemplarMaps(HeadArrays(pixels, maps), of_contributions=True)
    attention = attention_on_patches(model, batch.images, head)
    maps = np.full((len(indices), 1, 1), np.nan, np.float32)
    if attention is not None:
        maps = attention.numpy().astype(np.float32)
    return ExemplarMaps(HeadArrays(pixels, maps), of_contributions=False)


def _contributions(model: Model, images: Images, head: HeadName) -> Tensor | None:
    """Return what the head adds to its class through each patch (batch, rows, columns).

    Returns None if it is not known.
    """
    if head.writes is None or head.writes.best not in model.classes:
        return None
    layout = model.layout
    best = torch.full((len(images),), model.classes.index(head.writes.best))
    direction = above_mean(best, len(model.classes))
    added = key_contributions(model, images, direction, head.layer, head.head)  # (batch, keys)
    keys_are_tokens = added.shape[1] == layout.tokens
    if not keys_are_tokens or not bool(added.isfinite().all()):
        return None
    by_patch: Tensor = added[:, len(layout.prefix) :].unflatten(1, layout.grid)
    return by_patch


def with_largest_patch(row: ExemplarRow, contributions: NDArray[np.float32]) -> ExemplarRow:
    """Return the row with the patch with the largest contribution, positive or negative.

    contributions: (rows, columns), what the head adds through each patch.
    """
    columns = contributions.shape[1]
    patch = divmod(int(np.abs(contributions).argmax()), columns)
    return replace(row, patch=patch, patch_adds=float(contributions[patch]))


def attention_on_patches(model: Model, images: Images, head: HeadName) -> Tensor | None:
    """Return the head's attention on patches (batch, rows, columns).

    It is that of CLS, or the mean over the patches without CLS. Returns None in windows.
    """
    maps: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        """Keep the map of the first attention call of the head's layer."""
        if call.site.layer != head.layer or call.site.part:  # a later part of the layer
            return
        place = geometry_of(call.site, model)
        if place is None or place.windows is not None:
            return
        weights = call.precise().weights()[:, head.head]  # (batch, queries, keys)
        if place.cls:
            row = weights[:, place.cls[0]]
        else:
            row = weights[:, place.prefix :].mean(1)
        maps.append(row[:, place.prefix :].unflatten(1, place.grid).cpu())

    observe(model, images, keep)
    return maps[0] if maps else None


@phase("What the head adds to each class")
def measure_pushed(run: Run[HeadOptions], head: HeadName) -> tuple[PushedRow, ...]:
    """Return what the head adds to the logit of every class, the largest first."""
    if head.writes is None:
        return ()
    model = run.model
    split = run.split.pick(torch.arange(min(PUSHED, len(run.split))))
    size = run.run_options.batch_size or fitting_batch_size(model)
    parts = []
    for batch in split.batches(size, device=model.device):
        parts.append(class_contributions(model, batch.images, head.layer, head.head))
    contributions = torch.cat(parts).double()  # (images, classes)
    # what is added to all classes changes no prediction
    contributions = contributions - contributions.mean(1, keepdim=True)
    rows = []
    for index, name in enumerate(model.classes):
        adds = student_mean(contributions[:, index], groups=split.groups, unit="")
        rows.append(PushedRow(name, adds))
    return tuple(sorted(rows, key=lambda row: -row.adds.value))


def measure_placed(
    run: Run[HeadOptions], head: HeadName, labels: Tensor | None
) -> Iterator[PlacedRow]:
    """Yield the share of the head's attention on the object of the first images.

    Without masks it is the share on the patches with most evidence for the class.
    """
    model = run.model
    split = run.split.pick(torch.arange(min(PLACED, len(run.split))))
    if len(split) < 2 or (split.masks is None and not model.has_classifier):
        return
    size = run.run_options.batch_size or fitting_batch_size(model)
    attention = _attention_shares(run, split, head, size)
    if attention is None:
        return
    if split.masks is not None:
        area = "the object's mask"
        areas = split.masks.double()
    else:
        method = preferred_method(model)
        area = f"the quarter of its patches with most evidence for the class, by the map {method}"
        targets: Targets = "predicted" if labels is None else labels[: len(split)]
        maps = explain(
            model,
            Streamed(split, model.pixel_dtype),
            targets=targets,
            method=method,
            batch_size=size,
        )
        areas = _with_most_evidence(maps.cpu())
    # the share of each patch that is in the area: (images, rows, columns), as the attention
    grid = (attention.shape[1], attention.shape[2])
    shares_in_area = F.adaptive_avg_pool2d(areas[:, None], grid)[:, 0]
    on_area = (attention * shares_in_area).sum((1, 2))
    # the mean over the areas of all other images is the sum over all areas without the image's
    on_all_areas = (attention * shares_in_area.sum(0)).sum((1, 2))
    on_other_areas = (on_all_areas - on_area) / (len(split) - 1)
    difference = on_area - on_other_areas
    groups = split.groups
    yield PlacedRow(
        model=model.alias,
        layer=head.layer,
        head=head.head,
        thing=area,
        on=student_mean(on_area, groups=groups, least=0.0, most=1.0),
        elsewhere=student_mean(on_other_areas, groups=groups, least=0.0, most=1.0),
        difference=student_mean(
            100 * difference, groups=groups, unit="points", least=-100.0, most=100.0
        ),
        p=student_test(difference, groups=groups),
    )


def _attention_shares(
    run: Run[HeadOptions], split: Split, head: HeadName, size: int
) -> Tensor | None:
    """Return the head's attention on patches as shares of their sum (images, rows, columns).

    None in windows.
    """
    parts = []
    with run.progress("Where the head attends", len(split)) as advance:
        for batch in split.batches(size, device=run.model.device):
            part = attention_on_patches(run.model, batch.images, head)
            if part is None:
                return None
            parts.append(part)
            advance(len(part))
    attention = torch.cat(parts).double()
    return attention / attention.sum((1, 2), keepdim=True).clamp_min(_SMALLEST)


def _with_most_evidence(maps: Tensor) -> Tensor:
    """Return 1 for the patches of each map with most evidence, 0 for others.

    maps, and the result: (images, rows, columns).
    """
    flat = maps.double().flatten(1)
    threshold = flat.quantile(1 - EVIDENCE, dim=1, keepdim=True)
    return (flat >= threshold).double().view_as(maps)
