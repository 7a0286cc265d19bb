"""Statistics of every head over any number of images, for one model or two on the same images, and over a training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch

from vitlens.analysis.answers.moments import Key, Moments
from vitlens.analysis.heads.labels import FAULTY
from vitlens.analysis.heads.marks import marks, sinks_off_object
from vitlens.analysis.heads.measure import BatchStatistics
from vitlens.analysis.heads.registry import STATISTICS, head_statistics, shown_in, token_statistics
from vitlens.analysis.heads.specialisation import Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics, Stream, over_heads
from vitlens.commands.run.run import Run
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import (
    ChangeRow,
    HeadRow,
    HeadsRow,
    LayerRow,
    LocalHeadsRow,
    Numbers,
    OffsetArrays,
    PairRow,
    StatsRecord,
)
from vitlens.commands.stats.training import kept_weights, over_training
from vitlens.lens.site import NO_PLACE
from vitlens.models.identity import backbone, same_anatomy, same_backbone
from vitlens.uncertainty import LEVEL, Estimate, holm

MOST_MODELS: Final = 2  # differences are those of one pair
_LOCAL: Final = 0.5  # of uniform attention's distance: a head with at most this share is local


def measure(options: StatsOptions) -> Path | None:
    """Measure every head and write the report; returns its path, None in all processes but the first.

    Raises InputError for more than two models, and for a run that kept no weights.
    """
    kept = kept_weights(options.models) if options.over_training else ()
    run = Run("stats", options, most=MOST_MODELS)
    streams = Streams(
        [
            Stream(model, renormalise=options.renormalise, groups=split.groups)
            for model, split in zip(run.models, run.splits)
        ]
    )
    with run.folder("Attention heads of") as folder:
        for batches in run.batches("Statistics of heads"):
            own = batches[0].indices
            masks = [None if split.masks is None else split.masks[own] for split in run.shares]
            streams.add([batch.images for batch in batches], numbers=run.numbers(batches[0]), masks=masks)
        streams.join(run.processes.total)
        epochs, of_heads, positions = over_training(kept, run, renormalise=options.renormalise)

        def record() -> StatsRecord:
            results = {model.alias: stream.result() for model, stream in zip(run.models, streams.streams)}
            roles = {alias: specialise(found) for alias, found in results.items()}
            heads = [row for alias, found in results.items() for row in head_rows(alias, found, roles[alias])]
            layers = [row for alias, found in results.items() for row in layer_rows(alias, found)]
            pairs = list(pair_rows(streams))
            return StatsRecord(
                heads=tuple(heads),
                layers=tuple(layers),
                means=tuple(heads_row(alias, found, heads) for alias, found in results.items()),
                local=tuple(row for alias in results for row in local_rows(alias, heads, layers)),
                pair=tuple(pairs),
                changes=tuple(change_rows(streams.differences)) if pairs else (),
                learning=epochs,
                learning_heads=of_heads,
                offsets={alias: rows for alias, found in results.items() if (rows := _offsets(found, roles[alias]))},
                positions=positions,
            )

        return folder.publish(record)


@dataclass
class Streams:
    """The statistics of one model, or of two on the same images with their differences, first minus second.

    differences: of each head, where both models have it; overall: of the means over heads.
    """

    streams: Sequence[Stream]
    differences: Moments = field(init=False)
    overall: Moments = field(init=False)

    def __post_init__(self) -> None:
        clusters = self.streams[0].moments.clusters
        self.differences, self.overall = Moments(clusters=clusters), Moments(clusters=clusters)

    def add(
        self,
        images: Sequence[torch.Tensor],
        *,
        numbers: torch.Tensor | None = None,
        masks: Sequence[torch.Tensor | None] = (None,) * MOST_MODELS,
    ) -> None:
        """Add a batch of images, preprocessed for each model as are the masks of their objects; numbers: of the images
        in the data (None: in order of their addition)."""
        measured = [
            stream.add(batch, numbers=numbers, masks=mask) for stream, batch, mask in zip(self.streams, images, masks)
        ]
        if len(measured) == MOST_MODELS:
            first, second = measured
            shared, of_data = self.streams[0], self.streams[0].groups
            before = shared.moments.count - first.images
            known = torch.arange(before, shared.moments.count) if numbers is None else numbers
            groups = None if of_data is None else of_data[known.cpu()]
            if self.comparable:
                self.differences.add(_differences(first, second), first.images, groups=groups)
            means, others = over_heads(first.values), over_heads(second.values)
            between = {key: means[key] - others[key] for key in means.keys() & others.keys()}
            self.overall.add(between, first.images, groups=groups)

    @property
    def comparable(self) -> bool:
        """Whether there are two models whose heads of the same number can be compared."""
        return len(self.streams) == MOST_MODELS and same_anatomy(self.streams[0].model, self.streams[1].model)

    def join(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add up the statistics of several processes; total: sums a tensor over all of them."""
        for stream in self.streams:
            stream.join(total)
        self.differences.join(total)
        self.overall.join(total)


def _differences(first: BatchStatistics, second: BatchStatistics) -> dict[Key, torch.Tensor]:
    """First minus second of every head; empty where the models differ in their attention layers."""
    if first.sites != second.sites:
        return {}
    return {key: first.values[key] - second.values[key] for key in first.values if key in second.values}


def numbers_of(moments: Moments, layer: int, index: int, names: Sequence[str]) -> Numbers:
    """The means over images of one head (or of all, in `Statistics.overall`), those that it has."""
    found = {}
    for name in names:
        if (name, layer) in moments.sums and index < len(moments.sums[name, layer]):
            estimate = estimate_of(moments, (name, layer), index, STATISTICS[name].unit)
            if np.isfinite(estimate.value):
                found[name] = estimate
    return found


