"""Maps at another resolution: pooled or interpolated to a grid of cells, or interpolated to the size of a mask."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.models.model import Model

AnyMaps = Float[Tensor, "_ _ _"]  # images, rows and columns of any size

_SMALL, _FEW, _MANY = 64, 8, 14  # cells per side for images under 64 px and above, as in the ViT presets


def on_grid(maps: AnyMaps, grid: tuple[int, int]) -> AnyMaps:
    """Maps with one number per cell of the grid: the mean over the cell, or bilinear where the map is coarser.

    Each axis is averaged where the map is finer, interpolated where it is coarser.
    """
    if tuple(maps.shape[-2:]) == grid:
        return maps
    finer = max(maps.shape[-2], grid[0]), max(maps.shape[-1], grid[1])
    large = enlarged(maps, finer)
    return F.adaptive_avg_pool2d(large.unsqueeze(1), grid).squeeze(1)


def enlarged(maps: AnyMaps, size: tuple[int, int]) -> AnyMaps:
    """Maps interpolated bilinearly to (height, width) px; a map of this size is returned unchanged."""
    if tuple(maps.shape[-2:]) == size:
        return maps
    large: Tensor = F.interpolate(maps.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
    return large.squeeze(1)


def removal_grid(model: Model) -> tuple[int, int]:
    """The cells (rows, columns) that are removed from an image: the model's patches, or for a model without patches
    those of a ViT of its size (8x8 under 64 px, 14x14 above)."""
    layout = model.anatomy.layout
    if layout is not None:
        return layout.grid
    side = _FEW if min(model.input_size) < _SMALL else _MANY
    return min(side, model.input_size[0]), min(side, model.input_size[1])
