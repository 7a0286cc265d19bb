"""The bits that a simple pattern explains of the attention of heads: keys at some offsets, or at fixed places.

A pattern predicts a row of attention; what it explains is its gain in mean log-likelihood over uniform attention, the
mean over rows of the sum over keys of w log2(p / uniform), at the most likely strength of the pattern.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.heads.evidence import uniform_received
from vitlens.analysis.heads.geometry import Geometry

Cell = Callable[[Tensor, Tensor], Tensor]  # offsets down and across, patches -> whether they belong to the pattern

_TINY: Final = 1e-30
_STEPS: Final = 50  # of bisection: more than the precision of float64
_CERTAIN: Final = 1e6  # images that a prediction of a group from itself counts as
_STRONGEST: Final = 40.0  # nats, of a key in the pattern over one outside it
LARGEST: Final = 0.25  # of the keys: a larger neighbourhood is not local


def _disc(square: int, down: Tensor, across: Tensor) -> Tensor:
    return down**2 + across**2 <= square


NEIGHBOURHOODS: Final[Mapping[str, Cell]] = {f"within {square}": partial(_disc, square) for square in (2, 5, 8, 13)}
OFFSETS: Final[Mapping[str, Cell]] = {
    "self": lambda down, across: (down == 0) & (across == 0),
    "previous": lambda down, across: (down == 0) & (across == -1),
    "next": lambda down, across: (down == 0) & (across == 1),
    "above": lambda down, across: (down == -1) & (across == 0),
    "below": lambda down, across: (down == 1) & (across == 0),
    "row": lambda down, across: (down == 0) & (across == across),
    "column": lambda down, across: (across == 0) & (down == down),
    "left": lambda down, across: (across < 0) & (down == down),
    "right": lambda down, across: (across > 0) & (down == down),
    "up": lambda down, across: (down < 0) & (across == across),
    "down": lambda down, across: (down > 0) & (across == across),
    **NEIGHBOURHOODS,
}


@lru_cache(maxsize=256)
def cell_counts(place: Geometry, name: str) -> tuple[Tensor, Tensor]:
    """For each patch that is a query: its keys at the offsets of this name, and all of its keys."""
    pairs = place.pairs()
    inside = (pairs & _cell(place, name)).sum(-1)
    real = pairs.any(-1)
    return inside[real].double(), (pairs.sum(-1)[real] + place.prefix).double()


def _cell(place: Geometry, name: str) -> Bool[Tensor, "query key"]:
    (rows, columns), (tall, wide) = place.grid, place.spacing
    index = torch.arange(rows * columns)
    down = (index // columns - (index // columns)[:, None]) * tall
    across = (index % columns - (index % columns)[:, None]) * wide
    return OFFSETS[name](down, across)


@lru_cache(maxsize=32)
def pair_share(place: Geometry) -> Float[Tensor, "down across"]:
    """The mean number of keys of a patch at each offset."""
    pairs = place.pairs()
    return place.by_offset(pairs.double()).sum(0) / pairs.any(-1).sum()


def offset_bits(mass: Float[Tensor, "*heads down across"], place: Geometry, name: str) -> Float[Tensor, "*heads"]:
    """The bits that a pattern of offsets explains: keys in it have all the same weight, those outside another one.

    The strength, the logarithm t of the ratio of both weights, is the most likely one: that at which the pattern gives
    its keys, on average over queries, the mass that they have.
    """
    (rows, columns) = place.span
    down, across = torch.arange(1 - rows, rows)[:, None], torch.arange(1 - columns, columns)
    got = (mass * OFFSETS[name](down, across)).sum((-2, -1)).double()
    (inside, keys), weight = _distinct(*cell_counts(place, name))
    if not (inside > 0).any():
        return torch.zeros_like(got)
    low, high = torch.zeros_like(got), torch.full_like(got, _STRONGEST)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        strong = inside * middle[..., None].exp()
        given = (weight * strong / (strong + keys - inside)).sum(-1)
        low, high = torch.where(given < got, middle, low), torch.where(given < got, high, middle)
    total = (inside * low[..., None].exp() + keys - inside) / keys
    return ((got * low - (weight * total.log()).sum(-1)) / math.log(2)).clamp_min(0)


def _distinct(inside: Tensor, keys: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Queries with the same numbers of keys taken together, with their share of all."""
    found, count = torch.stack((inside, keys), 1).unique(dim=0, return_counts=True)
    return (found[:, 0], found[:, 1]), count / count.sum()


def place_bits(received: Float[Tensor, "groups heads keys"], counts: Tensor, place: Geometry) -> Tensor:
    """The bits (samples, heads) that fixed places explain, each group's images predicted from the other groups'.

    The prediction is mixed with uniform attention, with the weight of one image, as an unseen place is not impossible.
    A single group is predicted from itself: its places cannot be told from sinks.
    """
    used = [group for group in range(len(counts)) if counts[group] > 0]
    uniform = uniform_received(place)[place.prefix :]
    uniform = uniform / uniform.sum().clamp_min(_TINY)
    sums = received[used][..., place.prefix :]
    numbers = counts[used]
    left = [list(range(len(used)))] + [[g for g in range(len(used)) if g != out] for out in range(len(used))]
    samples = []
    for chosen in left if len(used) > 1 else left[:1]:
        total, images = sums[chosen].sum(0), numbers[chosen].sum()
        alone = len(chosen) == 1
        own = 0 if alone else sums[chosen]
        others = (_CERTAIN * images if alone else images - numbers[chosen]).reshape(-1, 1, 1)
        known = (total - own).expand(len(chosen), -1, -1)
        known = known / known.sum(-1, keepdim=True).clamp_min(_TINY)
        mixed = (others * known + uniform) / (others + 1)
        gain = (sums[chosen] * (mixed / uniform).log2()).sum((0, -1)) / images
        samples.append(gain.clamp_min(0))
    return torch.stack(samples)


def left_out(sums: Float[Tensor, "groups *rest"], counts: Tensor) -> Float[Tensor, "samples *rest"]:
    """The mean over all images, then the means without the images of each group."""
    total, images = sums.sum(0), counts.sum()
    used = [group for group in range(len(counts)) if 0 < counts[group] < images]
    return torch.stack([total / images, *((total - sums[group]) / (images - counts[group]) for group in used)])
