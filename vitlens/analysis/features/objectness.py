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
FEWEST_MASKS: Final = 4  # the fewest images that can be measured: two in each half
_AT_ONCE: Final = 64  # images at a time; all pairs of their cells are compared


@dataclass(frozen=True)
class Objectness:
    """The overlap of attention maps with objects: intersections over union, float64.

    iou (n,): the overlap of each image's mask with its map of the best head.
    shuffled (n,): the overlap of its mask with the best head's map of another image.
    mean_mask (n,): the overlap of its mask with the mean mask of the other half.
    heads: the best head of each half, which is measured on the other half.
    """

    iou: Float[Tensor, " batch"]
    shuffled: Float[Tensor, " batch"]
    mean_mask: Float[Tensor, " batch"]
    heads: tuple[int, int]


def objectness(maps: HeadMaps, masks: Masks, *, seed: int = 0) -> Objectness:
    """Measure the overlap of the maps of the best head with objects.

    Images are split into two random halves. The head with the highest mean on one half is measured
    on the other, in both directions, so the head is chosen on other images. The control pairs each
    mask with the map of another image of its half; its best head is chosen in the same way.

    Raises DataError for fewer than 4 images and for a mask without an object.
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
        other_images = half.roll(1)
        shuffled_by_head[half] = area_iou(maps[other_images], masks[half])
    iou = torch.empty(len(maps), dtype=torch.float64)
    shuffled = torch.empty_like(iou)
    mean_mask = torch.empty_like(iou)
    heads = list[int]()
    cells = _cells(masks, maps)
    for choosing, measured in ((first, second), (second, first)):
        head = int(by_head[choosing].mean(0).argmax())
        heads.append(head)
        iou[measured] = by_head[measured, head]
        shuffled_head = shuffled_by_head[choosing].mean(0).argmax()
        shuffled[measured] = shuffled_by_head[measured, shuffled_head]
        # the mean mask as the map of a single head, the same for each image
        mean_as_map = cells[choosing].mean(0).expand(len(measured), 1, *maps.shape[-2:])
        mean_mask[measured] = area_iou(mean_as_map, masks[measured])[:, 0]
    return Objectness(iou=iou, shuffled=shuffled, mean_mask=mean_mask, heads=(heads[0], heads[1]))


def area_iou(
    maps: HeadMaps, masks: Bool[Tensor, "batch height width"]
) -> Float[Tensor, "batch heads"]:
    """Return the intersection over union of each mask with the highest cells of each head's map.

    The cells have the same area as the mask. If the area ends within cells of equal value, all of
    them are counted by the same share. So a constant map overlaps by chance. Raises DataError for a
    mask without an object.
    """
    empty = (~masks.flatten(1).any(1)).nonzero()
    if len(empty):
        raise DataError(
            f"expected an object in every mask, found an empty one (image {int(empty[0])})"
        )
    on_object = _cells(masks, maps).flatten(1)[:, None]  # as (batch, 1, cells)
    area = on_object.sum(-1, keepdim=True)  # the number of cells, as (batch, 1, 1)
    marked_parts = list[Tensor]()
    values = maps.flatten(2).double().cpu()  # as (batch, heads, cells)
    for part, part_area in zip(values.split(_AT_ONCE), area.split(_AT_ONCE)):
        # for each cell, how many cells of its map are higher, and how many equal (itself included)
        higher = (part[..., None, :] > part[..., None]).sum(-1)
        equal = (part[..., None, :] == part[..., None]).sum(-1)
        # what the higher cells leave of the area is shared among the equal ones
        marked_parts.append(((part_area - higher) / equal).clamp(0, 1))
    marked = torch.cat(marked_parts)  # the share of each cell that is among the highest
    intersection = (marked * on_object).sum(-1)
    union = 2 * area[..., 0] - intersection  # mask and marked cells have the same area
    return intersection / union


def _cells(masks: Masks, maps: HeadMaps) -> Float[Tensor, "batch rows columns"]:
    """Return the share of each cell of the maps that lies on the object."""
    rows, columns = maps.shape[-2:]
    return F.adaptive_avg_pool2d(masks.double().cpu(), (rows, columns))
