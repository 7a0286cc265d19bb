"""Trace a cue through a model: the heads that carry it, the maps that show it, and examples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.ablation.units import require_heads
from vitlens.analysis.reliance.heads import find_cue_heads
from vitlens.analysis.reliance.maps import judge_cue_maps
from vitlens.analysis.reliance.measure import ChangedImages, Viewer, changed_images
from vitlens.analysis.reliance.rows import (
    CueExampleArrays,
    CueExampleRow,
    CueHeadRow,
    CueMapRow,
    RelianceRow,
)
from vitlens.attribution.explain import explain
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images

_BATCH_SIZE: Final = 64  # images that are classified at once
EXAMPLES: Final = 6  # images in the figure
_PATCHED: Final = 100  # images on which heads are patched: each takes a pass for every head


@dataclass(frozen=True)
class Trace:
    """The trace of one cue through one model.

    heads: ordered by their share, none for a model without attention heads.
    maps: how well each method shows the cue.
    examples: images that the intervention corrects, at most EXAMPLES. Those that the control leaves
        as they were come first.
    pictures: of the examples, before and after the intervention, with the best method's map.
    """

    heads: tuple[CueHeadRow, ...]
    maps: tuple[CueMapRow, ...]
    examples: tuple[CueExampleRow, ...]
    pictures: CueExampleArrays


def trace_cue(
    viewer: Viewer,
    row: RelianceRow,
    *,
    methods: Sequence[str],
    limit: int,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> Trace:
    """Trace the cue of a row of `measure_reliance` on at most `limit` images.

    methods: the methods of maps, which the model supports.
    advance: called with the images just done, once for the heads and, if `has_maps(row)`,
        once for each method.
    """
    data = changed_images(viewer, row, limit=limit, seed=seed)
    before = _predict(viewer, data.images)
    after = _predict(viewer, data.changed)
    after_control = _predict(viewer, data.control)
    # the cue decides a prediction that changes without the cue, but not under the control
    is_decided = (after != before) & (after_control == before)
    heads = _heads(viewer.model, data.first(_PATCHED), seed)
    advance(len(data.images))
    attributions = dict[str, Tensor]()
    if has_maps(row):
        for method in methods:
            values = explain(viewer.model, data.images, method=method, seed=seed)
            attributions[method] = values.float().cpu()
            advance(len(data.images))
    maps = judge_cue_maps(attributions, data, is_decided, seed=seed)
    is_fixed = (before != data.labels) & (after == data.labels)
    fixed = is_fixed.nonzero().flatten()
    # those that the control does not change come first
    order = torch.argsort(is_decided[fixed].int(), descending=True, stable=True)
    chosen = fixed[order[:EXAMPLES]]
    best_maps = None
    if maps:
        best = max(maps, key=lambda map_row: map_row.area.value)
        best_maps = attributions[best.method][chosen].clamp_min(0).numpy()
    classes = viewer.split.classes
    examples = []
    for index in chosen.tolist():
        example = CueExampleRow(
            model=row.model,
            cue=row.cue,
            intervention=row.intervention,
            label=classes[int(data.labels[index])],
            before=classes[int(before[index])],
            after=classes[int(after[index])],
        )
        examples.append(example)
    pictures = CueExampleArrays(
        before=as_bytes(data.images[chosen]),
        after=as_bytes(data.changed[chosen]),
        regions=data.region[chosen].numpy(),
        maps=best_maps,
    )
    return Trace(heads, maps, tuple(examples), pictures)


def has_maps(row: RelianceRow) -> bool:
    """Return True if maps can show a cue: in a whole image, no map can miss its region."""
    return row.of_intervention.region != "image"


def as_bytes(images: Images) -> NDArray[np.uint8]:
    """Return pixels in [0, 1] as bytes."""
    pixels: NDArray[np.uint8] = (255 * images).round().byte().numpy()
    return pixels


def _predict(viewer: Viewer, images: Images) -> Int[Tensor, " n"]:
    return torch.cat([viewer.predict(batch) for batch in images.split(_BATCH_SIZE)])


def _heads(model: Model, data: ChangedImages, seed: int) -> tuple[CueHeadRow, ...]:
    """Return the heads; none without attention, or where the logits do not depend on the change."""
    if not require_heads.is_met(model):
        return ()
    try:
        return find_cue_heads(model, data, seed=seed)
    except InputError:  # the logits do not depend on the change
        return ()
