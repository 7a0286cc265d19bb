"""Sinks: the few keys, or tokens, that stand out from the rest by more than chance of their own kind."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.heads.sharpness import ascending

DEVIATIONS = 5  # median absolute deviations above the median
_NOISE = 1e-4  # of the median: equal values differ by rounding, and their median deviation is nothing else


def stand_out(values: Float[Tensor, "*leading token"]) -> Bool[Tensor, "*leading token"]:
    """Which values exceed their row's median by more than 5 median absolute deviations (and by 0.01 % of it)."""
    middle = median(values)[..., None]
    deviation = median((values - middle).abs())[..., None]
    return values - middle > torch.maximum(DEVIATIONS * deviation, _NOISE * middle.abs())


def median(values: Float[Tensor, "*leading token"]) -> Float[Tensor, "*leading"]:
    """The middle of each row, the mean of the two middle ones where their number is even (torch takes the lower)."""
    ordered, size = ascending(values), values.shape[-1]
    return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2
