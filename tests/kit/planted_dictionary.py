"""A vision transformer whose patch tokens are sparse sums of known directions, and its images.

The value of each number of a patch's pixels is what its direction has of it: the embedding of the
patch is their sum. Most numbers of a patch are 0.
"""

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kit.tiny import ours
from vitlens import Model

SIZE: Final = (32, 32)
PATCH: Final = 4
DIM: Final = 24
DIRECTIONS: Final = 3 * PATCH**2
ACTIVE: Final = 3  # of a patch
PLACE: Final = "blocks.0.input"


class Planted(NamedTuple):
    """model: whose tokens at PLACE have the directions (DIRECTIONS, DIM), each of length 1."""

    model: Model
    directions: Tensor


@cache
def planted(seed: int) -> Planted:
    """Return a model with random directions."""
    generator = torch.Generator().manual_seed(seed)
    directions = F.normalize(torch.randn(DIRECTIONS, DIM, generator=generator), dim=1)
    model = ours(size=SIZE, patch_size=(PATCH, PATCH), dim=DIM, depth=1)
    state = model.module.state_dict()
    state["patch_embed.proj.weight"].copy_(directions.T.reshape(DIM, 3, PATCH, PATCH))
    state["patch_embed.proj.bias"].zero_()
    state["pos_embed"].zero_()
    return Planted(model, directions)


def sparse_images(count: int, seed: int) -> Tensor:
    """Draw images (count, 3, 32, 32) with ACTIVE numbers from 0.5 to 1 in a patch."""
    generator = torch.Generator().manual_seed(seed)
    grid = SIZE[0] // PATCH
    patches = count * grid**2
    active = torch.rand(patches, DIRECTIONS, generator=generator).topk(ACTIVE).indices
    values = 0.5 + 0.5 * torch.rand(patches, ACTIVE, generator=generator)
    numbers = torch.zeros(patches, DIRECTIONS).scatter(1, active, values)
    tiles = numbers.view(count, grid, grid, 3, PATCH, PATCH)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, *SIZE)
