"""The score of every label of heads: how much of the information in a head's attention its pattern explains.

A row of attention over n keys with entropy H has log2(n) - H bits: 0 where it is uniform, log2(n) where it is a single
key. A score is explained bits (see patterns.py) / max(1, bits): 1 where the pattern is all that the head does. A
general pattern explains less than a specific one: of a head that attends to the left neighbour, "same row" explains
only the row. Heads of less than one bit, attention on half of the keys, are `uniform` to the extent that they lack.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.evidence import bits_of_part, uniform_received
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.patterns import (
    LARGEST,
    NEIGHBOURHOODS,
    OFFSETS,
    cell_counts,
    offset_bits,
    pair_share,
    place_bits,
)

Samples = Float[Tensor, " samples"]
DEAD: Final = 0.01  # of the mean norm of the model's heads: the norm of a dead head's output is below half of it
_TINY: Final = 1e-30


@dataclass(frozen=True)
class LayerEvidence:
    """The evidence on one layer's heads. means: by name (samples, ..), the mean over all images, then without each
    group of them; groups, counts: sums and numbers of images by group."""

    place: Geometry
    means: Mapping[str, Tensor]
    groups: Mapping[str, Tensor]
    counts: Tensor

    @cached_property
    def bits(self) -> Float[Tensor, "samples heads"]:
        """The information in a row."""
        return self.means["bits"].clamp_min(0)

    @cached_property
    def of_offsets(self) -> dict[str, Tensor]:
        """The bits (samples, heads) that each of OFFSETS explains."""
        return {name: offset_bits(self.means["offsets"], self.place, name) for name in OFFSETS}

    @cached_property
    def of_local(self) -> Float[Tensor, "samples heads"]:
        """The bits that the best neighbourhood explains."""
        found = [torch.zeros_like(self.bits)]
        for name in NEIGHBOURHOODS:
            inside, keys = cell_counts(self.place, name)
            if (inside / keys).mean() <= LARGEST:
                found.append(self.of_offsets[name])
        return torch.stack(found).amax(0)

    @cached_property
    def of_place(self) -> Float[Tensor, "samples heads"]:
        """The bits that fixed places explain: patches' mean weight over the images of the other groups."""
        return place_bits(self.groups["received"], self.counts, self.place)

    @cached_property
    def of_object(self) -> Float[Tensor, "samples heads"]:
        """The bits that the object's mask explains; 0 without masks."""
        if "object" not in self.means:
            return torch.zeros_like(self.bits)
        return bits_of_part(self.means["object"], self.means["object_share"][:, None])

    @cached_property
    def of_background(self) -> Float[Tensor, "samples heads"]:
        """The bits that the patches off the object explain; 0 without masks."""
        if "object" not in self.means:
            return torch.zeros_like(self.bits)
        prefix, place = self.place.prefix, self.place
        mass = self.means["received"][..., prefix:].sum(-1) - self.means["object"]
        chance = uniform_received(place)[prefix:].sum() - self.means["object_share"][:, None]
        return bits_of_part(mass, chance)

    @cached_property
    def of_sinks(self) -> Float[Tensor, "samples heads"]:
        """The bits that few keys chosen by the image explain, beyond fixed places, object and background."""
        known = torch.stack((self.of_object, self.of_background)).amax(0)
        if self.counts.sum() > 1:  # one image cannot tell the places that it chooses from fixed ones
            known = torch.maximum(known, self.of_place)
        return (self.means["sinks"] - known).clamp_min(0)

    @cached_property
    def of_similar(self) -> Float[Tensor, "samples heads"]:
        """The bits that similar colour explains, beyond the offset and how much each key receives."""
        pairs = pair_share(self.place)
        pattern = self.means["offsets"] / pairs.clamp_min(_TINY)
        rows, columns = self.place.span
        pattern[..., rows - 1, columns - 1] = 0  # a patch is similar to itself: this is no part of what offsets explain
        by_offset = (pattern * self.means["similar_offsets"][:, None]).sum((-2, -1))
        chance = self.means["similar_chance"][:, None]
        expected = torch.stack((by_offset, self.means["popular"], chance.expand_as(by_offset))).amax(0)
        return bits_of_part(self.means["similar"], expected)