def estimate_of(moments: Moments, key: Key, head: int, unit: str) -> Estimate:
    """The mean over images with its 95 % interval; without one for a single image."""
    value, half = float(moments.mean(key)[head]), float(moments.half_width(key)[head])
    if not np.isfinite(half):
        return Estimate(value, n=moments.count, unit=unit)
    return Estimate(value, value - half, value + half, moments.count, unit)


def head_rows(alias: str, found: Statistics, roles: Specialisation) -> Iterator[HeadRow]:
    """Every head with its statistics, its label, and what that rests on."""
    known, names = marks(found), list(head_statistics())
    for site in found.sites:
        for head in range(site.heads):
            values = numbers_of(found.moments, site.layer, head, names)
            if head >= len(roles.given[site.layer]):
                yield HeadRow(alias, site.layer, head, values)
                continue
            given, seen = roles.given[site.layer][head], known[site.layer][head]
            offset = float(roles.explained[site.layer, head])
            yield HeadRow(
                alias, site.layer, head, values,
                label=given.label,
                score=_score(given.score, given.low, given.high, found.images),
                best=given.best,
                other=given.other or None,
                other_score=_finite(given.other_score),
                explained_by_offset=_finite(offset),
                place=(seen.row, seen.column),
                place_grid=seen.grid,
                place_mass=seen.mass,
                place_chance=seen.chance,
                output=seen.output,
            )  # fmt: skip


def _score(value: float, low: float, high: float, images: int) -> Estimate | None:
    if _finite(value) is None:
        return None
    return Estimate(float(value), _finite(low), _finite(high), images, "")


def _finite(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return float(value) if np.isfinite(value) else None


def layer_rows(alias: str, found: Statistics) -> Iterator[LayerRow]:
    """Every layer, with the statistics of the tokens after its block."""
    uniform, names = found.uniform_distance(), list(token_statistics())
    for site in found.sites:
        place = found.geometries[site.layer]
        yield LayerRow(
            alias, site.layer, site.module, site.kind, site.heads, site.keys,
            numbers_of(found.moments, site.layer, 0, names),
            None if place is None else place.grid,
            NO_PLACE[site.kind] if place is None else None,
            _finite(float(uniform[site.layer])),
        )  # fmt: skip


def heads_row(alias: str, found: Statistics, heads: Sequence[HeadRow]) -> HeadsRow:
    """All heads of a model: labels, means of statistics, faults."""
    labels = [row.label for row in heads if row.model == alias and row.label is not None]
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    faulty = sum(counts.get(label, 0) for label in FAULTY)
    return HeadsRow(
        alias,
        len(labels),
        counts,
        numbers_of(found.overall, 0, 0, list(head_statistics())),
        sinks_off_object(found),
        Estimate(faulty / len(labels), n=len(labels)) if labels else None,
    )


def local_rows(alias: str, heads: Sequence[HeadRow], layers: Sequence[LayerRow]) -> Iterator[LocalHeadsRow]:
    """The first and the last quarter of the layers that have a distance; none for a model without any."""
    uniform = {row.layer: row.uniform_distance for row in layers if row.model == alias}
    shares: dict[int, list[float]] = {}
    for row in heads:
        distance, of_uniform = row.statistics.get("distance"), uniform.get(row.layer)
        if row.model == alias and distance is not None and of_uniform:
            shares.setdefault(row.layer, []).append(distance.value / of_uniform)
    placed = sorted(shares)
    quarter = max(1, len(placed) // 4)
    for part, chosen in (("first", placed[:quarter]), ("last", placed[-quarter:])):
        every = [share for layer in chosen for share in shares[layer]]
        if every:
            local = sum(share <= _LOCAL for share in every)
            yield LocalHeadsRow(alias, part, tuple(chosen), len(every), local, sum(every) / len(every))


def pair_rows(streams: Streams) -> Iterator[PairRow]:
    """What two models have in common, and how they differ over all heads; nothing for one model."""
    if len(streams.streams) < MOST_MODELS:
        return
    first, second = (stream.model for stream in streams.streams)
    changes = [row for row in change_rows(streams.differences) if row.p_all is not None]
    heads, differ = {row.name for row in changes}, {row.name for row in changes if (row.p_all or 0) <= LEVEL}
    yield PairRow(
        first.alias,
        second.alias,
        streams.comparable,
        same_backbone(first, second),
        sum(value.numel() for value in backbone(first).values()),
        numbers_of(streams.overall, 0, 0, list(head_statistics())),
        Estimate(len(differ) / len(heads), n=len(heads)) if heads else None,
    )


def change_rows(moments: Moments) -> Iterator[ChangeRow]:
    """Every head's difference in every statistic, by paired t tests; nothing for a single image (or group)."""
    if moments.independent < 2:
        return
    by_name = {name: sorted(key for key in moments.sums if key[0] == name) for name in head_statistics()}
    shown = [key for name in shown_in("differences") for key in by_name[name]]
    together = iter(holm([p for key in shown for p in moments.p_values(key)]))
    everywhere = {(key, head): next(together) for key in shown for head in range(len(moments.sums[key]))}
    for name, keys in by_name.items():
        corrected = iter(holm([p for key in keys for p in moments.p_values(key)]))
        for key in keys:
            for head in range(len(moments.sums[key])):
                difference = estimate_of(moments, key, head, STATISTICS[name].unit)
                yield ChangeRow(name, key[1], head, difference, next(corrected), everywhere.get((key, head)))


def _offsets(found: Statistics, roles: Specialisation) -> OffsetArrays | None:
    mass, ratio = (
        {layer: tensor.numpy().astype(np.float32) for layer, tensor in enumerate(values) if tensor is not None}
        for values in (found.offset_mass, roles.ratios)
    )
    return OffsetArrays(mass, ratio) if mass else None
