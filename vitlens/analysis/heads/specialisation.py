"""The specialisation of each head: the scores of all labels, the label, and its evidence.

Information. A row of attention over n keys with entropy H has log2(n) - H bits: 0 for uniform
attention, log2(n) for a single key. A pattern predicts the weights p of a row. The bits that it
explains are its gain in log-likelihood over uniform attention: the sum over keys of
w log2(p / uniform), mean over rows, at the most likely strength of the pattern.

Scores. The score of a label is explained bits / max(1, bits). It is 1 if the pattern is all that
the head does. A general pattern explains less than a specific one: if a head attends to the left
neighbour, "same row" explains only the row. A head with less than one bit, as if it attended to
half of the keys, is `uniform`: the score of this label is the part of the bit that is missing.

Labels. A head gets the label of the highest score under two conditions:
- the label explains most of the information: the score is at least THRESHOLD;
- it is clearly above the next: by MARGIN, and by more than the 95 % interval of the difference over
  images.

Labels that contain one another do not compete: a head that attends to its left neighbour is also
local, and gets the higher of both. A head is MIXED if the two best labels together explain most of
the information, and the lower score is at least MARGIN. All others are UNLABELLED.

Intervals. Scores are recomputed without each group of images. Their spread gives intervals over
images (delete-a-group jackknife).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.evidence import bits_of_part, half_width, jackknife_means
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.offsets import (
    DISCS,
    OFFSETS,
    explained_by_offset,
    key_counts,
    offset_bits,
)
from vitlens.analysis.heads.registry import LABELS, MARGIN, MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.rows import PerHead
from vitlens.analysis.heads.statistics import Statistics, per_head
from vitlens.uncertainty import Estimate

Samples = Float[Tensor, "samples heads"]  # value on all images, then without each group of images

# Unit of the norm of a head's output, as a part of the mean norm over the model's heads. A head is
# dead if its norm is below half of it, because the score is then above THRESHOLD.
DEAD: Final = 0.01
LARGEST: Final = 0.25  # a neighbourhood of more than this part of the keys is not local
_TINY: Final = 1e-30  # avoids a division by 0
# A single group of images is predicted from itself, as if from so many times as many images. The
# one image of uniform attention that is mixed in is then negligible.
_SELF_PREDICTION_FACTOR: Final = 1e6


@dataclass(frozen=True)
class LayerEvidence:
    """The evidence for the labels of one layer's heads.

    The methods `of_...` return bits that a pattern explains, except `of_dead`, which is a score.

    place: the geometry of the layer's tokens.
    means (samples, ..): the means of evidence by its name in `HeadEvidence`.
    received: the sums of what each key receives, by group of images.
    counts: the number of images in each group.
    output (samples, 1): the norm of what a head adds to the residual stream, mean over all heads of
        the model. None if unknown.
    """

    place: Geometry
    means: Mapping[str, Tensor]
    received: Float[Tensor, "groups heads keys"]
    counts: Float[Tensor, " groups"]
    output: Tensor | None

    @cached_property
    def bits(self) -> Samples:
        """Return the information in a row."""
        return self.means["bits"].clamp_min(0)

    def share(self, bits: Samples) -> Samples:
        """Return these bits as a share of the information in each head, of at least one bit."""
        return (bits / self.bits.clamp_min(1)).clamp(0, 1)

    def of_dead(self) -> Samples:
        """Return 1 minus the norm of the head's output in units of DEAD, 0 for larger norms."""
        if self.output is None or "output" not in self.means:
            return torch.zeros_like(self.bits)
        mean_norm = self.output[0]  # on all images: one unit for all samples
        norms = self.means["output"] / mean_norm.clamp_min(_TINY)
        return (1 - norms / DEAD).clamp_min(0).nan_to_num()

    def of_offsets(self, name: str) -> Samples:
        """Return the bits that one of OFFSETS explains."""
        return offset_bits(self.means["offsets"], self.place, name)

    def of_local(self) -> Samples:
        """Return the bits that the best neighbourhood explains."""
        best = torch.zeros_like(self.bits)
        for square in DISCS:
            name = f"within {square}"
            inside, keys = key_counts(self.place, name)
            if (inside / keys).mean() <= LARGEST:
                best = torch.maximum(best, self.of_offsets(name))
        return best

    def of_tokens(self, tokens: tuple[int, ...]) -> Samples:
        """Return the bits that the mass on each of these prefix tokens explains.

        They are 0 if the tokens together have less mass than by chance.
        """
        mass = self.means["received"][..., list(tokens)]  # (samples, heads, tokens)
        # that of any token: a layer with prefix tokens has no windows, in which tokens would differ
        chance = self.place.uniform().received[0]
        mass_of_all = mass.sum(-1)
        rest = (1 - mass_of_all).clamp_min(0)
        expected_rest = 1 - len(tokens) * chance
        expected_of_all = 1 - expected_rest
        gain_of_tokens = torch.xlogy(mass, mass / chance).sum(-1)
        gain_of_rest = torch.xlogy(rest, rest / expected_rest)
        bits = (gain_of_tokens + gain_of_rest) / math.log(2)
        return bits.where(mass_of_all > expected_of_all, torch.zeros_like(bits))

    @cached_property  # as `of_sinks` reads it, too
    def of_place(self) -> Samples:
        """Return the bits that fixed places explain.

        Each group of images is predicted from the others. A single group is predicted from itself,
        so its places cannot be distinguished from sinks.
        """
        prefix = self.place.prefix
        uniform = self.place.uniform().received[prefix:]
        uniform = uniform / uniform.sum().clamp_min(_TINY)
        is_used = self.counts > 0
        sums = self.received[is_used][..., prefix:]
        counts = self.counts[is_used]
        groups = len(sums)
        # Groups are left out twice: here for the samples of the jackknife, and in _bits_of_places
        # for the prediction of each group.
        subsets = [torch.ones(groups, dtype=torch.bool)]
        if groups > 1:
            all_but_one = ~torch.eye(groups, dtype=torch.bool)
            subsets += [*all_but_one]
        samples = [_bits_of_places(sums[subset], counts[subset], uniform) for subset in subsets]
        return torch.stack(samples)

    def of_mask(self, *, background: bool) -> Samples:
        """Return the bits that the object, or the background, explains; 0 without masks."""
        if "object" not in self.means:
            return torch.zeros_like(self.bits)
        mass = self.means["object"]
        chance = self.means["object_share"][:, None]
        if background:
            prefix = self.place.prefix
            mass = self.means["received"][..., prefix:].sum(-1) - mass
            chance = self.place.uniform().received[prefix:].sum() - chance
        return bits_of_part(mass, chance)

    def of_high_norms(self) -> Samples:
        """Return the bits that patches of exceptional norm explain.

        They are 0 if the residual stream before the layer was not seen.
        """
        if "high_norm" not in self.means:
            return torch.zeros_like(self.bits)
        return bits_of_part(self.means["high_norm"], self.means["high_norm_share"][:, None])

    def of_border(self) -> Samples:
        """Return the bits that the outermost patches explain."""
        is_border = torch.ones(self.place.map_grid, dtype=torch.bool)
        is_border[1:-1, 1:-1] = False
        is_border_key = is_border.flatten()
        prefix = self.place.prefix
        mass = self.means["received"][..., prefix:][..., is_border_key].sum(-1)
        chance = self.place.uniform().received[prefix:][is_border_key].sum()
        return bits_of_part(mass, chance)

    def of_sinks(self) -> Samples:
        """Return the bits that a few keys of each image explain.

        Bits of fixed places, of the object and of the background are subtracted.
        """
        explained = torch.maximum(self.of_mask(background=False), self.of_mask(background=True))
        # one group of images cannot separate its sinks from fixed places
        if (self.counts > 0).sum() > 1:
            explained = torch.maximum(explained, self.of_place)
        return (self.means["sinks"] - explained).clamp_min(0)

    def of_similar(self) -> Samples:
        """Return the bits that similar colour explains beyond three simpler explanations."""
        # 1. the offset: the mean weight of a (query, key) pair at each offset, times the number of
        # similar pairs at it. That weight is the mass at an offset divided by the number of pairs.
        weight_at_offset = self.means["offsets"] / self.place.uniform().pairs.clamp_min(_TINY)
        rows, columns = self.place.span
        # offset 0: that a patch is similar to itself must not count as explained by the offset
        weight_at_offset[..., rows - 1, columns - 1] = 0
        similar_pairs = self.means["similar_offsets"][:, None]  # their number in an image
        mass_by_offset = (weight_at_offset * similar_pairs).sum((-2, -1))
        # 2. popular keys: every query attends as the mean query does
        mass_by_popularity = self.means["popular"]
        # 3. uniform attention
        mass_by_chance = self.means["similar_chance"][:, None].expand_as(mass_by_offset)
        expected = torch.stack((mass_by_offset, mass_by_popularity, mass_by_chance)).amax(0)
        return bits_of_part(self.means["similar"], expected)

    def label_evidence(self, images: int) -> tuple["LabelEvidence", ...]:
        """Return the evidence for the label of each head, from so many images."""
        prefix = self.place.prefix
        columns = self.place.map_grid[1]
        mass = self.means["received"][..., prefix:]
        chance = self.place.uniform().received[prefix:]
        norms = None
        if self.output is not None and "output" in self.means:
            norms = self.means["output"] / self.output.clamp_min(_TINY)
        evidence = []
        for head, patch in enumerate(mass[0].argmax(-1).tolist()):
            row, column = divmod(patch, columns)
            norm = None if norms is None else _estimate(norms[:, head], images, most=math.inf)
            evidence.append(
                LabelEvidence(
                    row=row,
                    column=column,
                    mass=_estimate(mass[:, head, patch], images),
                    chance=float(chance[patch]),
                    output=norm,
                )
            )
        return tuple(evidence)


