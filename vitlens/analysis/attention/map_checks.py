"""Information in the maps of any method, and its dependence on the image.

Information is in bits relative to a uniform map, as for the labels of heads
(analysis/heads/specialisation.py).
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.shapes import Maps

PerMap = Float[Tensor, " batch"]
FEWEST = 8  # fewer images are too few to predict a map from the others
_TINY = 1e-30  # avoids a division by 0


def map_bits(maps: Maps) -> PerMap:
    """Return the information of each map: log2 of the number of its patches minus its entropy.

    It is 0 for a uniform map, and for a map without positive values.
    """
    shares = _shares(maps)
    ratios_to_uniform = shares * shares.shape[1]
    return (shares * ratios_to_uniform.clamp_min(_TINY).log2()).sum(1).clamp_min(0)


def fixed_share(maps: Maps) -> PerMap:
    """Return the share of each map's information that the maps of other images explain.

    Their mean predicts the map, mixed with a uniform map that has the weight of one image. The
    share is the gain in log-likelihood over a uniform map, divided by the information (at least one
    bit). There must be at least one other image.
    """
    shares = _shares(maps)
    patches = shares.shape[1]
    sum_of_others = shares.sum(0) - shares
    # a uniform map takes the place of the map itself, so there are as many maps as before
    predicted = (sum_of_others + 1 / patches) / len(maps)
    gain = (shares * (predicted * patches).log2()).sum(1)
    return (gain / map_bits(maps).clamp_min(1)).clamp(0, 1)


def alike(maps: Float[Tensor, "batch heads rows columns"]) -> PerMap:
    """Return the mean cosine similarity of the maps of an image's heads, 1 for one head."""
    directions = F.normalize(maps.flatten(2).double(), dim=-1)
    heads = directions.shape[1]
    if heads == 1:
        return torch.ones(len(directions), dtype=torch.float64)
    # the square of the sum holds all pairs of heads, and each head with itself
    all_pairs = directions.sum(1).square().sum(-1)
    same_head = directions.square().sum((1, 2))
    return ((all_pairs - same_head) / (heads * (heads - 1))).clamp(-1, 1)


def _shares(maps: Maps) -> Float[Tensor, "batch patches"]:
    """Return positive values as shares of their sum, uniform shares for a map without any."""
    positive = maps.flatten(1).double().clamp_min(0)
    total = positive.sum(1, keepdim=True)
    uniform = torch.full_like(positive, 1 / positive.shape[1])
    return torch.where(total > 0, positive / total.clamp_min(_TINY), uniform)
