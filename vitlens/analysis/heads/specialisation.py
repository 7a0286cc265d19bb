"""The specialisation of each head: the score of every rule in `labels`, and the resulting label.

Rules use only means over images, so they cost nothing beyond the statistics.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.attributes import PerHead
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.labels import MIXED, THRESHOLD, rules
from vitlens.analysis.heads.statistics import Statistics, per_head
from vitlens.references import resolved

FEW = 0.05  # of the keys: a larger set is an attended object rather than sinks
_TINY = 1e-30


@dataclass(frozen=True)
class Uniform:
    """Uniform attention of patches on the patches that they can attend to.

    mass: on each offset, key minus query, summing to 1; energy: the mean over rows of the sum of squared weights;
    share: the mean number of keys at each offset.
    """

    mass: Float[Tensor, "down across"]
    energy: float
    share: Float[Tensor, "down across"]


@dataclass(frozen=True)
class Head:
    """One head's means over images, the input of the rules.

    offsets: mass on each offset, key minus query, of attention between patches, scaled to sum to 1; chance: the same
    for uniform attention; explained: see explained_by_offset; keys: the number of keys of one row; cls: how many of
    them are CLS; shared: the number of keys of the whole map; uniform_distance: px; statistic: the others by name.
    """

    offsets: Float[Tensor, "down across"]
    chance: Float[Tensor, "down across"]
    explained: float
    keys: int
    cls: int
    shared: int
    uniform_distance: float
    statistic: Mapping[str, float]

    def beyond_chance(self, part: Callable[[Tensor], Tensor]) -> float:
        """The share of the attention on patches at the given offsets, rescaled so that uniform attention is 0."""
        return _beyond_uniform(float(part(self.offsets).sum()), float(part(self.chance).sum()))


def _beyond_uniform(share: float, expected: float) -> float:
    """A share of the attention, rescaled so that uniform attention is 0 and all attention is 1."""
    return 0.0 if expected >= 1 - 1e-9 else (share - expected) / (1 - expected)


def _offset_score(head: Head, down: int, across: int) -> float:
    """The score of one offset; 0 where the grid is too small for it."""
    rows, columns = (side // 2 for side in head.offsets.shape)
    if abs(down) > rows or abs(across) > columns:
        return 0.0
    return head.beyond_chance(lambda mass: mass[rows + down, columns + across])


def cls_score(head: Head) -> float:
    """Mass on the CLS token."""
    return _beyond_uniform(head.statistic.get("cls_mass", 0.0), head.cls / head.keys)


def sink_score(head: Head) -> float:
    """Mass on sinks, 0 where they are many."""
    are_few = head.statistic["sinks"] <= max(1.0, FEW * head.shared)
    return _beyond_uniform(head.statistic["sink_mass"], head.statistic["sinks"] / head.shared) if are_few else 0.0


def self_score(head: Head) -> float:
    """Mass on the patch itself."""
    return _offset_score(head, 0, 0)


def previous_score(head: Head) -> float:
    """Mass on the left neighbour."""
    return _offset_score(head, 0, -1)


def next_score(head: Head) -> float:
    """Mass on the right neighbour."""
    return _offset_score(head, 0, 1)


def row_score(head: Head) -> float:
    """Mass on the patch's row."""
    return head.beyond_chance(lambda mass: mass[mass.shape[0] // 2])


def column_score(head: Head) -> float:
    """Mass on the patch's column."""
    return head.beyond_chance(lambda mass: mass[:, mass.shape[1] // 2])


def local_score(head: Head) -> float:
    """How much shorter the mean distance is than that of uniform attention."""
    return 1 - head.statistic["distance"] / head.uniform_distance if head.uniform_distance else 0.0


def global_score(head: Head) -> float:
    """The effective number of keys as a share of all keys."""
    return head.statistic["effective_keys"] / head.keys


def content_score(head: Head) -> float:
    """The share of the weights' variance that the offset does not explain."""
    return 1 - head.explained


@dataclass(frozen=True)
class Specialisation:
    """labels, scores: of every head by layer, empty for a layer whose attention has no place in the image; all_scores:
    (layers, heads) of every rule; ratios: by layer (heads, 2 rows - 1, 2 columns - 1), the mean weight at an offset
    divided by uniform attention's, NaN where no pair of patches has the offset."""

    labels: tuple[tuple[str, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    all_scores: Mapping[str, PerHead]
    ratios: tuple[Tensor | None, ...]


def specialise(table: Statistics) -> Specialisation:
    """Label every head by the first rule that it meets, with the rule's score; `mixed` with the highest score."""
    labels: list[tuple[str, ...]] = []
    scores: list[tuple[float, ...]] = []
    ratios: list[Tensor | None] = []
    functions = {name: resolved(label.function) for name, label in rules().items()}
    every: dict[str, dict[int, Tensor]] = {name: {} for name in functions}
    for layer, (mass, geometry) in enumerate(zip(table.offset_mass, table.geometries)):
        if mass is None or geometry is None:
            labels.append(())
            scores.append(())
            ratios.append(None)
            continue
        heads = list(_heads(table, layer, mass, geometry))
        of_heads = [{name: float(score(head)) for name, score in functions.items()} for head in heads]
        for name, rows in every.items():
            rows[layer] = torch.tensor([of_head[name] for of_head in of_heads], dtype=torch.float64)
        named = [label_of(of_head) for of_head in of_heads]
        labels.append(tuple(name for name, _ in named))
        scores.append(tuple(score for _, score in named))
        ratios.append(_ratios(mass, geometry))
    tables = {name: per_head(rows, len(table.sites), heads=table.heads) for name, rows in every.items()}
    return Specialisation(tuple(labels), tuple(scores), tables, tuple(ratios))


def label_of(scores: Mapping[str, float]) -> tuple[str, float]:
    """The first rule whose score reaches the threshold, and that score; else `mixed` and the highest score."""
    for name in rules():
        if scores[name] >= THRESHOLD:
            return name, scores[name]
    return MIXED, max(scores.values())


def _heads(table: Statistics, layer: int, mass: Tensor, place: Geometry) -> Iterator[Head]:
    """The heads of one layer; mass: (heads, down, across), their mean attention by offset."""
    own = {name: row for (name, at), row in _means(table) if at == layer}
    keys, distance, uniform = table.sites[layer].keys, place.uniform_distance(), uniform_attention(place)
    shared = keys if place.windows is None else place.windows.resolution[0] * place.windows.resolution[1]
    for head, by_offset in enumerate(mass):
        numbers = {name: float(row[head]) for name, row in own.items() if head < len(row)}
        on_patches = by_offset / by_offset.sum().clamp_min(_TINY)
        if not table.renormalised:  # mass on the prefix must not count as short distance
            numbers["distance"] = float((on_patches * _lengths(place)).sum())
        explained = explained_by_offset(by_offset, numbers["energy"], uniform)
        yield Head(on_patches, uniform.mass, explained, keys, len(place.cls), shared, distance, numbers)


def _means(table: Statistics) -> Iterator[tuple[tuple[str, int], Tensor]]:
    for key in table.moments.sums:
        yield key, table.moments.mean(key)


def explained_by_offset(mass: Tensor, energy: float, uniform: Uniform) -> float:
    """The share of the weights' variance that the offset from query to key explains, from 0 to 1 (R²).

    mass: mean attention by offset; energy: the mean over queries of the sum of squared weights on patches. The variance
    is around uniform attention, which in incomplete windows differs between queries. 1 where attention is uniform.
    """
    sum_of_mass = mass.sum()
    fitted = ((mass - sum_of_mass * uniform.mass).square() / uniform.share.clamp_min(_TINY)).sum()
    total = energy - float(sum_of_mass.square()) * uniform.energy
    return 1.0 if total <= 1e-6 * energy else min(1.0, float(fitted) / total)


def _ratios(mass: Tensor, place: Geometry) -> Tensor:
    """Mean weight by offset divided by that of uniform attention on the same patches."""
    chance = uniform_attention(place).mass
    ratio = mass / mass.sum((1, 2), keepdim=True).clamp_min(_TINY) / chance
    return ratio.masked_fill(chance == 0, torch.nan)


def uniform_attention(place: Geometry) -> Uniform:
    """Uniform attention in one layer; all rows have equal weight, also those with few keys."""
    pairs = place.pairs().double()
    uniform = pairs / pairs.sum(-1, keepdim=True).clamp_min(1)
    queries = pairs.any(-1).sum()
    energy = float(uniform.square().sum() / queries)
    mass, keys = (place.by_offset(counted.sum(0)) / queries for counted in (uniform, pairs))
    return Uniform(mass, energy, keys)


def _lengths(place: Geometry) -> Tensor:
    """The length of each offset in the image, px."""
    (rows, columns), (height, width) = place.span, place.pitch
    down = torch.arange(1 - rows, rows, dtype=torch.float64) * height
    across = torch.arange(1 - columns, columns, dtype=torch.float64) * width
    return torch.hypot(down[:, None], across)