def _bits_of_places(
    sums: Float[Tensor, "groups heads patches"],
    counts: Float[Tensor, " groups"],
    uniform: Float[Tensor, " patches"],
) -> Float[Tensor, " heads"]:
    """Return the bits that fixed places explain, each group predicted from the other groups.

    The prediction is mixed with uniform attention, which has the weight of one image: a place that
    was not seen yet is not impossible.

    sums: the sums of what each patch receives.
    counts: the number of images in each group.
    uniform: what each patch receives from uniform attention.
    """
    images = counts.sum()
    # what each group is predicted from: the sums of other groups, and how many images they are
    if len(sums) == 1:
        seen = sums.sum(0)[None]
        seen_images = (_SELF_PREDICTION_FACTOR * images).reshape(-1, 1, 1)
    else:
        seen = sums.sum(0) - sums
        seen_images = (images - counts).reshape(-1, 1, 1)
    frequencies = seen / seen.sum(-1, keepdim=True).clamp_min(_TINY)
    predicted = (seen_images * frequencies + uniform) / (seen_images + 1)
    gain = (sums * (predicted / uniform).log2()).sum((0, -1)) / images
    return gain.clamp_min(0)


def _share_of_offsets(layer: LayerEvidence, *, name: str) -> Samples:
    """Return the share of the information that a pattern of offsets explains."""
    return layer.share(layer.of_offsets(name))


