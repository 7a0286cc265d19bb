"""Covered parts of objects, estimated from the luminance and the object's mask.

Another object may be in front if the object's outline touches pixels that differ from the
surroundings. The shape of a mask does not show a covered part: a bar that is cut at one end is a
shorter bar.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.shapes import Masks

Planes = Float[Tensor, "batch height width"]
# width of an object's smoothed edge, and of its outline, as a share of the shorter side
_MARGIN: Final = 1 / 64
# a pixel belongs to another object if it is more standard deviations from the surroundings
_DEVIATIONS: Final = 3.0
# factor from the median absolute deviation to the standard deviation of normal noise
_DEVIATION_OF_NOISE: Final = 1.4826
# smaller differences of the luminance, which is from 0 to 1, do not show another object
_LEAST_DIFFERENCE: Final = 0.05
_REACH: Final = 1 / 4  # distance that another object is followed, as a share of the shorter side
_SPARSE: Final = 64  # medians are taken over about so many pixels along the shorter side


@dataclass(frozen=True)
class Outline:
    """The outlines of objects.

    near: the object with its smoothed edge.
    ring: the outline around it.
    other: pixels off the object that differ from the surroundings of the object.
    """

    near: Bool[Tensor, "batch height width"]
    ring: Bool[Tensor, "batch height width"]
    other: Bool[Tensor, "batch height width"]

    @property
    def share(self) -> Float[Tensor, " batch"]:
        """Return the share of each outline that touches another object.

        It is NaN without an object, or without an outline.
        """
        total = self.ring.sum((1, 2))
        touched = (self.ring & self.other).sum((1, 2))
        return torch.where(total > 0, touched / total.clamp_min(1), torch.nan)

    @property
    def cover(self) -> Bool[Tensor, "batch height width"]:
        """Return the other objects that reach an outline, followed from there."""
        region = self.ring & self.other
        steps = max(1, round(_REACH * min(region.shape[-2:])))
        for _ in range(steps):
            region = grown(region, 1) & self.other  # a step of one pixel within the other objects
        return region


def outlines(planes: Planes, masks: Masks) -> Outline:
    """Return the outlines of objects in the luminance of images."""
    margin = margin_of(planes)
    near = grown(masks, margin)
    near_and_ring = grown(near, margin)
    step = max(1, min(planes.shape[-2:]) // _SPARSE)
    sparse_planes = planes[:, ::step, ::step]
    is_near = near_and_ring[:, ::step, ::step]
    surroundings = sparse_planes.masked_fill(is_near, torch.nan).flatten(1)
    # medians of the surroundings of each object (batch, 1)
    level = surroundings.nanmedian(1, keepdim=True).values
    median_deviation = (surroundings - level).abs().nanmedian(1, keepdim=True).values
    standard_deviation = _DEVIATION_OF_NOISE * median_deviation
    limit = (_DEVIATIONS * standard_deviation).clamp_min(_LEAST_DIFFERENCE)
    differs = (planes - level[:, :, None]).abs() > limit[:, :, None]
    return Outline(near=near, ring=near_and_ring & ~near, other=differs & ~near)


def margin_of(planes: Tensor) -> int:
    """Return the width of an object's smoothed edge, px."""
    return max(1, round(_MARGIN * min(planes.shape[-2:])))


def grown(
    region: Bool[Tensor, "batch height width"], pixels: int
) -> Bool[Tensor, "batch height width"]:
    """Return a region with all pixels up to this distance from it."""
    width = 2 * pixels + 1
    pooled: Tensor = F.max_pool2d(region[:, None].float(), width, stride=1, padding=pixels)
    return pooled[:, 0] > 0
