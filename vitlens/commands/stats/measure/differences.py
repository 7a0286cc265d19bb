"""How two models differ: over all heads, and head by head with Holm's correction."""

import torch

from vitlens.analysis.answers.moments import Moments
from vitlens.analysis.heads.registry import STATISTICS, head_statistics, shown_in
from vitlens.analysis.heads.statistics import per_head
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.stats.measure.estimates import estimate_of
from vitlens.commands.stats.measure.streams import MOST_MODELS, Streams
from vitlens.commands.stats.record import (
    BACKBONES,
    CHANGES,
    DIFFERENCE,
    DIFFERENCE_ARRAYS,
    DIFFERENCES,
    HEADS_CHANGED,
    BackbonesRow,
    DifferingHeadsRow,
    HeadDifferenceArrays,
    HeadDifferenceRow,
)
from vitlens.models.identity import backbone, same_backbone
from vitlens.uncertainty import LEVEL, Estimate, holm


def write_differences(folder: RunFolder, streams: Streams) -> None:
    """Write what two models have in common and how they differ; empty tables for one model."""
    if len(streams.streams) < MOST_MODELS:
        folder.write(BACKBONES, [])
        folder.write(DIFFERENCES, [])
        folder.write(CHANGES, [])
        return
    first, second = (stream.model for stream in streams.streams)
    parameters = sum(value.numel() for value in backbone(first).values())
    row = BackbonesRow(streams.comparable, same_backbone(first, second), parameters)
    folder.write(BACKBONES, [row])
    for name, statistic in head_statistics().items():
        if (name, 0) in streams.overall.sums:
            estimate = estimate_of(streams.overall, (name, 0), 0, statistic.unit)
            folder.metric(DIFFERENCE(first=first.alias, second=second.alias, statistic=name), estimate)
    _write_statistics(folder, streams.differences, depth=len(streams.streams[0].result().sites))
    changes = _changes(streams.differences)
    folder.write(CHANGES, changes)
    if changes:
        heads = {(row.layer, row.head) for row in changes}
        changed = {(row.layer, row.head) for row in changes if row.p_holm <= LEVEL}
        share = Estimate(len(changed) / len(heads), n=len(heads))
        folder.metric(HEADS_CHANGED(first=first.alias, second=second.alias), share)


def _write_statistics(folder: RunFolder, moments: Moments, *, depth: int) -> None:
    """Every head's difference, statistic by statistic, with Holm's correction over the heads of each."""
    means, corrected = {}, {}
    rows = []
    for name in head_statistics():
        keys = sorted(key for key in moments.sums if key[0] == name)
        if not keys or moments.independent < 2:  # one image, or one group, has no interval
            continue
        p_values = [p for key in keys for p in moments.p_values(key)]
        adjusted = iter(holm(p_values))
        p_holm = {key[1]: torch.tensor([next(adjusted) for _ in moments.sums[key]]) for key in keys}
        means[name] = per_head({key[1]: moments.mean(key) for key in keys}, depth).numpy()
        corrected[name] = per_head(p_holm, depth).numpy()
        significant = sum(int((p <= LEVEL).sum()) for p in p_holm.values())
        rows.append(DifferingHeadsRow(name, len(p_values), significant))
    folder.write(DIFFERENCES, rows)
    if means:
        folder.save(DIFFERENCE_ARRAYS, HeadDifferenceArrays(means, corrected))


def _changes(moments: Moments) -> list[HeadDifferenceRow]:
    """Every head's differences with their paired intervals; empty for a single image.

    Holm's correction is over all heads and all of these statistics, so that the count of heads holds for all of them.
    """
    keys = [key for name in shown_in("differences") for key in sorted(key for key in moments.sums if key[0] == name)]
    if not keys or moments.independent < 2:
        return []
    adjusted = iter(holm([p for key in keys for p in moments.p_values(key)]))
    rows = []
    for name, layer in keys:
        for head in range(len(moments.sums[name, layer])):
            estimate = estimate_of(moments, (name, layer), head, STATISTICS[name].unit)
            rows.append(
                HeadDifferenceRow(
                    name, layer, head, estimate.value, estimate.low, estimate.high, moments.count, next(adjusted)
                )
            )
    return rows
