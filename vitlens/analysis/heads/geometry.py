"""Where the queries and keys of an attention layer lie in the image: grid, pixels between them, sums by offset.

A layer of windows is seen window by window: within one, places differ as they do in the image, except across the seam
of a shifted window, where the model's mask lets nothing pass (but for timm's Swin on a padded map, whose mask misses
the seam: distances are then those in the image, and offsets leave such pairs out).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.layout import TokenLayout
from vitlens.lens.call import window_index
from vitlens.lens.site import Site, Windows
from vitlens.models.model import Model


@dataclass(frozen=True)
class Geometry:
    """One layer's tokens in the image.

    grid: patches (rows, columns) of the whole map, or of one window; pitch: pixels (height, width) from patch to
    patch; cls, registers: where these stand before the patches (a distillation token counts as a register); prefix:
    how many tokens do; windows: how the map was cut, or None.
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

    def distances(self) -> Float[Tensor, "calls query key"]:
        """Pixels between the centres of all pairs of patches in the image (Euclidean), of any number for padding."""
        return _distances(self)

    def places(self) -> Int[Tensor, "calls patches"]:
        """Which patch of the map stands at each place of each window; -1 for padding. One row without windows."""
        return _places(self.windows, self.patches)

    def pairs(self) -> Bool[Tensor, "calls query key"]:
        """Which pairs of query and key are as far apart in the image as in the window: patches, not across a seam."""
        return _pairs(self)

    def uniform_distance(self) -> float:
        """Mean distance in px under uniform attention on the patches that each patch can see."""
        pairs = self.pairs()
        queries = pairs.any(-1)  # all but padding
        rows = (pairs * self.distances()).sum(-1) / pairs.sum(-1).clamp_min(1)
        return float((rows * queries).sum() / queries.sum())


def geometry_of(site: Site, model: Model) -> Geometry | None:
    """The geometry of one layer, or None where queries or keys are no patches (pooled keys, channels, one query)."""
    if site.windows is not None:
        return _windowed(site.windows, model.input_size)
    if site.kind != "patch":
        return None
    layout = model.anatomy.layout
    if layout is not None and site.keys == layout.tokens:
        return _whole(layout)
    if layout is not None and site.keys == layout.patches:  # its prefix comes in later
        return _whole(replace(layout, prefix=()))
    grid = square_grid(site.keys, model.input_size)
    return None if grid is None else Geometry(grid, _pitch(grid, model.input_size))


def square_grid(patches: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """The (rows, columns) of square patches that cover an image of this size, or None where there are none such."""
    rows = round((patches * size[0] / size[1]) ** 0.5)
    columns = patches // max(rows, 1)
    return (rows, columns) if rows * columns == patches and rows * size[1] == columns * size[0] else None


def _whole(layout: TokenLayout) -> Geometry:
    others = layout.positions("register") + layout.positions("distillation")
    pitch = (float(layout.patch_size[0]), float(layout.patch_size[1]))
    return Geometry(layout.grid, pitch, len(layout.prefix), layout.positions("cls"), others)


def _windowed(windows: Windows, size: tuple[int, int]) -> Geometry:
    return Geometry(windows.window, _pitch(windows.resolution, size), windows=windows)


def _pitch(grid: tuple[int, int], size: tuple[int, int]) -> tuple[float, float]:
    return size[0] / grid[0], size[1] / grid[1]


@lru_cache(maxsize=32)
def _distances(geometry: Geometry) -> Tensor:
    windows, places = geometry.windows, geometry.places()
    columns = geometry.grid[1] if windows is None else windows.resolution[1]
    pitch = torch.tensor(geometry.pitch, dtype=torch.float64)
    centres = torch.stack((places // columns, places % columns), -1) * pitch
    apart = centres[:, :, None] - centres[:, None]
    return apart.square().sum(-1).sqrt()


@lru_cache(maxsize=32)
def _places(windows: Windows | None, patches: int) -> Tensor:
    return torch.arange(patches)[None] if windows is None else window_index(windows)


@lru_cache(maxsize=32)
def _pairs(geometry: Geometry) -> Tensor:
    places, windows = geometry.places(), geometry.windows
    real = places >= 0
    pairs = real[:, :, None] & real[:, None]
    if windows is None:
        return pairs
    width, columns = windows.resolution[1], geometry.grid[1]
    inside = torch.arange(geometry.patches)
    # contiguous in the image: what lies between two places of the window lies between the two patches
    down = places[:, :, None] // width - places[:, None] // width
    across = places[:, :, None] % width - places[:, None] % width
    same = (down == inside[:, None] // columns - inside // columns) & (
        across == inside[:, None] % columns - inside % columns
    )
    return pairs & same


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
