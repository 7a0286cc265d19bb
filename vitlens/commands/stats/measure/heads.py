"""The statistics of each model: metrics, one row a head and a layer, and arrays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.heads.labels import FAULTY, rules
from vitlens.analysis.heads.marks import Marks, marks, sinks_off_object
from vitlens.analysis.heads.registry import STATISTICS, head_statistics, shown_in, token_statistics
from vitlens.analysis.heads.specialisation import Given, Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.stats.measure.estimates import estimate_of, finite
from vitlens.commands.stats.record import (
    FAULTY_HEADS,
    HEADS,
    LAYERS,
    LOCAL,
    MEAN,
    OF_HEAD,
    OFFSET_ARRAYS,
    RULES,
    SINKS_OFF_OBJECT,
    STATISTIC_ARRAYS,
    AttentionLayerRow,
    HeadRow,
    LocalHeadsRow,
    OffsetArrays,
    RuleRow,
    StatisticArrays,
)
from vitlens.lens.site import NO_PLACE
from vitlens.uncertainty import Estimate, wilson

_LOCAL: Final = 0.5  # of uniform attention's distance: a head with at most this share is local


@dataclass(frozen=True)
class _Measured:
    """One model: its statistics, and what its heads specialise in."""

    alias: str
    table: Statistics
    roles: Specialisation

    @property
    def names(self) -> list[str]:
        """The statistics that were measured."""
        return sorted({name for name, _ in self.table.moments.sums})


def write_heads(folder: RunFolder, tables: Mapping[str, Statistics]) -> None:
    """Write metrics, tables and arrays; tables: of each model by its alias."""
    models = [_Measured(alias, table, specialise(table)) for alias, table in tables.items()]
    heads, layers = [], []
    for model in models:
        for name, estimate in _metrics(model):
            folder.metric(name, estimate)
        heads += list(_head_rows(model))
        layers += list(_layer_rows(model))
        _write_arrays(folder, model)
    folder.write(HEADS, heads)
    folder.write(LAYERS, layers)
    folder.write(RULES, [RuleRow(name, label.sentence) for name, label in rules().items()])
    folder.write(LOCAL, [row for model in models for row in _local_heads(model.alias, heads, layers)])


def _metrics(model: _Measured) -> Iterator[tuple[str, Estimate]]:
    """Means over heads, and single heads for the statistics that have a metric per head."""
    table = model.table
    for name, statistic in head_statistics().items():
        if (name, 0) in table.overall.sums:
            estimate = estimate_of(table.overall, (name, 0), 0, statistic.unit)
            yield MEAN(statistic=name, model=model.alias), estimate
    off, labels = sinks_off_object(table), [label for layer in model.roles.labels for label in layer]
    if off is not None:
        yield SINKS_OFF_OBJECT(model=model.alias), off
    if labels:
        yield FAULTY_HEADS(model=model.alias), wilson(sum(label in FAULTY for label in labels), len(labels))
    for name in shown_in("each head"):
        for key in sorted(key for key in table.moments.sums if key[0] == name):
            for head in range(len(table.moments.sums[key])):
                estimate = estimate_of(table.moments, key, head, STATISTICS[name].unit)
                yield OF_HEAD(statistic=name, model=model.alias, layer=key[1], head=head), estimate


def _head_rows(model: _Measured) -> Iterator[HeadRow]:
    values = {name: getattr(model.table, name) for name in head_statistics() if name in model.names}
    known = marks(model.table)
    for site in model.table.sites:
        given = model.roles.given[site.layer]
        for head in range(site.heads):
            means = {name: finite(numbers[site.layer, head]) for name, numbers in values.items()}
            row = HeadRow(model.alias, site.layer, head, None, None, means)
            yield _labelled(row, given[head], known[site.layer][head], model.roles) if head < len(given) else row


def _labelled(row: HeadRow, given: Given, seen: Marks, roles: Specialisation) -> HeadRow:
    """The row with the head's label, its score with interval, the labels that were compared, and what it rests on."""
    added = seen.output
    return replace(
        row,
        label=given.label,
        score=finite(given.score),
        low=finite(given.low),
        high=finite(given.high),
        best=given.best,
        other=given.other or None,
        other_score=finite(given.other_score),
        explained_by_offset=finite(roles.explained[row.layer, row.head]),
        place=(seen.row, seen.column),
        place_grid=seen.grid,
        place_mass=seen.mass.value,
        place_mass_low=seen.mass.low,
        place_mass_high=seen.mass.high,
        place_chance=seen.chance,
        output=None if added is None else added.value,
        output_low=None if added is None else added.low,
        output_high=None if added is None else added.high,
    )


def _layer_rows(model: _Measured) -> Iterator[AttentionLayerRow]:
    uniform = model.table.uniform_distance()
    tokens = {name: getattr(model.table, name)[:, 0] for name in token_statistics() if name in model.names}
    for site in model.table.sites:
        place = model.table.geometries[site.layer]
        yield AttentionLayerRow(
            model.alias,
            site.layer,
            site.module,
            site.kind,
            site.heads,
            site.keys,
            None if place is None else place.grid,
            NO_PLACE[site.kind] if place is None else None,
            finite(uniform[site.layer]),
            {name: finite(numbers[site.layer]) for name, numbers in tokens.items()},
        )


def _local_heads(alias: str, heads: Sequence[HeadRow], layers: Sequence[AttentionLayerRow]) -> Iterator[LocalHeadsRow]:
    """Rows for the first and the last quarter of the layers that have a distance; none for a model without any."""
    uniform = {row.layer: row.uniform_distance for row in layers if row.model == alias}
    shares: dict[int, list[float]] = {}
    for row in heads:
        distance, of_uniform = row.statistics.get("distance"), uniform.get(row.layer)
        if row.model == alias and distance is not None and of_uniform:
            shares.setdefault(row.layer, []).append(distance / of_uniform)
    placed = sorted(shares)
    quarter = max(1, len(placed) // 4)
    parts: tuple[tuple[Literal["first", "last"], list[int]], ...]
    parts = (("first", placed[:quarter]), ("last", placed[-quarter:]))
    for part, chosen in parts:
        every = [share for layer in chosen for share in shares[layer]]
        if every:
            local = sum(share <= _LOCAL for share in every)
            yield LocalHeadsRow(alias, part, tuple(chosen), len(every), local, sum(every) / len(every))


def _write_arrays(folder: RunFolder, model: _Measured) -> None:
    table, roles = model.table, model.roles
    arrays = StatisticArrays(
        mean={name: getattr(table, name).numpy() for name in model.names},
        low={name: table.low(name).numpy() for name in model.names},
        high={name: table.high(name).numpy() for name in model.names},
        score={name: scores.numpy() for name, scores in roles.all_scores.items()},
        uniform_distance=table.uniform_distance().numpy(),
    )
    folder.save(STATISTIC_ARRAYS, arrays, model=model.alias)
    offsets = OffsetArrays(_by_layer(table.offset_mass), _by_layer(roles.ratios))
    if offsets.layer:
        folder.save(OFFSET_ARRAYS, offsets, model=model.alias)


def _by_layer(values: Sequence[Tensor | None]) -> dict[int, NDArray[np.float32]]:
    """The values of the layers that have any, in single precision."""
    return {layer: tensor.numpy().astype(np.float32) for layer, tensor in enumerate(values) if tensor is not None}
