"""Means over the sampled maps: position, concentration, mass on the object, and overlap of the two models' maps."""

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.failures.errors import Comparison
from vitlens.analysis.faithfulness.map_shares import MapShares, as_shares
from vitlens.commands.compare.measure.maps import MapProperties, Maps
from vitlens.commands.compare.record import (
    AGREEMENTS,
    HALF_DIFFERENCE,
    MAP_NUMBERS,
    MEAN_MAPS,
    POINTING,
    USABLE,
    MeanMapArrays,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.maps.measured import on_object_rows
from vitlens.commands.shared.maps.on_object import ON_OBJECT, OnObjectRow
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.uncertainty import Estimate, bootstrap_difference, bootstrap_mean


def write_map_numbers(
    folder: RunFolder, maps: Maps, properties: MapProperties, split: Split, comparison: Comparison, *, seed: int
) -> None:
    """Write the means over each model's usable sampled maps, and both mean maps."""
    groups = None if split.groups is None else split.groups[maps.indices]
    masks = None if split.masks is None else split.masks[maps.indices]
    photographs = None if masks is None else sources(split.pick(maps.indices))
    aliases = comparison.first.alias, comparison.second.alias
    of_first = (aliases[0], maps.first, properties.first)
    of_second = (aliases[1], maps.second, properties.second)
    on_object: list[OnObjectRow] = []
    for alias, values, own in (of_first, of_second):
        usable = own.usable & maps.sampled
        folder.metric(USABLE(model=alias), accuracy(own.usable[maps.sampled]))
        if not usable.any():
            continue
        for name in ("half", "spread", "central", "row", "column"):
            folder.metric(MAP_NUMBERS[name](model=alias), _mean(getattr(own, name), usable, groups, seed))
        if masks is not None and photographs is not None:
            own_groups = None if groups is None else groups[usable]
            for score, metric in (("mass", MAP_NUMBERS["inside"]), ("pointing", POINTING)):
                named = [(alias, values[usable])]
                rows = on_object_rows(
                    alias, named, score, masks[usable], groups=own_groups, sources=photographs[usable], seed=seed
                )
                on_object += rows
                for row in rows:
                    folder.metric(metric(model=alias), row.estimate)
    folder.write(ON_OBJECT, on_object)
    _write_overlap(folder, properties, maps.sampled, groups, aliases, seed)
    first, second = (_mean_map(values, own, maps, properties) for _, values, own in (of_first, of_second))
    both = properties.overlap.usable & maps.sampled
    agreement = properties.overlap.spearman[both].numpy()
    folder.save(MEAN_MAPS, MeanMapArrays(first.numpy(), second.numpy(), agreement))


def _mean(values: Tensor, usable: Tensor, groups: Tensor | None, seed: int) -> Estimate:
    own = None if groups is None else groups[usable].numpy()
    return bootstrap_mean(values[usable].numpy(), groups=own, seed=seed)


def _mean_map(values: Tensor, own: MapShares, maps: Maps, properties: MapProperties) -> Tensor:
    """The mean of one model's usable maps, each divided by its sum; uniform where there is none."""
    usable = own.usable & maps.sampled
    rows, columns = properties.grid
    if not usable.any():
        return torch.full((rows, columns), 1 / (rows * columns)).double()
    return as_shares(values[usable], size=properties.size, grid=properties.grid).mean(0)


def _write_overlap(
    folder: RunFolder,
    properties: MapProperties,
    sampled: Tensor,
    groups: Tensor | None,
    aliases: tuple[str, str],
    seed: int,
) -> None:
    """Write the agreement of the two maps of an image, and which model's maps are more concentrated."""
    usable = properties.overlap.usable & sampled
    if not usable.any():
        return
    pair = {"first": aliases[0], "second": aliases[1]}
    own = None if groups is None else groups[usable].numpy()
    for name, metric in AGREEMENTS.items():
        values = getattr(properties.overlap, name)[usable].numpy()
        unit = "" if name == "spearman" else "fraction"
        folder.metric(metric(**pair), bootstrap_mean(values, groups=own, seed=seed, unit=unit))
    first, second = (each.half[usable].numpy() for each in (properties.first, properties.second))
    folder.metric(HALF_DIFFERENCE(**pair), bootstrap_difference(first, second, groups=own, seed=seed))
