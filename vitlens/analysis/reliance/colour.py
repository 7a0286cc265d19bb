"""Changes of hue that keep luminance, and keep chroma as far as the range [0, 1] allows.

The chroma of a pixel is its colour minus its luminance in all three channels. It lies in a plane,
in which a rotation turns the hue.
"""

import math
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.data.scenes import LUMINANCE
from vitlens.shapes import Images

Plane = Float[Tensor, "batch 1 height width"]
PerImage = Float[Tensor, " batch"]
_COLOURLESS = 1e-3  # mean chroma, below which an image has no hue
_TINY = 1e-6


def luminance_of(images: Images) -> Plane:
    """Return the luminance in [0, 1], without gamma correction."""
    weights = torch.tensor(LUMINANCE, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)[:, None]


def with_chroma(luminance: Plane, chroma: Images) -> Images:
    """Return the images of this luminance and chroma; chroma is reduced where the range [0, 1]
    demands it.
    """
    room = torch.where(chroma > 0, 1 - luminance, luminance) / chroma.abs().clamp_min(_TINY)
    share = room.amin(1, keepdim=True).clamp(0, 1)
    return (luminance + share * chroma).clamp(0, 1)


@cache
def _axes() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two orthonormal axes of the plane of colours without luminance."""
    normal = torch.tensor(LUMINANCE, dtype=torch.float64)
    normal = normal / normal.norm()
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    first = first - (first @ normal) * normal
    first = first / first.norm()
    second = torch.linalg.cross(normal, first)
    return tuple(first.tolist()), tuple(second.tolist())


def turned(images: Images, angle: PerImage) -> Images:
    """Return the images with their hue turned by an angle each, radians."""
    luminance = luminance_of(images)
    first, second = (
        torch.tensor(axis, dtype=images.dtype, device=images.device) for axis in _axes()
    )
    across, up = _coordinates(images)
    cos = angle.cos()[:, None, None]
    sin = angle.sin()[:, None, None]
    turned_across = cos * across - sin * up
    turned_up = sin * across + cos * up
    chroma = (
        turned_across[:, None] * first[:, None, None] + turned_up[:, None] * second[:, None, None]
    )
    return with_chroma(luminance, chroma)


def mean_hue(images: Images, region: Plane) -> tuple[PerImage, PerImage]:
    """Return the angle of the mean chroma within a region, radians, and its size; 0 for an image
    without colour.
    """
    across, up = ((part * region[:, 0]).mean((1, 2)) for part in _coordinates(images))
    size = torch.hypot(across, up) / region.mean((1, 2, 3)).clamp_min(_TINY)
    coloured = size > _COLOURLESS
    return torch.where(coloured, torch.atan2(up, across), 0.0), torch.where(coloured, size, 0.0)


def _coordinates(
    images: Images,
) -> tuple[Float[Tensor, "batch height width"], Float[Tensor, "batch height width"]]:
    """Return each pixel's chroma along both axes of its plane; luminance has no part in either."""
    first, second = (
        torch.tensor(axis, dtype=images.dtype, device=images.device) for axis in _axes()
    )
    chroma = images - luminance_of(images)
    return torch.einsum("bchw,c->bhw", chroma, first), torch.einsum("bchw,c->bhw", chroma, second)


OPPOSITE = math.pi  # half a circle
