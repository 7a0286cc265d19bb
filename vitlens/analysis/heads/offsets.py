"""Where a patch looks relative to itself: attention summed by offset, without a matrix of N x N that is kept."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def offset_sums(
    weights: Float[Tensor, "*leading query key"], grid: tuple[int, int]
) -> Float[Tensor, "*leading down across"]:
    """The weights of patches on patches summed by offset, key minus query: (.., 2 rows - 1, 2 columns - 1).

    Patches stand row by row of grid; no offset is the middle. The sum over all offsets is that over all weights.
    """
    apart = weights.unflatten(-1, grid).unflatten(-3, grid)  # (.., rows, columns, rows, columns)
    across = _by_difference(apart.transpose(-3, -2))  # (.., rows, rows, 2 columns - 1)
    return _by_difference(across.movedim(-1, -3)).transpose(-2, -1)


def _by_difference(pairs: Float[Tensor, "*leading query key"]) -> Float[Tensor, "*leading offset"]:
    """Sums along the diagonals of square matrices, from key - query = 1 - n to n - 1."""
    size = pairs.shape[-1]
    steps = torch.arange(size, device=pairs.device)
    chosen = F.one_hot((steps - steps[:, None] + size - 1).flatten(), 2 * size - 1)
    return pairs.flatten(-2) @ chosen.to(pairs.dtype)  # a product is faster here than scattered additions


def offset_counts(
    grid: tuple[int, int], pairs: Float[Tensor, "calls query key"] | None = None
) -> Float[Tensor, "down across"]:
    """How many pairs of patches there are for each offset; pairs: those that count, with windows."""
    if pairs is None:
        patches = grid[0] * grid[1]
        pairs = torch.ones(1, patches, patches, dtype=torch.float64)
    return offset_sums(pairs.sum(0), grid)
