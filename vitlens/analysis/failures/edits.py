"""Changes of images for the causal tests of failures: what a category blames is removed or restored, beside a control.

Removed patches are filled in from their surroundings (noisy linear imputation, Rong 2022), so that no edge of a patch
appears. Each function returns the changed images and the control images, (batch, 3, height, width) in [0, 1].
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.rules import CellFlags, MapCells, half_of
from vitlens.analysis.failures.taxonomy import LEAST_ZOOM, MOST_ZOOM
from vitlens.analysis.faithfulness.masking import Cells, pixel_masks
from vitlens.analysis.faithfulness.road import imputed
from vitlens.data.draws import keys, uniform
from vitlens.shapes import Images, Masks

_MARGIN = 1.1  # side of a crop, in sides of the object
_BORDER = 1  # px of a crop that are kept around an object


class Edited(NamedTuple):
    """changed: without, or with, what a category blames; control: changed as much elsewhere."""

    changed: Images
    control: Images


def without_marked(images: Images, masks: Masks, cells: MapCells, *, seed: int = 0) -> Edited:
    """Without the cells off the object that hold half of the map's mass there; control: as many random ones there."""
    marked = half_of(torch.where(cells.objects, 0.0, cells.shares))
    control = random_cells(~cells.objects, marked.sum(1), seed=seed)
    size, stays = (images.shape[-2], images.shape[-1]), masks[:, None].to(images.device)
    holes = (pixel_masks(chosen.to(images.device), cells.grid, size) & ~stays for chosen in (marked, control))
    return Edited(*(imputed(images, each, seed=seed) for each in holes))


def without_part(images: Images, masks: Masks, cells: MapCells, *, seed: int = 0) -> Edited:
    """Without the cells of the object that hold half of the map's mass on it; control: as many random ones there.

    They are filled in from what surrounds the object, so that the rest of it does not grow into them.
    """
    marked = half_of(torch.where(cells.objects, cells.shares, 0.0))
    control = random_cells(cells.objects, marked.sum(1), seed=seed)
    object_and_edge = F.max_pool2d(masks[:, None].float(), 3, stride=1, padding=1) > 0
    whole = object_and_edge.flatten(1).all(1)[:, None, None, None]
    ground = imputed(images, torch.where(whole, masks[:, None], object_and_edge).to(images.device), seed=seed)
    size = (images.shape[-2], images.shape[-1])
    return Edited(*(torch.where(pixel_masks(chosen, cells.grid, size), ground, images) for chosen in (marked, control)))


def enlarged_objects(images: Images, masks: Masks, *, seed: int = 0) -> Edited:
    """A crop around each object at the size of the image; control: the same crop in the centre at its own size.

    The control's surroundings are filled in from the crop's border, so that both lose what lies outside the crop.
    """
    size, zoom = (images.shape[-2], images.shape[-1]), zooms(masks)
    low, high = _ends(masks)
    half = 1 / zoom[:, None]  # half a crop's sides, in half sides of the image
    extent = torch.tensor(size, dtype=torch.float32)
    middle = (low + high) / extent - 1  # of the object, -1 to 1
    middle = middle.clamp(half - 1, 1 - half).flip(1).to(images)  # x before y
    changed = _sampled(images, middle, half.to(images))
    moved = _sampled(images, middle, torch.ones_like(half).to(images))
    y, x = (2 * (torch.arange(side) + 0.5) / side - 1 for side in size)
    outside = (y.abs()[None, :, None] > half[:, :, None]) | (x.abs()[None, None, :] > half[:, :, None])
    return Edited(changed, imputed(moved, outside[:, None].to(images.device), seed=seed))


def zooms(masks: Masks) -> Float[Tensor, " batch"]:
    """How much each object can be enlarged, at most MOST_ZOOM; 1 where its crop is the image."""
    low, high = _ends(masks)
    sides = (high - low).clamp_min(1.0) * _MARGIN + 2 * _BORDER
    room = (torch.tensor(masks.shape[-2:], dtype=torch.float32) / sides).amin(1)
    return room.clamp(1.0, MOST_ZOOM)


def can_be_enlarged(masks: Masks) -> Bool[Tensor, " batch"]:
    """Whether an object leaves room to be enlarged by LEAST_ZOOM."""
    return masks.flatten(1).any(1) & (zooms(masks) >= LEAST_ZOOM)


def random_cells(allowed: CellFlags, counts: Tensor, *, seed: int) -> CellFlags:
    """As many random cells as `counts` (batch,) among the allowed ones of each row."""
    rows = torch.arange(len(allowed))
    drawn = uniform(keys(seed, rows), allowed.shape[1]).to(allowed.device)
    order = torch.where(allowed, drawn, 2.0).argsort(1)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    return allowed & (ranks < counts[:, None])


def changed_cells(first: Images, second: Images, grid: Cells) -> CellFlags:
    """The cells in which two versions of each image differ by more than a hundredth in any pixel."""
    differs = (first - second).abs().amax(1, keepdim=True) > 0.01
    return F.adaptive_max_pool2d(differs.float(), grid).flatten(1) > 0


def _ends(masks: Masks) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, "batch 2"]]:
    """The first row and column of each object, and the ones after its last; the whole image for an empty mask."""
    ends = []
    for axis in (2, 1):
        line = masks.any(axis).float()
        side = line.shape[1]
        first, last = line.argmax(1), side - line.flip(1).argmax(1)
        empty = ~line.bool().any(1)
        ends.append((first.masked_fill(empty, 0), last.masked_fill(empty, side)))
    return torch.stack([low for low, _ in ends], 1).float(), torch.stack([high for _, high in ends], 1).float()


def _sampled(images: Images, middle: Tensor, half: Tensor) -> Images:
    """The window of each image with this middle (x, y) and half side, from -1 to 1, at the size of the image."""
    matrix = torch.zeros(len(images), 2, 3, dtype=images.dtype, device=images.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = half[:, 0]
    matrix[:, :, 2] = middle
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
