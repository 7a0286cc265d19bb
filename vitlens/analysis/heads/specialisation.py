"""The specialisation of each head: how well every label describes it, the label that it gets, and
what that rests on.

A row of attention over n keys with entropy H has log2(n) - H bits of information: 0 where it is
uniform, log2(n) where it is a single key. A pattern predicts a row; what it explains is its gain in
mean log-likelihood over uniform attention, the mean over rows of the sum over keys of w log2(p /
uniform), at the most likely strength of the pattern. The score of a label is explained bits /
max(1, bits): 1 where the pattern is all that the head does. A general pattern explains less than a
specific one: of a head that attends to the left neighbour, "same row" explains only the row. Heads
of less than one bit, attention on half of the keys, are `uniform` to the extent that they lack.

A head gets the label of the highest score if that explains most of the information (a score of at
least THRESHOLD), and is clearly above the next: by MARGIN and more than the 95 % interval of the
difference over images. Labels that contain one another do not compete: a head that attends to its
left neighbour is also local, and gets the higher of both. Where only the two best together explain
that much, the lower at least MARGIN, or both do alone, the head is MIXED; all others are
UNLABELLED. Scores are recomputed without each group of images; their spread gives intervals over
images (delete-a-group jackknife).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.registry import LABELS, MARGIN, MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.rows import PerHead
from vitlens.analysis.heads.statistics import Statistics, bits_of_part, per_head
from vitlens.uncertainty import Estimate

Samples = Float[Tensor, "samples heads"]  # over all images, then without each group of them

# of the mean norm of the model's heads: the norm of a dead head's output is below half of it
DEAD: Final = 0.01
LARGEST: Final = 0.25  # of the keys: a larger neighbourhood is not local
DISCS: Final = (2, 5, 8, 13)  # squared radii of neighbourhoods
_TINY: Final = 1e-30
_STEPS: Final = 50  # of bisection: more than the precision of float64
_CERTAIN: Final = 1e6  # images that a prediction of a group from itself counts as
_STRONGEST: Final = 40.0  # nats, of a key in the pattern over one outside it


def _is_within(down: Tensor, across: Tensor, *, square: int) -> Tensor:
    """Return which offsets lie in a disc. square: its squared radius, in patches."""
    return down**2 + across**2 <= square


# offsets down and across in patches, key minus query -> whether they belong to the pattern
OFFSETS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "self": lambda down, across: (down == 0) & (across == 0),
    "previous": lambda down, across: (down == 0) & (across == -1),
    "next": lambda down, across: (down == 0) & (across == 1),
    "above": lambda down, across: (down == -1) & (across == 0),
    "below": lambda down, across: (down == 1) & (across == 0),
    "same row": lambda down, across: (down == 0) & (across == across),
    "same column": lambda down, across: (across == 0) & (down == down),
    "left": lambda down, across: (across < 0) & (down == down),
    "right": lambda down, across: (across > 0) & (down == down),
    "up": lambda down, across: (down < 0) & (across == across),
    "down": lambda down, across: (down > 0) & (across == across),
    **{f"within {square}": partial(_is_within, square=square) for square in DISCS},
}


@dataclass(frozen=True)
class LayerEvidence:
    """The evidence on one layer's heads. means: by name (samples, ..), see HeadEvidence; received,
    counts: sums of what each key receives and numbers of images by group; output: mean over the
    model's heads of the norm of what each adds to the residual stream (samples, 1), None where it
    is not known.
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
        """1 minus the norm of the head's output, in units of 1 % of the mean of the model's
        heads."""
        if self.output is None or "output" not in self.means:
            return torch.zeros_like(self.bits)
        return (
            (1 - self.means["output"] / self.output[0].clamp_min(_TINY) / DEAD)
            .clamp_min(0)
            .nan_to_num()
        )

    def of_offsets(self, name: str) -> Samples:
        """Return the bits that one of OFFSETS explains."""
        return offset_bits(self.means["offsets"], self.place, name)

    def of_local(self) -> Samples:
        """Return the bits that the best neighbourhood explains."""
        best = torch.zeros_like(self.bits)
        for name in (f"within {square}" for square in DISCS):
            inside, keys = _cell_counts(self.place, name)
            if (inside / keys).mean() <= LARGEST:
                best = torch.maximum(best, self.of_offsets(name))
        return best

    def of_tokens(self, tokens: tuple[int, ...]) -> Samples:
        """Return the bits that each of these prefix tokens' mass explains, 0 where together they
        have less than by chance.
        """
        mass = self.means["received"][..., list(tokens)]
        chance = self.place.uniform().received[0]
        rest = (1 - mass.sum(-1)).clamp_min(0)
        expected = 1 - len(tokens) * chance
        bits = (
            torch.xlogy(mass, mass / chance).sum(-1) + torch.xlogy(rest, rest / expected)
        ) / math.log(2)
        return bits.where(mass.sum(-1) > 1 - expected, torch.zeros_like(bits))

    @cached_property
    def of_place(self) -> Samples:
        """Return the bits that fixed places explain, each group's images predicted from the other
        groups'.

        The prediction is mixed with uniform attention, with the weight of one image, as an unseen
        place is not impossible. A single group is predicted from itself: its places cannot be told
        from sinks.
        """
        uniform = self.place.uniform().received[self.place.prefix :]
        uniform = uniform / uniform.sum().clamp_min(_TINY)
        used = self.counts > 0
        sums = self.received[used][..., self.place.prefix :]
        numbers = self.counts[used]
        every = torch.ones(len(sums), dtype=torch.bool)
        samples = []
        left = [every, *~torch.eye(len(sums), dtype=torch.bool)] if len(sums) > 1 else [every]
        for chosen in left:
            total = sums[chosen].sum(0)
            images = numbers[chosen].sum()
            alone = int(chosen.sum()) == 1
            others = (_CERTAIN * images if alone else images - numbers[chosen]).reshape(-1, 1, 1)
            known = total[None] if alone else total - sums[chosen]
            known = known / known.sum(-1, keepdim=True).clamp_min(_TINY)
            mixed = (others * known + uniform) / (others + 1)
            gain = (sums[chosen] * (mixed / uniform).log2()).sum((0, -1)) / images
            samples.append(gain.clamp_min(0))
        return torch.stack(samples)

    def of_mask(self, *, background: bool) -> Samples:
        """Return the bits that the object's mask, or the patches off it, explain; 0 without
        masks."""
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
        """Return the bits that patches of exceptional norm explain; 0 where no stream was seen
        before the layer.
        """
        if "high_norm" not in self.means:
            return torch.zeros_like(self.bits)
        return bits_of_part(self.means["high_norm"], self.means["high_norm_share"][:, None])

    def of_border(self) -> Samples:
        """Return the bits that the outermost patches explain."""
        edge = torch.ones(self.place.map_grid, dtype=torch.bool)
        edge[1:-1, 1:-1] = False
        keys = edge.flatten()
        prefix = self.place.prefix
        mass = self.means["received"][..., prefix:][..., keys].sum(-1)
        return bits_of_part(mass, self.place.uniform().received[prefix:][keys].sum())

    def of_sinks(self) -> Samples:
        """Return the bits that few keys chosen by the image explain, beyond fixed places, object
        and background.
        """
        known = torch.maximum(self.of_mask(background=False), self.of_mask(background=True))
        if (
            self.counts.sum() > 1
        ):  # one image cannot tell the places that it chooses from fixed ones
            known = torch.maximum(known, self.of_place)
        return (self.means["sinks"] - known).clamp_min(0)

    def of_similar(self) -> Samples:
        """Return the bits that similar colour explains, beyond the offset and how much each key
        receives.
        """
        pattern = self.means["offsets"] / self.place.uniform().pairs.clamp_min(_TINY)
        rows, columns = self.place.span
        pattern[..., rows - 1, columns - 1] = (
            0  # a patch is similar to itself: this is no part of what offsets explain
        )
        by_offset = (pattern * self.means["similar_offsets"][:, None]).sum((-2, -1))
        chance = self.means["similar_chance"][:, None]
        expected = torch.stack(
            (by_offset, self.means["popular"], chance.expand_as(by_offset))
        ).amax(0)
        return bits_of_part(self.means["similar"], expected)

    def marks(self, images: int) -> tuple["Marks", ...]:
        """Return what the labels of the heads rest on, from so many images."""
        prefix = self.place.prefix
        columns = self.place.map_grid[1]
        mass = self.means["received"][..., prefix:]
        chance = self.place.uniform().received[prefix:]
        norms = None
        if self.output is not None and "output" in self.means:
            norms = self.means["output"] / self.output.clamp_min(_TINY)
        found = []
        for head, most in enumerate(mass[0].argmax(-1).tolist()):
            row, column = divmod(most, columns)
            norm = None if norms is None else _estimate(norms[:, head], images, most=math.inf)
            found.append(
                Marks(
                    row, column, _estimate(mass[:, head, most], images), float(chance[most]), norm
                )
            )
        return tuple(found)