# the score of each label
RULES: Final[dict[str, Callable[[LayerEvidence], Samples]]] = {
    "dead": LayerEvidence.of_dead,
    "uniform": lambda layer: (1 - layer.bits).clamp_min(0),
    "CLS": lambda layer: layer.share(layer.of_tokens(layer.place.cls)),
    "register": lambda layer: layer.share(layer.of_tokens(layer.place.registers)),
    "position": lambda layer: layer.share(layer.of_place),
    "sink": lambda layer: layer.share(layer.of_sinks()),
    "high-norm": lambda layer: layer.share(layer.of_high_norms()),
    "border": lambda layer: layer.share(layer.of_border()),
    "object": lambda layer: layer.share(layer.of_mask(background=False)),
    "background": lambda layer: layer.share(layer.of_mask(background=True)),
    "similar": lambda layer: layer.share(layer.of_similar()),
    "local": lambda layer: layer.share(layer.of_local()),
    **{name: partial(_share_of_offsets, name=name) for name in OFFSETS if name in LABELS},
}


@dataclass(frozen=True)
class HeadLabel:
    """The label of one head.

    label: a name in LABELS.
    score: the highest score. It is that of `label`, unless the label is `mixed` or `no single
        pattern`.
    low, high: the 95 % interval of the score over images, NaN for one image.
    best: the label of the highest score.
    other: the label of the highest score among those that contradict `best`, "" if there is none.
    other_score: the score of `other`.
    """

    label: str
    score: float
    low: float
    high: float
    best: str
    other: str
    other_score: float


