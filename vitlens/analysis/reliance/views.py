"""Images as interventions and controls see them: pixels, objects, the random numbers of each image, and a partner."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.faithfulness.removal import imputed
from vitlens.analysis.reliance.cues import Region
from vitlens.shapes import Images, Masks

Plane = Float[Tensor, "batch 1 height width"]
PerImage = Float[Tensor, " batch"]


@dataclass(frozen=True)
class View:
    """A batch of images.

    keys: of each image's random numbers; patch: side of a patch (rows, columns), px; read_partner: gives the image of
    the same place with which each image exchanges something.
    """

    images: Images
    masks: Masks | None
    keys: Int[Tensor, " batch"]
    patch: tuple[int, int]
    read_partner: "Callable[[], View]"

    @cached_property
    def partner(self) -> "View":
        """The images with which these exchange something."""
        return self.read_partner()

    def region(self, name: Region) -> Plane:
        """Return 1 within a region and 0 elsewhere; an image without object has neither object nor background."""
        if name == "image" or self.masks is None:
            return torch.ones_like(self.images[:, :1])
        inside = self.masks[:, None].to(self.images)
        there = inside.flatten(1).amax(1)[:, None, None, None]
        return inside if name == "object" else (1 - inside) * there

    @cached_property
    def layer(self) -> Plane:
        """The object with its smoothed edge; an image without object, or without background, is all layer."""
        edge = F.max_pool2d(self.region("object"), 3, stride=1, padding=1)
        share = edge.mean((1, 2, 3))
        is_plain = ((share == 0) | (share == 1))[:, None, None, None]
        return torch.where(is_plain, torch.ones_like(edge), edge)

    @cached_property
    def ground(self) -> Images:
        """The background, filled in where the object stands."""
        holes = self.layer > 0
        holes = holes & ~holes.flatten(1).all(1)[:, None, None, None]
        return imputed(self.images, holes)


def distance(images: Images, others: Images) -> PerImage:
    """Return the mean absolute distance of the pixels of each image."""
    return (images - others).abs().mean((1, 2, 3))
