"""How sharp a row of attention is: entropy, Hoyer's sparsity, the Gini coefficient.

Each is a number for one row of weights that sums to 1. Formulas are arranged so that nearly uniform rows, where the
textbook forms subtract almost equal numbers, keep their precision in fp32.
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Row = Float[Tensor, "*leading key"]
Number = Float[Tensor, "*leading"]


def entropy(weights: Row) -> Number:
    """Entropy of each row in nats: 0 for one key, ln(keys) for uniform attention; exp of it is the effective number
    of keys."""
    # torch.special.entr does the same several times slower; the clamp keeps 0 log 0 at 0
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
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1))  # vectorised: 25 times torch's on the CPU