def _share_of_offsets(layer: LayerEvidence, *, name: str) -> Samples:
    """Return the share of the information that a pattern of offsets explains."""
    return layer.share(layer.of_offsets(name))


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
    """The label of one head. score: of that label, or the highest for `mixed` and `no single
    pattern`; low, high: its 95 % interval over images, NaN for one image; best, other: the label of
    the highest score, and the highest of those that contradict it ("" where there is none);
    other_score: of the latter.
    """

    label: str
    score: float
    low: float
    high: float
    best: str
    other: str
    other_score: float


@dataclass(frozen=True)
class Marks:
    """What the label of one head rests on. row, column: the patch that receives most attention, in
    the mean over images; mass: the share of the patches' attention that it receives; chance: that
    of uniform attention; output: norm of what the head adds to the residual stream, a share of the
    mean of the model's heads (None: not known).
    """

    row: int
    column: int
    mass: Estimate
    chance: float
    output: Estimate | None


@dataclass(frozen=True)
class Specialisation:
    """given, marks: the label of every head by layer and what it rests on, empty for a layer whose
    attention has no place in the image and for a block without attention; samples: by layer and
    label (samples, heads), over all images and without each group of them; all_scores: (layers,
    heads) of every label; explained: (layers, heads), see explained_by_offset; ratios: by layer
    (heads, 2 rows - 1, 2 columns - 1), the mean weight at an offset divided by uniform attention's,
    NaN where no pair of patches has the offset; sinks_off_object: the share of the patches'
    attention on sinks that lie off the object, the mean over heads, None without masks.
    """

    given: tuple[tuple[HeadLabel, ...], ...]
    marks: tuple[tuple[Marks, ...], ...]
    samples: Mapping[int, Mapping[str, Samples]]
    all_scores: Mapping[str, PerHead]
    explained: PerHead
    ratios: tuple[Tensor | None, ...]
    sinks_off_object: Estimate | None

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """Return the label of every head by layer."""
        return tuple(tuple(one.label for one in layer) for layer in self.given)


