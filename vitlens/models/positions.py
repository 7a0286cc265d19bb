"""Position embeddings of a vision transformer: fixed sines and cosines, and learned ones resampled
to another grid.
"""

from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import InputError

FIXED: Final = ("sine", "sine-2d")
# wavelengths grow geometrically from 2π to 10,000 · 2π (Vaswani 2017, section 3.5)
SLOWEST: Final = 10_000.0


def sines(places: Int[Tensor, " places"], dim: int) -> Float[Tensor, "places 2 half"]:
    """Return sines and cosines of places at dim/2 frequencies: (places, sine or cosine,
    frequency)."""
    frequencies = SLOWEST ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (dim/2)
    angles = places[:, None].double() * frequencies  # (places, dim/2)
    return torch.stack((angles.sin(), angles.cos()), dim=1)


def fixed_positions(
    kind: str, *, grid: tuple[int, int], prefix: int, dim: int
) -> Float[Tensor, "1 placed dim"]:
    """Return fixed position embeddings of a grid of patches, row by row.

    Returns zeros for the prefix, as in MAE. grid: (rows, columns).

    sine: PE(n, 2i) = sin(n / 10000^(2i/dim)) and PE(n, 2i+1) = cos(...) of the patch's number n
    (Vaswani 2017); sine-2d: half of the dimensions for the column, half for the row, each sines
    then cosines (MAE, He 2022). The numbers count patches, so a patch keeps its embedding where the
    image grows below (and, sine-2d, to the right). Raises InputError for another kind.
    """
    if kind not in FIXED:
        raise InputError(f"expected fixed positions of {' or '.join(FIXED)}, found {kind!r}")
    rows, columns = grid
    numbers = torch.arange(rows * columns)
    if kind == "sine":
        # sine and cosine of one frequency side by side
        patches = sines(numbers, dim).transpose(1, 2).flatten(1)
    else:
        of_column = sines(numbers % columns, dim // 2).flatten(1)
        of_row = sines(numbers // columns, dim // 2).flatten(1)
        patches = torch.cat((of_column, of_row), dim=1)
    # of shape (1, prefix + patches, dim)
    return torch.cat((torch.zeros(prefix, dim), patches.float()))[None]


def interpolate_positions(
    positions: Float[Tensor, "1 old dim"],
    *,
    prefix: int,
    grid: tuple[int, int],
    to: tuple[int, int],
) -> Float[Tensor, "1 new dim"]:
    """Return position embeddings learned for one grid of patches, resampled to another (bicubic,
    antialiased).

    positions: prefix rows, which stay unchanged, then one row a patch.
    grid, to: (rows, columns) before and after.

    Where the grids are equal, positions are returned unchanged.
    """
    if grid == to:
        return positions
    # of shape (1, dim, rows, columns)
    patches = positions[:, prefix:].reshape(1, *grid, -1).permute(0, 3, 1, 2)
    # in float32: half precision has no antialiased kernel on the CPU
    resized = F.interpolate(
        patches.float(), size=to, mode="bicubic", antialias=True, align_corners=False
    )
    rows = resized.flatten(2).transpose(1, 2).to(positions.dtype)  # (1, patches, dim)
    return torch.cat((positions[:, :prefix], rows), dim=1)