@dataclass(frozen=True)
class LabelEvidence:
    """The evidence for the label of one head.

    row, column: the patch that receives most attention, in the mean over images.
    mass: the share of the patches' attention that it receives.
    chance: the share that it receives from uniform attention.
    output: the norm of what the head adds to the residual stream, as a share of the mean over the
        model's heads. None if unknown.
    """

    row: int
    column: int
    mass: Estimate
    chance: float
    output: Estimate | None


@dataclass(frozen=True)
class Specialisation:
    """The labels of all heads, with their scores and their evidence.

    head_labels, evidence: the label and its evidence for every head, by layer. They are empty for a
        layer without places in the image and for a block without attention.
    samples: the scores (samples, heads) by layer and label, on all images, then without each group
        of images.
    all_scores (layers, heads): the scores of every label.
    explained (layers, heads): the variance that offsets explain, see `explained_by_offset`.
    ratios (heads, 2 rows - 1, 2 columns - 1): for each layer, the mean weight at an offset divided
        by that of uniform attention. NaN if no pair of patches has the offset.
    sinks_off_object: the share of the patches' attention on sinks that lie off the object, mean
        over heads. None without masks.
    """

    head_labels: tuple[tuple[HeadLabel, ...], ...]
    evidence: tuple[tuple[LabelEvidence, ...], ...]
    samples: Mapping[int, Mapping[str, Samples]]
    all_scores: Mapping[str, PerHead]
    explained: PerHead
    ratios: tuple[Tensor | None, ...]
    sinks_off_object: Estimate | None

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """Return the label of every head by layer."""
        return tuple(tuple(head.label for head in layer) for layer in self.head_labels)


def specialise(table: Statistics) -> Specialisation:
    """Label every head by the information in its attention that each label explains.

    The statistics must hold the evidence for labels, as those of `Stream` do by default.
    """
    sums = table.evidence.sums
    counts = table.evidence.counts
    output = _mean_over_heads(table, "output")
    sinks_off = _mean_over_heads(table, "sinks_off")
    head_labels: list[tuple[HeadLabel, ...]] = []
    label_evidence: list[tuple[LabelEvidence, ...]] = []
    ratios: list[Tensor | None] = []
    explained: dict[int, Tensor] = {}
    by_label: dict[str, dict[int, Tensor]] = {name: {} for name in LABELS if name in RULES}
    samples: dict[int, dict[str, Samples]] = {}
    for layer, (mass, geometry) in enumerate(zip(table.offset_mass, table.geometries)):
        if mass is None or geometry is None or ("bits", layer) not in sums:
            head_labels.append(())
            label_evidence.append(())
            ratios.append(None)
            continue
        means = {}
        for (name, layer_of_sum), value in sums.items():
            if layer_of_sum == layer:
                means[name] = jackknife_means(value, counts)
        evidence = LayerEvidence(
            place=geometry,
            means=means,
            received=sums["received", layer],
            counts=counts,
            output=output,
        )
        scores = {name: RULES[name](evidence) for name in by_label}
        samples[layer] = scores
        for name, score in scores.items():
            by_label[name][layer] = score[0]  # on all images
        head_labels.append(_labels_of_layer(scores, heads=len(mass)))
        label_evidence.append(evidence.label_evidence(table.images))
        energy = table.moments.mean(("energy", layer))
        explained[layer] = explained_by_offset(mass, energy, geometry)
        ratios.append(_ratios_to_uniform(mass, geometry))
    as_table = partial(per_head, layers=table.depth, heads=table.heads)
    return Specialisation(
        head_labels=tuple(head_labels),
        evidence=tuple(label_evidence),
        samples=samples,
        all_scores={name: as_table(rows) for name, rows in by_label.items()},
        explained=as_table(explained),
        ratios=tuple(ratios),
        sinks_off_object=None if sinks_off is None else _estimate(sinks_off[:, 0], table.images),
    )