def specialise(table: Statistics) -> Specialisation:
    """Label every head by the information in its attention that each label explains; the statistics
    must hold the evidence for labels, as those of `Stream` do unless it is told otherwise.
    """
    sums = table.evidence.sums
    counts = table.evidence.counts

    def over_heads(name: str) -> Float[Tensor, "samples 1"] | None:
        found = [value for (each, _), value in sorted(sums.items()) if each == name]
        return left_out(torch.cat(found, 1), counts).mean(1, keepdim=True) if found else None

    output = over_heads("output")
    off = over_heads("sinks_off")
    given: list[tuple[HeadLabel, ...]] = []
    marks: list[tuple[Marks, ...]] = []
    ratios: list[Tensor | None] = []
    explained: dict[int, Tensor] = {}
    every: dict[str, dict[int, Tensor]] = {name: {} for name in LABELS if name in RULES}
    samples: dict[int, dict[str, Samples]] = {}
    for layer, (mass, place) in enumerate(zip(table.offset_mass, table.geometries)):
        if mass is None or place is None or ("bits", layer) not in sums:
            given.append(())
            marks.append(())
            ratios.append(None)
            continue
        means = {name: left_out(value, counts) for (name, at), value in sums.items() if at == layer}
        evidence = LayerEvidence(place, means, sums["received", layer], counts, output)
        samples[layer] = scores = {name: RULES[name](evidence) for name in every}
        for name, score in scores.items():
            every[name][layer] = score[0]
        given.append(
            tuple(
                label_of({name: score[:, head] for name, score in scores.items()})
                for head in range(len(mass))
            )
        )
        marks.append(evidence.marks(table.images))
        explained[layer] = explained_by_offset(mass, table.moments.mean(("energy", layer)), place)
        uniform = place.uniform().offsets
        ratio = mass / mass.sum((1, 2), keepdim=True).clamp_min(_TINY) / uniform
        ratios.append(ratio.masked_fill(uniform == 0, torch.nan))
    as_table = partial(per_head, layers=table.depth, heads=table.heads)
    return Specialisation(
        tuple(given),
        tuple(marks),
        samples,
        {name: as_table(rows) for name, rows in every.items()},
        as_table(explained),
        tuple(ratios),
        None if off is None else _estimate(off[:, 0], table.images),
    )


def label_of(scores: Mapping[str, Float[Tensor, " samples"]]) -> HeadLabel:
    """Return the label by the rule above; scores: of each label, over all images, then without each
    group of them.
    """
    best = max(
        scores,
        key=lambda name: (
            LABELS[name].first and bool(scores[name][0] >= THRESHOLD),
            scores[name][0],
        ),
    )
    # those that contradict it: neither is a case of the other
    rivals = [
        name
        for name in scores
        if name not in (best, *LABELS[best].within) and best not in LABELS[name].within
    ]
    other = max(rivals, key=lambda name: scores[name][0]) if rivals else ""
    score = scores[best]
    below = scores[other] if other else torch.zeros_like(scores[best])
    half = half_width(score)
    of_margin = half_width(score - below)
    value = float(score[0])
    margin = float((score - below)[0])
    clear = LABELS[best].first or (margin >= MARGIN and not margin <= of_margin)
    if value >= THRESHOLD and clear:
        label = best
    elif value + float(below[0]) >= THRESHOLD and float(below[0]) >= MARGIN:
        label = MIXED
    else:
        label = UNLABELLED
    low, high = (float(end) for end in np.clip((value - half, value + half), 0, 1))  # NaN stays
    return HeadLabel(label, value, low, high, best, other, float(below[0]))


