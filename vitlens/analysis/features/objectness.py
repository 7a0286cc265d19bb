"""Overlap of attention maps with the masks of objects, for a head chosen on other images."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import DataError
from vitlens.shapes import Masks

HeadMaps = Float[Tensor, "batch heads rows columns"]
FEWEST_MASKS: Final = 4  # images: two a half
_AT_ONCE: Final = 64  # images of which cells are compared with each other


@dataclass(frozen=True)
class Objectness:
    """Intersection over union of each image (n,), float64.

    iou: the intersection over union of an image's mask and the map of the best head.
    shuffled: of its mask and the map of another image.
    mean_mask: of its mask and the mean mask of the other half.
    heads: the best on each half, measured on the other.
    """

    iou: Float[Tensor, " batch"]
    shuffled: Float[Tensor, " batch"]
    mean_mask: Float[Tensor, " batch"]
    heads: tuple[int, int]


def objectness(maps: HeadMaps, masks: Masks, *, seed: int = 0) -> Objectness:
    """Measure the overlap of the maps of the best head with objects.

    The head is chosen on other images. Images are halved by a seeded draw: the head of the highest
    mean on one half is measured on the other, in both directions. For the maps of other images the
    best head is chosen anew, in the same way. Raises DataError for fewer than 4 images and for a
    mask without an object.
    """
    if len(maps) < FEWEST_MASKS:
        raise DataError(
            f"expected at least {FEWEST_MASKS} images with masks, found {len(maps)}; give more "
            "images"
        )
    order = torch.randperm(len(maps), generator=torch.Generator().manual_seed(seed))
    first = order[::2]
    second = order[1::2]
    by_head = area_iou(maps, masks)
    shuffled_by_head = torch.empty(maps.shape[:2], dtype=torch.float64)
    for half in (first, second):
        shuffled_by_head[half] = area_iou(maps[half.roll(1)], masks[half])
    iou, shuffled, mean_mask = torch.empty(3, len(maps), dtype=torch.float64)
    heads = list[int]()
    cells = _cells(masks, maps)
    for chosen, measured in ((first, second), (second, first)):
        head = int(by_head[chosen].mean(0).argmax())
        heads.append(head)
        iou[measured] = by_head[measured, head]
        shuffled_head = shuffled_by_head[chosen].mean(0).argmax()
        shuffled[measured] = shuffled_by_head[measured, shuffled_head]
        mean = cells[chosen].mean(0).expand(len(measured), 1, *maps.shape[-2:])
        mean_mask[measured] = area_iou(mean, masks[measured])[:, 0]
    return Objectness(iou, shuffled, mean_mask, (heads[0], heads[1]))


def area_iou(
    maps: HeadMaps, masks: Bool[Tensor, "batch height width"]
) -> Float[Tensor, "batch heads"]:
    """Return the intersection over union of each mask and the same area of the highest cells.

    If the area ends within cells of equal value, all of them are counted by the same share, so that
    a constant map overlaps by chance. Raises DataError for a mask without an object.
    """
    empty = (~masks.flatten(1).any(1)).nonzero()
    if len(empty):
        raise DataError(
            f"expected an object in every mask, found an empty one (image {int(empty[0])})"
        )
    inside = _cells(masks, maps).flatten(1)[:, None]
    area = inside.sum(-1, keepdim=True)  # in cells
    marked = list[Tensor]()  # the share of each cell that belongs to the highest area
    values = maps.flatten(2).double().cpu()
    for part, size in zip(values.split(_AT_ONCE), area.split(_AT_ONCE)):
        above = (part[..., None, :] > part[..., None]).sum(-1)
        equal = (part[..., None, :] == part[..., None]).sum(-1)
        marked.append(((size - above) / equal).clamp(0, 1))
    intersection = (torch.cat(marked) * inside).sum(-1)
    return intersection / (2 * area[..., 0] - intersection)


def _cells(masks: Masks, maps: HeadMaps) -> Float[Tensor, "batch rows columns"]:
    """Return the share of each cell of the maps that lies on the object."""
    rows, columns = maps.shape[-2:]
    return F.adaptive_avg_pool2d(masks.double().cpu(), (rows, columns))
