"""Trace a cue through a model: the heads that carry it, the maps that show it, and examples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.reliance.heads import find_cue_heads
from vitlens.analysis.reliance.maps import FEWEST_DECIDED, judge_cue_maps
from vitlens.analysis.reliance.measure import ChangedImages, Viewer, changed_images
from vitlens.analysis.reliance.rows import CueHeadRow, CueMapRow, RelianceRow
from vitlens.attribution.explain import explain
from vitlens.errors import VitlensError
from vitlens.models.support import meets
from vitlens.shapes import Images, Masks
from vitlens.uncertainty import holm

_AT_ONCE: Final = 64  # images
EXAMPLES: Final = 6


@dataclass(frozen=True)
class Trace:
    """What is known of one cue in one model.

    heads: ordered by their share, none for a model without attention heads; maps: one for each method; examples: images
    that the intervention corrects, else whose prediction it changes, before and after; predictions: (examples, 2), with
    their labels (examples,).
    """

    heads: tuple[CueHeadRow, ...]
    maps: tuple[CueMapRow, ...]
    before: Images
    after: Images
    regions: Masks
    predictions: Int[Tensor, "examples 2"]
    labels: Int[Tensor, " examples"]


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

    methods: of maps, which the model supports. advance: called with the images just done, once for the heads and once
    for each method.
    """
    data = changed_images(viewer, row.of_intervention, limit=limit, seed=seed)
    before, after, after_control = (_predict(viewer, each) for each in (data.images, data.changed, data.control))
    is_decided = (after != before) & (after_control == before)
    heads = _heads(viewer, row, data, seed) if meets(viewer.model, "heads") else ()
    advance(len(data.images))
    maps = tuple(_maps(viewer, row, data, is_decided, methods, seed, advance))
    is_fixed = (before != data.labels) & (after == data.labels)
    order = torch.argsort(is_fixed.int() * 2 + is_decided.int(), descending=True, stable=True)
    chosen = order[:EXAMPLES]
    return Trace(
        heads,
        maps,
        data.images[chosen],
        data.changed[chosen],
        data.region[chosen],
        torch.stack((before, after), dim=1)[chosen],
        data.labels[chosen],
    )


def _predict(viewer: Viewer, images: Images) -> Int[Tensor, " n"]:
    return torch.cat([viewer.predict(part) for part in images.split(_AT_ONCE)])


def _heads(viewer: Viewer, row: RelianceRow, data: ChangedImages, seed: int) -> tuple[CueHeadRow, ...]:
    """Return the heads, or none where the logits do not depend on the change."""
    device = viewer.model.device
    try:
        found = find_cue_heads(
            viewer.model,
            data.images.to(device),
            data.changed.to(device),
            data.control.to(device),
            labels=data.labels.to(device),
            groups=data.groups,
            seed=seed,
        )
    except VitlensError:
        return ()
    rows = list[CueHeadRow]()
    for head in found:
        assert head.accuracy is not None  # labels are given
        rows.append(
            CueHeadRow(
                model=row.model,
                cue=row.cue,
                intervention=row.intervention,
                layer=head.layer,
                head=head.head,
                share=head.share,
                control=head.control,
                p_holm=head.p_holm,
                accuracy=head.accuracy,
            )
        )
    return tuple(rows)


def _maps(
    viewer: Viewer,
    row: RelianceRow,
    data: ChangedImages,
    is_decided: Bool[Tensor, " n"],
    methods: Sequence[str],
    seed: int,
    advance: Callable[[int], object],
) -> list[CueMapRow]:
    """Return one row for each method; none where the cue has no region, or decides too few predictions."""
    if row.of_intervention.region == "image" or min(int(is_decided.sum()), int((~is_decided).sum())) < FEWEST_DECIDED:
        return []
    rows = list[CueMapRow]()
    p_values = list[float]()
    for method in methods:
        maps = explain(viewer.model, data.images, method=method, seed=seed).float().cpu()
        advance(len(data.images))
        try:
            judged = judge_cue_maps(method, maps, data.region, is_decided, groups=data.groups, seed=seed)
        except VitlensError:  # too few maps with evidence
            continue
        p_values.append(1.0 if judged.p is None else judged.p)
        rows.append(
            CueMapRow(
                model=row.model,
                cue=row.cue,
                intervention=row.intervention,
                method=method,
                decided=judged.decided,
                others=judged.others,
                area=judged.area,
            )
        )
    return [replace(one, p_holm=p) for one, p in zip(rows, holm(p_values), strict=True)] if rows else []
