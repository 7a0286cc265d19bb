"""What covers a part of an object, read off the luminance and the object's mask.

Something else may stand in front of an object where its outline touches pixels that differ from its
surroundings. A mask without a part of the object does not show this by its shape: a bar that is cut
at one end is a shorter bar.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.shapes import Masks

Planes = Float[Tensor, "batch height width"]
_MARGIN: Final = (
    1 / 64
)  # of the shorter side: the smoothed edge of an object, and the width of its outline
# from the median of the surroundings, from which on a pixel is something else
_DEVIATIONS: Final = 3.0
# of the median absolute deviation, which makes it the standard deviation of normal noise
_SCALE: Final = 1.4826
# of the range of luminance: smaller differences are not seen as something else
_LEAST: Final = 0.05
_REACH: Final = 1 / 4  # of the shorter side: how far something else is followed from the outline
_READ: Final = 64  # pixels along the shorter side of what medians are taken on


@dataclass(frozen=True)
class Outline:
    """The outlines of objects.

    near: the object with its smoothed edge; ring: the outline around it; other: pixels off the
    object that differ from the surroundings of the object.
    """

    near: Bool[Tensor, "batch height width"]
    ring: Bool[Tensor, "batch height width"]
    other: Bool[Tensor, "batch height width"]

    @property
    def share(self) -> Float[Tensor, " batch"]:
        """Return the share of each outline that touches something else; NaN without an object, or
        without an outline.
        """
        total = self.ring.sum((1, 2))
        touched = (self.ring & self.other).sum((1, 2))
        return torch.where(total > 0, touched / total.clamp_min(1), torch.nan)

    @property
    def cover(self) -> Bool[Tensor, "batch height width"]:
        """Everything else that reaches an outline, followed from there."""
        region = self.ring & self.other
        for _ in range(max(1, round(_REACH * min(region.shape[-2:])))):
            region = grown(region, 1) & self.other
        return region


def outlines(planes: Planes, masks: Masks) -> Outline:
    """Return the outlines of objects in the luminance of images."""
    margin = margin_of(planes)
    near = grown(masks, margin)
    wide = grown(near, margin)
    step = max(1, min(planes.shape[-2:]) // _READ)
    seen = planes[:, ::step, ::step].masked_fill(wide[:, ::step, ::step], torch.nan).flatten(1)
    level = seen.nanmedian(1, keepdim=True).values
    spread = _SCALE * (seen - level).abs().nanmedian(1, keepdim=True).values
    limit = (_DEVIATIONS * spread).clamp_min(_LEAST)
    other = (planes - level[:, :, None]).abs() > limit[:, :, None]
    return Outline(near, wide & ~near, other & ~near)


def margin_of(planes: Tensor) -> int:
    """Return the width of an object's smoothed edge, px."""
    return max(1, round(_MARGIN * min(planes.shape[-2:])))


def grown(
    region: Bool[Tensor, "batch height width"], pixels: int
) -> Bool[Tensor, "batch height width"]:
    """Return a region with all pixels that are at most so far from it."""
    grown: Tensor = F.max_pool2d(region[:, None].float(), 2 * pixels + 1, stride=1, padding=pixels)
    return grown[:, 0] > 0
