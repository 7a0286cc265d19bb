"""Localisation: does a map point at the object, where its mask is known?"""

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import DataError
from vitlens.shapes import Maps, Masks


def pointing_hits(maps: Maps, masks: Masks) -> Bool[Tensor, " batch"]:
    """The pointing game (Zhang 2018): whether each map's highest point lies on its object's mask.

    Maps are brought to the masks' size bilinearly. Where several points are equally high, all of them must lie on the
    mask: a constant map is no hit. Raises DataError when a mask is empty.
    """
    if not masks.flatten(1).any(1).all():
        empty = int((~masks.flatten(1).any(1)).nonzero()[0])
        raise DataError(f"expected an object in every mask, found an empty one (image {empty})")
    large = F.interpolate(maps.float().unsqueeze(1), size=masks.shape[-2:], mode="bilinear", align_corners=False)
    flat = large.flatten(1)
    highest = flat == flat.amax(1, keepdim=True)
    return ~(highest & ~masks.flatten(1)).any(1)


def mask_areas(masks: Masks) -> Float[Tensor, " batch"]:
    """The share of each image that its mask covers: what a point thrown at random hits in the pointing game."""
    return masks.flatten(1).float().mean(1)