@dataclass(frozen=True)
class Head:
    """One head of a layer: what the functions of labels take. output: norm of what it adds to the residual stream, as a
    share of the mean of the model's heads, NaN where it is not known."""

    layer: LayerEvidence
    index: int
    output: Samples

    @property
    def bits(self) -> Samples:
        """The information in a row."""
        return self.layer.bits[:, self.index]

    def share(self, bits: Float[Tensor, "samples heads"]) -> Samples:
        """The share of this head's information that these bits of the layer's heads are, at least one bit."""
        return (bits[:, self.index] / self.bits.clamp_min(1)).clamp(0, 1)

    def offset(self, name: str) -> Samples:
        """The share that one of OFFSETS explains."""
        return self.share(self.layer.of_offsets[name])


def uniform_score(head: Head) -> Samples:
    """1 minus the bits of a row, 0 from one bit on: attention confined to half of the keys."""
    return (1 - head.bits).clamp_min(0)


def dead_score(head: Head) -> Samples:
    """1 minus the norm of the head's output, in units of 1 % of the mean of the model's heads."""
    return (1 - head.output / DEAD).clamp_min(0).nan_to_num()


def self_score(head: Head) -> Samples:
    """On the patch itself."""
    return head.offset("self")


def previous_score(head: Head) -> Samples:
    """On the left neighbour."""
    return head.offset("previous")


def next_score(head: Head) -> Samples:
    """On the right neighbour."""
    return head.offset("next")


def above_score(head: Head) -> Samples:
    """On the patch above."""
    return head.offset("above")


def below_score(head: Head) -> Samples:
    """On the patch below."""
    return head.offset("below")


def row_score(head: Head) -> Samples:
    """On the patch's row."""
    return head.offset("row")


def column_score(head: Head) -> Samples:
    """On the patch's column."""
    return head.offset("column")


def left_score(head: Head) -> Samples:
    """On patches to the left, in any row."""
    return head.offset("left")


def right_score(head: Head) -> Samples:
    """On patches to the right, in any row."""
    return head.offset("right")


def up_score(head: Head) -> Samples:
    """On patches further up, in any column."""
    return head.offset("up")


def down_score(head: Head) -> Samples:
    """On patches further down, in any column."""
    return head.offset("down")


def cls_score(head: Head) -> Samples:
    """On the CLS token."""
    return _prefix(head, head.layer.place.cls)


def register_score(head: Head) -> Samples:
    """On registers and distillation token."""
    return _prefix(head, head.layer.place.registers)


def _prefix(head: Head, tokens: tuple[int, ...]) -> Samples:
    """The share that each of these tokens' mass explains, 0 where together they have less than by chance."""
    if not tokens:
        return torch.zeros_like(head.bits)
    mass, chance = head.layer.means["received"][:, head.index, list(tokens)], uniform_received(head.layer.place)[0]
    rest, expected = (1 - mass.sum(-1)).clamp_min(0), 1 - len(tokens) * chance
    bits = torch.xlogy(mass, mass / chance).sum(-1) + torch.xlogy(rest, rest / expected)
    share = bits / math.log(2) / head.bits.clamp_min(1)
    return share.clamp(0, 1).where(mass.sum(-1) > 1 - expected, torch.zeros_like(share))


def position_score(head: Head) -> Samples:
    """On the same places of the image for all queries and images."""
    return head.share(head.layer.of_place)


def sink_score(head: Head) -> Samples:
    """On a few patches that the image, not their place, chooses."""
    return head.share(head.layer.of_sinks)


def object_score(head: Head) -> Samples:
    """On the object's mask."""
    return head.share(head.layer.of_object)


def background_score(head: Head) -> Samples:
    """Off the object's mask."""
    return head.share(head.layer.of_background)


def similar_score(head: Head) -> Samples:
    """On patches of similar colour."""
    return head.share(head.layer.of_similar)


def local_score(head: Head) -> Samples:
    """On the neighbourhood."""
    return head.share(head.layer.of_local)