def _mean_over_heads(table: Statistics, name: str) -> Float[Tensor, "samples 1"] | None:
    """Return the mean of one kind of evidence over the heads of all layers, None without it."""
    layers = [value for key, value in sorted(table.evidence.sums.items()) if key[0] == name]
    if not layers:
        return None
    return jackknife_means(torch.cat(layers, 1), table.evidence.counts).mean(1, keepdim=True)


def _labels_of_layer(scores: Mapping[str, Samples], *, heads: int) -> tuple[HeadLabel, ...]:
    labels = []
    for head in range(heads):
        labels.append(label_of({name: score[:, head] for name, score in scores.items()}))
    return tuple(labels)


def _ratios_to_uniform(
    mass: Float[Tensor, "heads down across"], geometry: Geometry
) -> Float[Tensor, "heads down across"]:
    """Return the mean weight by offset divided by that of uniform attention; NaN without pairs."""
    uniform = geometry.uniform().offsets
    ratios = mass / mass.sum((1, 2), keepdim=True).clamp_min(_TINY) / uniform
    return ratios.masked_fill(uniform == 0, torch.nan)


def label_of(scores: Mapping[str, Float[Tensor, " samples"]]) -> HeadLabel:
    """Return the label by the rule of this module.

    scores: the scores of each label, on all images, then without each group of images.
    """
    best = _best_label(scores)
    other = _best_rival(scores, best)
    score = scores[best]
    other_score = scores[other] if other else torch.zeros_like(score)
    value = float(score[0])
    other_value = float(other_score[0])
    difference = score - other_score
    margin = float(difference[0])
    half_margin = half_width(difference)
    # half_margin is NaN for a single group of images: then MARGIN alone decides
    is_margin_uncertain = margin <= half_margin
    is_clear = LABELS[best].first or (margin >= MARGIN and not is_margin_uncertain)
    if value >= THRESHOLD and is_clear:
        label = best
    elif value + other_value >= THRESHOLD and other_value >= MARGIN:
        label = MIXED
    else:
        label = UNLABELLED
    half = half_width(score)
    low, high = np.clip((value - half, value + half), 0, 1)  # NaN stays NaN
    return HeadLabel(
        label=label,
        score=value,
        low=float(low),
        high=float(high),
        best=best,
        other=other,
        other_score=other_value,
    )


def _best_label(scores: Mapping[str, Float[Tensor, " samples"]]) -> str:
    """Return the label of the highest score.

    A label with `first`, such as "dead", precedes all others if its score is at least THRESHOLD.
    """

    def rank(name: str) -> tuple[bool, float]:
        value = float(scores[name][0])
        return LABELS[name].first and value >= THRESHOLD, value

    return max(scores, key=rank)


def _best_rival(scores: Mapping[str, Float[Tensor, " samples"]], best: str) -> str:
    """Return the label of the highest score that contradicts the best one, "" if there is none.

    Labels contradict each other if neither is a case of the other.
    """
    rivals = []
    for name in scores:
        is_more_general = name in LABELS[best].within
        is_more_specific = best in LABELS[name].within
        if name != best and not is_more_general and not is_more_specific:
            rivals.append(name)
    return max(rivals, key=lambda name: float(scores[name][0]), default="")


def _estimate(samples: Float[Tensor, " samples"], images: int, *, most: float = 1.0) -> Estimate:
    """Return a value from 0 to `most` with its interval; a single group of images has none."""
    value = float(samples[0])
    half = half_width(samples)
    if math.isnan(half):
        return Estimate(value, n=images)
    return Estimate(value, max(0.0, value - half), min(most, value + half), images)
