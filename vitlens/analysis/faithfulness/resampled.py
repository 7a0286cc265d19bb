"""Maps at another resolution: patches pooled or interpolated to a grid, and maps brought to the size of a mask."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.models.model import Model

AnyMaps = Float[Tensor, "_ _ _"]  # images, rows and columns, which may be another map's or not

_SMALL, _FEW, _MANY = 64, 8, 14  # cells a side of an image under 64 px, and above, as the ViT presets are cut


def on_grid(maps: AnyMaps, grid: tuple[int, int]) -> AnyMaps:
    """Maps with one number a cell of the grid: the mean of what lies in it, or bilinear where the map is coarser.

    Along an axis on which the map is finer, cells are averaged; along one on which it is coarser, interpolated.
    """
    if tuple(maps.shape[-2:]) == grid:
        return maps
    finer = max(maps.shape[-2], grid[0]), max(maps.shape[-1], grid[1])
    large = enlarged(maps, finer)
    return F.adaptive_avg_pool2d(large.unsqueeze(1), grid).squeeze(1)


def enlarged(maps: AnyMaps, size: tuple[int, int]) -> AnyMaps:
    """Maps brought to pixels (height, width), bilinearly; a map that has them already is given back."""
    if tuple(maps.shape[-2:]) == size:
        return maps
    large: Tensor = F.interpolate(maps.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
    return large.squeeze(1)


def removal_grid(model: Model) -> tuple[int, int]:
    """The cells (rows, columns) in which an image is taken apart: the model's patches, or for another as many as a ViT
    of its size would have (8x8 under 64 px, 14x14 above)."""
    layout = model.anatomy.layout
    if layout is not None:
        return layout.grid
    side = _FEW if min(model.input_size) < _SMALL else _MANY
    return min(side, model.input_size[0]), min(side, model.input_size[1])
