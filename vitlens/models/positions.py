"""Position embeddings on another grid than the one they were learned on."""

from jaxtyping import Float
from torch import Tensor, cat
from torch.nn import functional as F


def interpolate_positions(
    positions: Float[Tensor, "1 old dim"], *, prefix: int, grid: tuple[int, int], to: tuple[int, int]
) -> Float[Tensor, "1 new dim"]:
    """Position embeddings learned for one grid of patches, resampled to another (bicubic, antialiased).

    positions: prefix rows, kept as they are, then one row a patch; grid, to: (rows, columns) before and after.
    On its own grid it returns what it was given.
    """
    if grid == to:
        return positions
    patches = positions[:, prefix:].reshape(1, *grid, -1).permute(0, 3, 1, 2)  # (1, dim, rows, columns)
    # in float32: half precision has no antialiased kernel on the CPU
    resized = F.interpolate(patches.float(), size=to, mode="bicubic", antialias=True, align_corners=False)
    rows = resized.flatten(2).transpose(1, 2).to(positions.dtype)  # (1, patches, dim)
    return cat((positions[:, :prefix], rows), dim=1)
