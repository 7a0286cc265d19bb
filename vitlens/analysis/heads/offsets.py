"""Patterns of offsets from query to key, and the information that they explain."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.heads.geometry import Geometry

DISCS: Final = (2, 5, 8, 13)  # squared radii of neighbourhoods, in patches
_STEPS: Final = 50  # steps of bisection, enough for the precision of float64
_STRONGEST: Final = 40.0  # largest log ratio of the weights inside and outside a pattern, in nats
_TINY: Final = 1e-30  # avoids a division by 0
_NO_VARIANCE: Final = 1e-6  # a variance below this part of the energy is rounding


def _is_within(down: Tensor, across: Tensor, *, square: int) -> Tensor:
    """Return True for offsets in a disc of this squared radius, in patches."""
    return down**2 + across**2 <= square


# by name: True for the offsets (down, across) of the pattern, key minus query, in patches
OFFSETS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "self": lambda down, across: (down == 0) & (across == 0),
    "previous": lambda down, across: (down == 0) & (across == -1),
    "next": lambda down, across: (down == 0) & (across == 1),
    "above": lambda down, across: (down == -1) & (across == 0),
    "below": lambda down, across: (down == 1) & (across == 0),
    "same row": lambda down, _across: down == 0,
    "same column": lambda _down, across: across == 0,
    "left": lambda _down, across: across < 0,
    "right": lambda _down, across: across > 0,
    "up": lambda down, _across: down < 0,
    "down": lambda down, _across: down > 0,
    **{f"within {square}": partial(_is_within, square=square) for square in DISCS},
}


@lru_cache(maxsize=256)
def key_counts(geometry: Geometry, name: str) -> tuple[Tensor, Tensor]:
    """Return the number of keys at offsets of this name, and of all keys, for each query patch."""
    pairs = geometry.pairs()  # (calls, query, key)
    row_step, column_step = geometry.spacing
    patches = torch.arange(geometry.patches)
    rows = patches // geometry.grid[1]
    columns = patches % geometry.grid[1]
    down = (rows - rows[:, None]) * row_step  # (query, key)
    across = (columns - columns[:, None]) * column_step
    inside = (pairs & OFFSETS[name](down, across)).sum(-1)
    is_query = pairs.any(-1)
    keys = pairs.sum(-1) + geometry.prefix
    return inside[is_query].double(), keys[is_query].double()


def offset_bits(
    mass: Float[Tensor, "*heads down across"], geometry: Geometry, name: str
) -> Float[Tensor, "*heads"]:
    """Return the bits that a pattern of offsets explains.

    The pattern predicts one weight for all keys inside it, and another weight for all keys outside.
    Its strength is the logarithm of the ratio of both weights. The most likely strength is the one
    at which the predicted mass inside, averaged over queries, is the observed mass.
    """
    rows, columns = geometry.span
    down = torch.arange(1 - rows, rows)[:, None]
    across = torch.arange(1 - columns, columns)
    mass_inside = (mass * OFFSETS[name](down, across)).sum((-2, -1)).double()
    # Queries with the same numbers of keys have the same prediction. Each kind of query is computed
    # once, and weighted by its share of all queries.
    counts_by_query = torch.stack(key_counts(geometry, name), 1)
    kinds, queries = counts_by_query.unique(dim=0, return_counts=True)
    inside, keys = kinds.unbind(1)
    share = queries / queries.sum()
    if not (inside > 0).any():
        return torch.zeros_like(mass_inside)
    # bisection: the predicted mass inside grows with the strength
    low = torch.zeros_like(mass_inside)
    high = torch.full_like(mass_inside, _STRONGEST)
    for _ in range(_STEPS):
        strength = (low + high) / 2
        is_too_weak = _predicted_inside(strength, inside, keys, share) < mass_inside
        low = torch.where(is_too_weak, strength, low)
        high = torch.where(is_too_weak, high, strength)
    # log(predicted weight / uniform weight) is strength - log(normaliser) for a key inside, and
    # - log(normaliser) for a key outside or in the prefix. All masses sum to 1.
    normalisers = (inside * low[..., None].exp() + keys - inside) / keys
    nats = mass_inside * low - (share * normalisers.log()).sum(-1)
    bits: Tensor = (nats / math.log(2)).clamp_min(0)
    return bits


def _predicted_inside(
    strength: Float[Tensor, "*heads"],
    inside: Float[Tensor, " kinds"],
    keys: Float[Tensor, " kinds"],
    share: Float[Tensor, " kinds"],
) -> Float[Tensor, "*heads"]:
    """Return the predicted mass inside a pattern of this strength, averaged over queries.

    inside, keys: the number of keys inside the pattern, and of all keys, for each kind of query.
    share: the share of each kind among all queries.
    """
    weight_inside = inside * strength[..., None].exp()
    mass_inside: Tensor = (share * weight_inside / (weight_inside + keys - inside)).sum(-1)
    return mass_inside


def explained_by_offset(
    mass: Float[Tensor, "heads down across"], energy: Float[Tensor, " heads"], geometry: Geometry
) -> Float[Tensor, " heads"]:
    """Return the share of the weights' variance that the offset from query to key explains (R²).

    The variance is around uniform attention, which differs between the queries of incomplete
    windows. If attention is uniform, the share is 1.

    mass: the mean attention by offset.
    energy: the sum of squared weights on patches, mean over queries.
    """
    uniform = geometry.uniform()
    total_mass = mass.sum((1, 2))
    deviations = mass - total_mass[:, None, None] * uniform.offsets
    # n keys share the deviation d of their offset: the sum of their squares is n (d / n)² = d² / n
    explained_variance = (deviations.square() / uniform.pairs.clamp_min(_TINY)).sum((1, 2))
    variance = energy - total_mass.square() * uniform.energy
    share = (explained_variance / variance).clamp_max(1.0)
    is_uniform = variance <= _NO_VARIANCE * energy
    explained: Tensor = torch.where(is_uniform, 1.0, share)
    return explained
