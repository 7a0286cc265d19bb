"""The specialisation of each head: the score of every label in `labels`, and the label that the head gets.

Scores are recomputed without each group of images; their spread gives intervals over images (delete-a-group jackknife).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.attributes import PerHead
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.labels import MARGIN, MIXED, THRESHOLD, UNLABELLED, compete, rules
from vitlens.analysis.heads.patterns import left_out
from vitlens.analysis.heads.scores import Head, LayerEvidence
from vitlens.analysis.heads.statistics import Statistics, per_head
from vitlens.references import resolved

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
class Given:
    """The label of one head. score: of that label, or the highest for `mixed` and `unlabelled`; low, high: its 95 %
    interval over images, NaN for one image; best, other: the label of the highest score, and the highest of those that
    contradict it ("" where there is none); other_score: of the latter."""

    label: str
    score: float
    low: float
    high: float
    best: str
    other: str
    other_score: float


@dataclass(frozen=True)
class Specialisation:
    """given: the label of every head by layer, empty for a layer whose attention has no place in the image; all_scores:
    (layers, heads) of every label; explained: (layers, heads), see explained_by_offset; ratios: by layer (heads, 2 rows
    - 1, 2 columns - 1), the mean weight at an offset divided by uniform attention's, NaN where no pair of patches has
    the offset."""

    given: tuple[tuple[Given, ...], ...]
    all_scores: Mapping[str, PerHead]
    explained: PerHead
    ratios: tuple[Tensor | None, ...]

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The label of every head by layer."""
        return tuple(tuple(one.label for one in layer) for layer in self.given)


def specialise(table: Statistics) -> Specialisation:
    """Label every head by the information in its attention that each label explains; the statistics must hold the
    evidence for labels, as those of `Stream` do unless it is told otherwise."""
    given: list[tuple[Given, ...]] = []
    ratios: list[Tensor | None] = []
    functions = {name: resolved(label.function) for name, label in rules().items()}
    every: dict[str, dict[int, Tensor]] = {name: {} for name in (*functions, "")}
    for layer, (mass, place) in enumerate(zip(table.offset_mass, table.geometries)):
        if mass is None or place is None or ("bits", layer) not in table.evidence.sums:
            given.append(())
            ratios.append(None)
            continue
        heads = _heads(table, layer, place)
        scores = [{name: _sampled(score(head)) for name, score in functions.items()} for head in heads]
        for name in functions:
            every[name][layer] = torch.stack([of_head[name][0] for of_head in scores])
        given.append(tuple(label_of(of_head) for of_head in scores))
        uniform, energy = uniform_attention(place), table.moments.mean(("energy", layer))
        explained = [explained_by_offset(own, float(square), uniform) for own, square in zip(mass, energy)]
        every[""][layer] = torch.tensor(explained, dtype=torch.float64)
        ratios.append(_ratios(mass, place))
    tables = {name: per_head(rows, len(table.sites), heads=table.heads) for name, rows in every.items()}
    return Specialisation(tuple(given), tables, tables.pop(""), tuple(ratios))


def label_of(scores: Mapping[str, Float[Tensor, " samples"]]) -> Given:
    """The label by the rule in `labels`; scores: of each label, over all images, then without each group of them."""
    known = rules()
    best = max(scores, key=lambda name: (known[name].first and bool(scores[name][0] >= THRESHOLD), scores[name][0]))
    rivals = [name for name in scores if compete(best, name)]
    other = max(rivals, key=lambda name: scores[name][0]) if rivals else ""
    score, below = scores[best], scores[other] if other else torch.zeros_like(scores[best])
    half, of_margin = half_width(score), half_width(score - below)
    value, margin = float(score[0]), float((score - below)[0])
    clear = known[best].first or (margin >= MARGIN and not margin <= of_margin)
    if value >= THRESHOLD and clear:
        label = best
    elif value + float(below[0]) >= THRESHOLD and float(below[0]) >= MARGIN:
        label = MIXED
    else:
        label = UNLABELLED
    low, high = (float(end) for end in np.clip((value - half, value + half), 0, 1))  # NaN stays
    return Given(label, value, low, high, best, other, float(below[0]))


def half_width(samples: Float[Tensor, " samples"]) -> float:
    """Half the width of the 95 % interval over images, from a value and those without each group (Student's t of the
    delete-a-group jackknife); NaN without groups."""
    left = samples[1:]
    groups = len(left)
    if groups < 2:
        return float("nan")
    error = ((groups - 1) / groups * (left - left.mean()).square().sum()).sqrt()
    from scipy import stats  # half a second, which not every command needs

    return float(stats.t.ppf(0.975, groups - 1) * error)


def _sampled(score: Any) -> Float[Tensor, " samples"]:
    """A score as a tensor, also where a function gives one number."""
    return torch.as_tensor(score, dtype=torch.float64).reshape(-1)


def _heads(table: Statistics, layer: int, place: Geometry) -> Iterator[Head]:
    """The heads of one layer, with the evidence on them."""
    counts = table.evidence.counts
    sums = {name: value for (name, at), value in table.evidence.sums.items() if at == layer}
    of_layer = LayerEvidence(place, {name: left_out(value, counts) for name, value in sums.items()}, sums, counts)
    norms = of_layer.means.get("output")
    mean = _mean_norm(table)
    for head in range(table.sites[layer].heads):
        output = torch.full((len(of_layer.bits),), torch.nan) if norms is None else norms[:, head] / mean
        yield Head(of_layer, head, output)


def _mean_norm(table: Statistics) -> float:
    """The mean over all heads of the norm of what they add to the residual stream; NaN where it is not known."""
    found = [value.sum(0) for (name, _), value in table.evidence.sums.items() if name == "output"]
    return max(float(torch.cat(found).mean() / table.evidence.counts.sum()), _TINY) if found else float("nan")


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
