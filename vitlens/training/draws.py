"""Random numbers that belong to a view of an image, not to a moment: a hash of (seed, epoch, key, stream)."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.data import draws


def uniforms(keys: Tensor, count: int, *, seed: int, epoch: int, stream: int = 0) -> Float[Tensor, "batch count"]:
    """Numbers in [0, 1) for each view, that depend on (seed, epoch, key, stream, place) alone; 24 bits each.

    stream: who draws, so that two that draw for the same view have nothing in common.
    """
    views = draws.keys(seed, torch.full_like(keys, seed >> 32), torch.full_like(keys, epoch), keys)
    return draws.uniform(views, count, stream=stream)
