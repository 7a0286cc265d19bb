"""Means over the sampled maps: position, concentration, the share on the object, and the overlap of both models'."""

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.failures.errors import Comparison
from vitlens.analysis.faithfulness.localisation import mask_areas, pointing_hits
from vitlens.analysis.faithfulness.map_shares import MapShares, as_shares
from vitlens.commands.compare.measure.maps import MapProperties, Maps
from vitlens.commands.compare.record import (
    AGREEMENTS,
    HALF_DIFFERENCE,
    MAP_NUMBERS,
    MEAN_MAPS,
    OBJECT_AREA,
    POINTING,
    USABLE,
    MeanMapArrays,
)
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.uncertainty import Estimate, bootstrap_difference, bootstrap_mean


def write_map_numbers(
    folder: RunFolder, maps: Maps, properties: MapProperties, split: Split, comparison: Comparison, *, seed: int
) -> None:
    """The means of both models, of the sampled maps that are usable, and both mean maps."""
    groups = None if split.groups is None else split.groups[maps.indices]
    masks = None if split.masks is None else split.masks[maps.indices]
    aliases = comparison.first.alias, comparison.second.alias
    of_first = (aliases[0], maps.first, properties.first)
    of_second = (aliases[1], maps.second, properties.second)
    for alias, values, own in (of_first, of_second):
        kept = own.usable & maps.sampled
        folder.metric(USABLE(model=alias), accuracy(own.usable[maps.sampled]))
        if not kept.any():
            continue
        for name in ("half", "spread", "central", "row", "column"):
            folder.metric(MAP_NUMBERS[name](model=alias), _mean(getattr(own, name), kept, groups, seed))
        if masks is not None:
            _write_on_object(folder, alias, values, own, kept & _has_object(masks), masks, groups, seed)
    if masks is not None:
        known = maps.sampled & _has_object(masks)
        if known.any():
            area = _mean(mask_areas(masks), known, groups, seed)
            folder.metric(OBJECT_AREA(first=aliases[0], second=aliases[1]), area)
    _write_overlap(folder, properties, maps.sampled, groups, aliases, seed)
    first, second = (_mean_map(values, own, maps, properties) for _, values, own in (of_first, of_second))
    both = properties.overlap.usable & maps.sampled
    agreement = properties.overlap.spearman[both].numpy()
    folder.save(MEAN_MAPS, MeanMapArrays(first.numpy(), second.numpy(), agreement))


def _has_object(masks: Tensor) -> Tensor:
    return masks.flatten(1).any(1)


def _mean(values: Tensor, kept: Tensor, groups: Tensor | None, seed: int) -> Estimate:
    own = None if groups is None else groups[kept].numpy()
    return bootstrap_mean(values[kept].numpy(), groups=own, seed=seed)


def _write_on_object(
    folder: RunFolder,
    alias: str,
    values: Tensor,
    own: MapShares,
    kept: Tensor,
    masks: Tensor,
    groups: Tensor | None,
    seed: int,
) -> None:
    """How much of one model's maps lies on the object, and how often their highest point does; kept: which maps."""
    if own.inside is None or not kept.any():
        return
    folder.metric(MAP_NUMBERS["inside"](model=alias), _mean(own.inside, kept, groups, seed))
    hits = pointing_hits(values[kept], masks[kept])
    folder.metric(POINTING(model=alias), accuracy(hits, groups=None if groups is None else groups[kept], seed=seed))


def _mean_map(values: Tensor, own: MapShares, maps: Maps, properties: MapProperties) -> Tensor:
    """The mean of one model's usable maps as shares of their sums; even where there is none."""
    kept = own.usable & maps.sampled
    rows, columns = properties.grid
    if not kept.any():
        return torch.full((rows, columns), 1 / (rows * columns)).double()
    return as_shares(values[kept], size=properties.size, grid=properties.grid).mean(0)


def _write_overlap(
    folder: RunFolder,
    properties: MapProperties,
    sampled: Tensor,
    groups: Tensor | None,
    aliases: tuple[str, str],
    seed: int,
) -> None:
    """How alike the two maps of an image are, and which model's are the more concentrated."""
    kept = properties.overlap.usable & sampled
    if not kept.any():
        return
    pair = {"first": aliases[0], "second": aliases[1]}
    own = None if groups is None else groups[kept].numpy()
    for name, metric in AGREEMENTS.items():
        values = getattr(properties.overlap, name)[kept].numpy()
        unit = "" if name == "spearman" else "fraction"
        folder.metric(metric(**pair), bootstrap_mean(values, groups=own, seed=seed, unit=unit))
    one, two = (each.half[kept].numpy() for each in (properties.first, properties.second))
    folder.metric(HALF_DIFFERENCE(**pair), bootstrap_difference(one, two, groups=own, seed=seed))
