"""What each head specialises in: stated rules, each with a score, decided in a stated order.

Rules compare with chance: a score of 0 is what uniform attention gives, 1 is all of the attention (`global` alone is 1
for uniform attention). They read means over images alone, so they cost nothing beyond the statistics. The order goes
from the most special to the most general; the first rule whose score reaches its threshold names the head.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.offsets import offset_counts
from vitlens.analysis.heads.statistics import PerHead, Statistics, per_head

THRESHOLD = 0.5  # of a score: half of the way from uniform attention to all of it
FEW = 0.05  # of the keys: more than these are no sinks but an object
MIXED = "mixed"  # no rule fits
_TINY = 1e-30


@dataclass(frozen=True)
class Uniform:
    """Uniform attention of patches on the patches that they can see.

    mass: on each offset, key minus query, 1 in sum; energy: sum of a row's squared weights, a mean over rows; share:
    how many keys a query has at each offset, a mean over queries.
    """

    mass: Float[Tensor, "down across"]
    energy: float
    share: Float[Tensor, "down across"]


@dataclass(frozen=True)
class Head:
    """One head's means over images, as the rules read them.

    offsets: mass on each offset, key minus query, that of patches on patches scaled to 1; chance: the same for uniform
    attention; explained: see explained_by_offset; keys: of one row; cls: how many of them are CLS; shared: of the whole
    map, among which sinks are; uniform_distance: px; statistic: its other numbers by name.
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
        """How much of the attention on patches lies on a part of the offsets, 0 for what uniform attention gives."""
        expected, found = float(part(self.chance).sum()), float(part(self.offsets).sum())
        return _beyond(found, expected)


@dataclass(frozen=True)
class Rule:
    """says: the rule in words; score: of a head, at most 1, 0 at chance."""

    says: str
    score: Callable[[Head], float]


def _beyond(found: float, expected: float) -> float:
    return 0.0 if expected >= 1 - 1e-9 else (found - expected) / (1 - expected)


