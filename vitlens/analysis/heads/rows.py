"""Statistics of single rows of attention weights: entropy, sparsity, outlying keys.

Each is a number for one row of weights that sums to 1. Formulas are arranged to be precise in fp32 also for nearly
uniform rows, where the textbook forms subtract almost equal numbers.
"""

import math
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Row = Float[Tensor, "*leading key"]
Number = Float[Tensor, "*leading"]

DEVIATIONS = 5  # median absolute deviations above the median
_ROUNDING = 1e-4  # of the median: equal values differ by rounding, as does their median absolute deviation


class Rows:
    """Rows of attention weights; values that several statistics need are computed once."""

    def __init__(self, weights: Row) -> None:
        self.weights = weights

    @cached_property
    def entropy(self) -> Number:
        """Entropy of each row, nats."""
        return entropy(self.weights)


def row_entropy(rows: Rows) -> Number:
    """Entropy, nats."""
    return rows.entropy


def row_normalised_entropy(rows: Rows) -> Number:
    """Entropy divided by that of uniform attention on as many keys."""
    return rows.entropy / max(math.log(rows.weights.shape[-1]), 1e-12)


def row_effective_keys(rows: Rows) -> Number:
    """The number of keys with equal weights that have this entropy."""
    return rows.entropy.exp()


def row_hoyer(rows: Rows) -> Number:
    """Hoyer's sparsity."""
    return hoyer(rows.weights)


def row_gini(rows: Rows) -> Number:
    """The Gini coefficient."""
    return gini(rows.weights)


def entropy(weights: Row) -> Number:
    """Entropy of each row in nats: 0 for one key, ln(keys) for uniform attention; exp of it is the effective number
    of keys."""
    # several times faster than torch.special.entr; the clamp makes 0 log 0 zero
    logarithms = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    return -(weights * logarithms).sum(-1)


def hoyer(weights: Row) -> Number:
    """Hoyer's sparsity (Hoyer 2004), (√n - l1/l2) / (√n - 1): 0 for uniform attention, 1 for one key; 0 where n = 1."""
    keys = weights.shape[-1]
    if keys == 1:
        return torch.zeros_like(weights[..., 0])
    excess = keys * (weights - 1 / keys).square().sum(-1)  # n · l2² - 1 for rows that sum to 1
    root = (1 + excess).sqrt()
    return excess / (root * (root + 1)) * (math.sqrt(keys) / (math.sqrt(keys) - 1))


def gini(weights: Row) -> Number:
    """The Gini coefficient of each row's weights: 0 for uniform attention, 1 - 1/n for one key."""
    keys = weights.shape[-1]
    ranks = torch.arange(1 - keys, keys, 2, dtype=weights.dtype, device=weights.device)  # 2 i - n - 1 for i = 1 .. n
    return ascending(weights - 1 / keys) @ ranks / keys


def ascending(values: Row) -> Row:
    """Each row in ascending order."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1))  # 25 times faster than torch on the CPU


def outliers(values: Float[Tensor, "*leading token"]) -> Bool[Tensor, "*leading token"]:
    """Which values exceed their row's median by more than 5 median absolute deviations (and 0.01 % of the median)."""
    middle = median(values)[..., None]
    deviation = median((values - middle).abs())[..., None]
    return values - middle > torch.maximum(DEVIATIONS * deviation, _ROUNDING * middle.abs())


def median(values: Float[Tensor, "*leading token"]) -> Float[Tensor, "*leading"]:
    """The median of each row; for an even number of values the mean of the two middle ones (torch takes the lower)."""
    ordered, size = ascending(values), values.shape[-1]
    return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2
