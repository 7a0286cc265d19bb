"""The positions of an attention layer's queries and keys in the image: grid, distances in pixels, sums by offset.

A windowed layer is treated window by window: within a window, offsets are those in the image (multiples of the spacing
where the patches of a window lie apart, as in MaxViT's grids), except across the seam of a shifted window, where the
model masks attention (but for timm's Swin on a padded map, whose mask misses the seam: distances are then those in the
image, and such pairs are left out of the offsets).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.lens.call import window_index
from vitlens.lens.site import Site, Windows
from vitlens.models.model import Model
from vitlens.shapes import TokenLayout


@dataclass(frozen=True)
class Geometry:
    """One layer's tokens in the image.

    grid: patches (rows, columns) of the whole map, or of one window; pitch: pixels (height, width) from patch to
    patch; prefix: the number of tokens before the patches; cls, registers: their positions among these (a distillation
    token counts as a register); windows: how the map is divided, or None.
    """

    grid: tuple[int, int]
    pitch: tuple[float, float]
    prefix: int = 0
    cls: tuple[int, ...] = ()
    registers: tuple[int, ...] = ()
    windows: Windows | None = None

    @property
    def patches(self) -> int:
        """Patches of the map, or of one window."""
        return self.grid[0] * self.grid[1]

    @property
    def map_grid(self) -> tuple[int, int]:
        """Patches (rows, columns) of the whole map."""
        return self.grid if self.windows is None else self.windows.resolution

    @property
    def spacing(self) -> tuple[int, int]:
        """How many patches apart (down, across) adjacent patches of a window are in the image."""
        if self.windows is None or not self.windows.dilated:
            return 1, 1
        return self.windows.resolution[0] // self.grid[0], self.windows.resolution[1] // self.grid[1]

    @property
    def span(self) -> tuple[int, int]:
        """The patches (rows, columns) of the image from the first of a window to its last."""
        (rows, columns), (down, across) = self.grid, self.spacing
        return (rows - 1) * down + 1, (columns - 1) * across + 1

    def by_offset(self, weights: Float[Tensor, "*leading query key"]) -> Float[Tensor, "*leading down across"]:
        """The weights summed by offset in the image (.., 2 rows - 1, 2 columns - 1), rows and columns being the span.

        0 at offsets that no two patches of a window have.
        """
        sums, (down, across) = offset_sums(weights, self.grid), self.spacing
        if (down, across) == (1, 1):
            return sums
        spread = sums.new_zeros(*sums.shape[:-2], *(2 * side - 1 for side in self.span))
        spread[..., ::down, ::across] = sums
        return spread

    @lru_cache(maxsize=32)  # noqa: B019
    def distances(self) -> Float[Tensor, "calls query key"]:
        """Euclidean distances in px between the centres of all pairs of patches in the image; arbitrary for padding."""
        places = self.places()
        columns = self.map_grid[1]
        centres = torch.stack((places // columns, places % columns), -1) * torch.tensor(self.pitch, dtype=torch.float64)
        return (centres[:, :, None] - centres[:, None]).square().sum(-1).sqrt()

    @lru_cache(maxsize=32)  # noqa: B019
    def places(self) -> Int[Tensor, "calls patches"]:
        """The patch of the map at each position of each window; -1 for padding. One row without windows."""
        return torch.arange(self.patches)[None] if self.windows is None else window_index(self.windows)

    @lru_cache(maxsize=32)  # noqa: B019
    def pairs(self) -> Bool[Tensor, "calls query key"]:
        """Pairs of query and key with the same offset in the image as in the window: patches, not across a seam."""
        places = self.places()
        real = places >= 0
        pairs = real[:, :, None] & real[:, None]
        if self.windows is None:
            return pairs
        inside, (tall, wide) = torch.arange(self.patches), self.spacing
        for step, at, within in (
            (tall, places // self.windows.resolution[1], inside // self.grid[1]),
            (wide, places % self.windows.resolution[1], inside % self.grid[1]),
        ):
            pairs = pairs & (at[:, :, None] - at[:, None] == step * (within[:, None] - within))
        return pairs

    def uniform_distance(self) -> float:
        """The mean distance in px under uniform attention on the patches that each patch can attend to."""
        pairs = self.pairs()
        queries = pairs.any(-1)  # all but padding
        rows = (pairs * self.distances()).sum(-1) / pairs.sum(-1).clamp_min(1)
        return float((rows * queries).sum() / queries.sum())


def geometry_of(site: Site, model: Model) -> Geometry | None:
    """The geometry of one layer; None where queries or keys are not patches (pooled keys, channels, one query)."""
    layout, (height, width) = model.anatomy.layout, model.input_size
    if site.windows is not None:
        rows, columns = site.windows.resolution
        return Geometry(site.windows.window, (height / rows, width / columns), windows=site.windows)
    if site.kind != "patch":
        return None
    if layout is not None and site.keys == layout.patches:  # the prefix is added in a later layer
        layout = replace(layout, prefix=())
    if layout is not None and site.keys == layout.tokens:
        others = layout.positions("register") + layout.positions("distillation")
        return Geometry(layout.grid, grid_pitch(layout), len(layout.prefix), layout.positions("cls"), others)
    # square patches that cover the image, where their order is not another
    grid = square_grid(site.keys, model.input_size) if model.anatomy.row_by_row else None
    return None if grid is None else Geometry(grid, (height / grid[0], width / grid[1]))


def grid_pitch(layout: TokenLayout) -> tuple[float, float]:
    """Pixels (height, width) from patch to patch."""
    return float(layout.patch_size[0]), float(layout.patch_size[1])


def square_grid(patches: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """The (rows, columns) of square patches that cover an image of this size, or None if there is no such grid."""
    rows = round((patches * size[0] / size[1]) ** 0.5)
    columns = patches // max(rows, 1)
    return (rows, columns) if rows * columns == patches and rows * size[1] == columns * size[0] else None


def offset_sums(
    weights: Float[Tensor, "*leading query key"], grid: tuple[int, int]
) -> Float[Tensor, "*leading down across"]:
    """The weights between patches summed by offset, key minus query: (.., 2 rows - 1, 2 columns - 1).

    Patches are ordered row by row; offset 0 is in the middle. The sum over all offsets is that over all weights.
    """
    apart = weights.unflatten(-1, grid).unflatten(-3, grid)  # (.., rows, columns, rows, columns)
    across = _by_difference(apart.transpose(-3, -2))  # (.., rows, rows, 2 columns - 1)
    return _by_difference(across.movedim(-1, -3)).transpose(-2, -1)


def _by_difference(pairs: Float[Tensor, "*leading query key"]) -> Float[Tensor, "*leading offset"]:
    """Sums along the diagonals of square matrices, from key - query = 1 - n to n - 1."""
    size = pairs.shape[-1]
    steps = torch.arange(size, device=pairs.device)
    chosen = F.one_hot((steps - steps[:, None] + size - 1).flatten(), 2 * size - 1)
    return pairs.flatten(-2) @ chosen.to(pairs.dtype)  # a matrix product is faster here than scatter_add