def _at(down: int, across: int) -> Callable[[Head], float]:
    """The score of one offset; 0 where the grid is too small to have it."""

    def score(head: Head) -> float:
        rows, columns = (side // 2 for side in head.offsets.shape)
        if abs(down) > rows or abs(across) > columns:
            return 0.0
        return head.beyond_chance(lambda mass: mass[rows + down, columns + across])

    return score


def _sink(head: Head) -> float:
    few = head.statistic["sinks"] <= max(1.0, FEW * head.shared)
    return _beyond(head.statistic["sink_mass"], head.statistic["sinks"] / head.shared) if few else 0.0


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "CLS": Rule(
            "patches look at the CLS token",
            lambda head: _beyond(head.statistic.get("cls_mass", 0.0), head.cls / head.keys),
        ),
        "sink": Rule("patches look at a few keys (at most 5 %) that all of them share", _sink),
        "self": Rule("a patch looks at itself", _at(0, 0)),
        "previous": Rule("a patch looks at its left neighbour", _at(0, -1)),
        "next": Rule("a patch looks at its right neighbour", _at(0, 1)),
        "same row": Rule(
            "a patch looks along its row", lambda head: head.beyond_chance(lambda mass: mass[mass.shape[0] // 2])
        ),
        "same column": Rule(
            "a patch looks along its column", lambda head: head.beyond_chance(lambda mass: mass[:, mass.shape[1] // 2])
        ),
        "local": Rule(
            "the mean distance is at most half of uniform attention's",
            lambda head: 1 - head.statistic["distance"] / head.uniform_distance if head.uniform_distance else 0.0,
        ),
        "global": Rule(
            "the effective number of keys is at least half of all keys",
            lambda head: head.statistic["effective_keys"] / head.keys,
        ),
        "content-dependent": Rule(
            "at least half of the variance of the weights is not explained by the offset from query to key",
            lambda head: 1 - head.explained,
        ),
    }
)
LABELS: Final = (*RULES, MIXED)


@dataclass(frozen=True)
class Specialisation:
    """labels, scores: of every head by layer, empty for a layer whose attention has no place in the image; all_scores:
    (layers, heads) of every rule; ratios: by layer (heads, 2 rows - 1, 2 columns - 1), the mean weight at an offset in
    units of uniform attention's, NaN where no pair of patches has it."""

    labels: tuple[tuple[str, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    all_scores: Mapping[str, PerHead]
    ratios: tuple[Tensor | None, ...]


def specialise(table: Statistics) -> Specialisation:
    """Name every head by the first rule that it meets, with the rule's score; `mixed` with the highest score of all."""
    labels: list[tuple[str, ...]] = []
    scores: list[tuple[float, ...]] = []
    ratios: list[Tensor | None] = []
    every: dict[str, dict[int, Tensor]] = {name: {} for name in RULES}
    for layer, (mass, place) in enumerate(zip(table.offset_mass, table.geometries)):
        if mass is None or place is None:
            labels.append(())
            scores.append(())
            ratios.append(None)
            continue
        heads = _heads(table, layer, mass, place)
        found = [{name: rule.score(head) for name, rule in RULES.items()} for head in heads]
        for name, rows in every.items():
            rows[layer] = torch.tensor([of_head[name] for of_head in found], dtype=torch.float64)
        named = [decide(of_head) for of_head in found]
        labels.append(tuple(name for name, _ in named))
        scores.append(tuple(score for _, score in named))
        ratios.append(_ratios(mass, place))
    tables = {name: per_head(rows, len(table.sites), heads=table.heads) for name, rows in every.items()}
    return Specialisation(tuple(labels), tuple(scores), tables, tuple(ratios))


def decide(scores: Mapping[str, float]) -> tuple[str, float]:
    """The first rule whose score reaches the threshold, and that score; else `mixed` and the highest score."""
    for name in RULES:
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
        if not table.renormalised:  # a rule must not read the mass on the prefix as nearness
            numbers["distance"] = float((on_patches * _lengths(place)).sum())
        explained = explained_by_offset(by_offset, numbers["energy"], uniform)
        yield Head(on_patches, uniform.mass, explained, keys, len(place.cls), shared, distance, numbers)


def _means(table: Statistics) -> Iterator[tuple[tuple[str, int], Tensor]]:
    for key in table.moments.sums:
        yield key, table.moments.mean(key)


def explained_by_offset(mass: Tensor, energy: float, uniform: Uniform) -> float:
    """The share of the weights' variance that the offset from query to key explains, from 0 to 1 (R²).

    mass: mean attention by offset, a mean over queries; energy: the mean over queries of the sum of squared weights on
    patches. The variance is that around uniform attention, which in windows that are cut differs from query to query.
    1 where attention is uniform: nothing is left to explain.
    """
    whole = mass.sum()
    fitted = ((mass - whole * uniform.mass).square() / uniform.share.clamp_min(_TINY)).sum()
    total = energy - float(whole.square()) * uniform.energy
    return 1.0 if total <= 1e-6 * energy else min(1.0, float(fitted) / total)


def _ratios(mass: Tensor, place: Geometry) -> Tensor:
    """Mean weight by offset over that of uniform attention on the same patches."""
    chance = uniform_attention(place).mass
    ratio = mass / mass.sum((1, 2), keepdim=True).clamp_min(_TINY) / chance
    return ratio.masked_fill(chance == 0, torch.nan)


def uniform_attention(place: Geometry) -> Uniform:
    """Uniform attention in one layer; rows weigh alike, however few patches they see."""
    pairs = place.pairs().double()
    even = pairs / pairs.sum(-1, keepdim=True).clamp_min(1)
    queries = pairs.any(-1).sum()
    energy = float(even.square().sum() / queries)
    return Uniform(offset_counts(place.grid, even) / queries, energy, offset_counts(place.grid, pairs) / queries)


def _lengths(place: Geometry) -> Tensor:
    """How long each offset is in the image, px."""
    (rows, columns), (height, width) = place.grid, place.pitch
    down = torch.arange(1 - rows, rows, dtype=torch.float64) * height
    across = torch.arange(1 - columns, columns, dtype=torch.float64) * width
    return torch.hypot(down[:, None], across)
