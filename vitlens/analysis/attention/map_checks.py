"""What maps hold, whatever method made them: information in bits relative to a uniform map, as for
the labels of heads (analysis/heads/specialisation.py), and how much of it fixed places explain.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.shapes import Maps

PerMap = Float[Tensor, " batch"]
FEWEST = 8  # images from which on other images predict a map
_TINY = 1e-30


def map_bits(maps: Maps) -> PerMap:
    """Return the information of each map: log2 of its patches minus its entropy, 0 for a uniform
    map and for one without positive values.
    """
    shares = _shares(maps)
    return (shares * (shares * shares.shape[1]).clamp_min(_TINY).log2()).sum(1).clamp_min(0)


def fixed_share(maps: Maps) -> PerMap:
    """Return the share of each map's information, at least one bit, that the mean of the maps of
    other images, of which there is one, explains: its gain in log-likelihood over a uniform map.

    The mean is mixed with a uniform map with the weight of one image.
    """
    shares = _shares(maps)
    others = (shares.sum(0) - shares + 1 / shares.shape[1]) / len(maps)
    gain = (shares * (others * shares.shape[1]).log2()).sum(1)
    return (gain / map_bits(maps).clamp_min(1)).clamp(0, 1)


def alike(maps: Float[Tensor, "batch heads rows columns"]) -> PerMap:
    """Return the mean cosine similarity of the maps of different heads of each image; 1 for a
    single head.
    """
    unit = F.normalize(maps.flatten(2).double(), dim=-1)
    heads = unit.shape[1]
    if heads == 1:
        return torch.ones(len(unit), dtype=torch.float64)
    return (
        (unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))) / (heads * (heads - 1))
    ).clamp(-1, 1)


def _shares(maps: Maps) -> Float[Tensor, "batch patches"]:
    """Positive values as shares of their sum; uniform where there are none."""
    positive = maps.flatten(1).double().clamp_min(0)
    total = positive.sum(1, keepdim=True)
    uniform = torch.full_like(positive, 1 / positive.shape[1])
    return torch.where(total > 0, positive / total.clamp_min(_TINY), uniform)