@lru_cache(maxsize=256)
def _cell_counts(place: Geometry, name: str) -> tuple[Tensor, Tensor]:
    """For each patch that is a query: its keys at the offsets of this name, and all of its keys."""
    pairs, (rows, columns), (tall, wide) = place.pairs(), place.grid, place.spacing
    index = torch.arange(rows * columns)
    down = (index // columns - (index // columns)[:, None]) * tall
    across = (index % columns - (index % columns)[:, None]) * wide
    inside = (pairs & OFFSETS[name](down, across)).sum(-1)
    real = pairs.any(-1)
    return inside[real].double(), (pairs.sum(-1)[real] + place.prefix).double()


def offset_bits(
    mass: Float[Tensor, "*heads down across"], place: Geometry, name: str
) -> Float[Tensor, "*heads"]:
    """Return the bits that a pattern of offsets explains: keys in it have all the same weight,
    those outside another one.

    The strength, the logarithm t of the ratio of both weights, is the most likely one: that at
    which the pattern gives its keys, on average over queries, the mass that they have.
    """
    (rows, columns) = place.span
    down = torch.arange(1 - rows, rows)[:, None]
    across = torch.arange(1 - columns, columns)
    got = (mass * OFFSETS[name](down, across)).sum((-2, -1)).double()
    # queries with the same numbers of keys taken together, with their share of all
    found, count = torch.stack(_cell_counts(place, name), 1).unique(dim=0, return_counts=True)
    (inside, keys), weight = found.unbind(1), count / count.sum()
    if not (inside > 0).any():
        return torch.zeros_like(got)
    low = torch.zeros_like(got)
    high = torch.full_like(got, _STRONGEST)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        strong = inside * middle[..., None].exp()
        given = (weight * strong / (strong + keys - inside)).sum(-1)
        low = torch.where(given < got, middle, low)
        high = torch.where(given < got, high, middle)
    total = (inside * low[..., None].exp() + keys - inside) / keys
    bits: Tensor = ((got * low - (weight * total.log()).sum(-1)) / math.log(2)).clamp_min(0)
    return bits


def left_out(sums: Float[Tensor, "groups *rest"], counts: Tensor) -> Float[Tensor, "samples *rest"]:
    """Return the mean over all images, then the means without the images of each group."""
    total = sums.sum(0)
    images = counts.sum()
    used = [group for group in range(len(counts)) if 0 < counts[group] < images]
    return torch.stack(
        [total / images, *((total - sums[group]) / (images - counts[group]) for group in used)]
    )


def half_width(samples: Float[Tensor, " samples"]) -> float:
    """Half the width of the 95 % interval over images, from a value and those without each group
    (Student's t of the delete-a-group jackknife); NaN without groups.
    """
    left = samples[1:]
    groups = len(samples) - 1
    if groups < 2:
        return math.nan
    error = ((groups - 1) / groups * (left - left.mean()).square().sum()).sqrt()
    from scipy import stats  # half a second, which not every command needs

    return float(stats.t.ppf(0.975, groups - 1) * error)


def explained_by_offset(
    mass: Float[Tensor, "heads down across"], energy: Float[Tensor, " heads"], place: Geometry
) -> Float[Tensor, " heads"]:
    """Return the share of the weights' variance that the offset from query to key explains, from 0
    to 1 (R²).

    mass: mean attention by offset; energy: the mean over queries of the sum of squared weights on
    patches. The variance is around uniform attention, which in incomplete windows differs between
    queries. 1 where attention is uniform.
    """
    uniform = place.uniform()
    whole = mass.sum((1, 2))
    fitted = (
        (mass - whole[:, None, None] * uniform.offsets).square() / uniform.pairs.clamp_min(_TINY)
    ).sum((1, 2))
    total = energy - whole.square() * uniform.energy
    explained: Tensor = torch.where(total <= 1e-6 * energy, 1.0, (fitted / total).clamp_max(1.0))
    return explained


def _estimate(samples: Float[Tensor, " samples"], images: int, *, most: float = 1.0) -> Estimate:
    """Return a value from 0 to `most` with its interval; without one for a single group of
    images."""
    value = float(samples[0])
    half = half_width(samples)
    if math.isnan(half):
        return Estimate(value, n=images)
    return Estimate(value, max(0.0, value - half), min(most, value + half), images)
