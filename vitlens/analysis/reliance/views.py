"""Batches of images as interventions and controls need them.

A view has the pixels, the masks of the objects, the keys of the images' random numbers, and
partners: other images with which interventions exchange a background or a colour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.faithfulness.imputation import impute
from vitlens.analysis.reliance.cues import Region
from vitlens.shapes import Images, Masks

Plane = Float[Tensor, "batch 1 height width"]
PerImage = Float[Tensor, " batch"]


@dataclass(frozen=True)
class View:
    """A batch of images.

    images: the images.
    masks: True on the objects, None if unknown.
    keys: the seed of each image's random numbers.
    patch: the (height, width) of a patch in px.
    read_partner: returns the view of the partners of these images, in the same order.
    """

    images: Images
    masks: Masks | None
    keys: Int[Tensor, " batch"]
    patch: tuple[int, int]
    read_partner: "Callable[[], View]"

    @cached_property
    def partner(self) -> "View":
        """Return the view of the images that these exchange parts with, read on first use."""
        return self.read_partner()

    def region(self, name: Region) -> Plane:
        """Return 1 within a region and 0 elsewhere.

        An image without object has neither object nor background. Without masks, every region is
        the whole image.
        """
        if name == "image" or self.masks is None:
            return torch.ones_like(self.images[:, :1])
        inside = self.masks[:, None].to(self.images)
        if name == "object":
            return inside
        has_object = inside.flatten(1).amax(1)[:, None, None, None]
        return (1 - inside) * has_object

    @cached_property
    def layer(self) -> Plane:
        """Return 1 where an image stays as it is if its background is exchanged, and 0 elsewhere.

        That is the object widened by one pixel, its smoothed edge, which mixes both colours. In an
        image without object or without background it is everywhere.
        """
        widened = F.max_pool2d(self.region("object"), 3, stride=1, padding=1)
        share = widened.mean((1, 2, 3))
        is_plain = ((share == 0) | (share == 1))[:, None, None, None]
        return torch.where(is_plain, torch.ones_like(widened), widened)

    @cached_property
    def cutout(self) -> Plane:
        """Return 1 where pixels are cut out and moved, and 0 elsewhere.

        That is as in `layer`, but nowhere in an image without object or without background.
        """
        is_plain = (self.layer == 1).flatten(1).all(1)[:, None, None, None]
        return torch.where(is_plain, 0.0, self.layer)

    @cached_property
    def flat(self) -> Images:
        """Return the object and its surroundings, each in its mean colour.

        An image without object or without background is in one mean colour.
        """
        inside = self.region("object") * (self.cutout > 0)
        outside = 1 - inside
        object_colour = _mean_colour(self.images, inside)
        ground_colour = _mean_colour(self.images, outside)
        return inside * object_colour + outside * ground_colour

    @cached_property
    def centre(self) -> Float[Tensor, "batch 2"]:
        """Return the centre of each object, down and across from -1 to 1.

        It is 0 for an image without object or mask.
        """
        if self.masks is None:
            return torch.zeros(len(self.images), 2).to(self.images)
        inside = self.region("object")[:, 0]
        total = inside.sum((1, 2)).clamp_min(1)
        height, width = inside.shape[-2:]
        rows = (2 * torch.arange(height).to(inside) + 1) / height - 1
        columns = (2 * torch.arange(width).to(inside) + 1) / width - 1
        down = (inside.sum(2) @ rows) / total
        across = (inside.sum(1) @ columns) / total
        return torch.stack([down, across], 1)

    @cached_property
    def ground(self) -> Images:
        """Return the background, filled in from its surroundings at the place of the cutout."""
        return impute(self.images, self.cutout > 0)


def _mean_colour(images: Images, region: Plane) -> Float[Tensor, "batch 3 1 1"]:
    area = region.sum((2, 3), keepdim=True).clamp_min(1)
    return (images * region).sum((2, 3), keepdim=True) / area
