"""Changes of hue that keep luminance, and keep chroma as far as the range [0, 1] allows.

The chroma of a pixel is its colour minus its luminance in all three channels. It lies in a plane,
in which a rotation turns the hue.
"""

import math
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.failures.operations import luminance
from vitlens.data.drawing import LUMINANCE
from vitlens.shapes import Images

Plane = Float[Tensor, "batch 1 height width"]
PerImage = Float[Tensor, " batch"]
OPPOSITE = math.pi  # half a circle, in radians
_COLOURLESS = 1e-3  # an image with a smaller mean chroma has no hue
_TINY = 1e-6  # avoids a division by 0


def luminance_of(images: Images) -> Plane:
    """Return the luminance in [0, 1] as a channel, without gamma correction."""
    return luminance(images)[:, None]


def with_chroma(grey: Plane, chroma: Images) -> Images:
    """Return the images of a luminance, given as grey images, and a chroma.

    Chroma is reduced if a channel would leave the range [0, 1].
    """
    # the factor of the chroma at which each channel reaches 1 or 0
    room = torch.where(chroma > 0, 1 - grey, grey)
    largest_factor = room / chroma.abs().clamp_min(_TINY)
    factor = largest_factor.amin(1, keepdim=True).clamp(0, 1)
    return (grey + factor * chroma).clamp(0, 1)


@cache
def _axes() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two orthonormal axes of the plane of colours without luminance."""
    normal = torch.tensor(LUMINANCE, dtype=torch.float64)
    normal = normal / normal.norm()
    # red, projected onto the plane
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    first = first - (first @ normal) * normal
    first = first / first.norm()
    second = torch.linalg.cross(normal, first)
    return tuple(first.tolist()), tuple(second.tolist())


def _axes_like(images: Images) -> tuple[Tensor, Tensor]:
    """Return both axes of `_axes` with the type and on the device of images."""
    first, second = _axes()
    return images.new_tensor(first), images.new_tensor(second)


def rotate_hue(images: Images, angles: PerImage) -> Images:
    """Return the images with the hue of each turned by an angle, radians."""
    grey = luminance_of(images)
    first, second = _axes_like(images)
    across, up = _coordinates(images)
    cos = angles.cos()[:, None, None]
    sin = angles.sin()[:, None, None]
    turned_across = cos * across - sin * up
    turned_up = sin * across + cos * up
    along_first = turned_across[:, None] * first[:, None, None]
    along_second = turned_up[:, None] * second[:, None, None]
    chroma = along_first + along_second
    return with_chroma(grey, chroma)


def mean_hue(images: Images, region: Plane) -> tuple[PerImage, PerImage]:
    """Return the angle of the mean chroma within a region, radians, and its length.

    Both are 0 for an image without colour.
    """
    across, up = _coordinates(images)
    mean_across = (across * region[:, 0]).mean((1, 2))
    mean_up = (up * region[:, 0]).mean((1, 2))
    # the means are over the image, and are divided by the share of the region in it
    length = torch.hypot(mean_across, mean_up) / region.mean((1, 2, 3)).clamp_min(_TINY)
    is_coloured = length > _COLOURLESS
    hue = torch.where(is_coloured, torch.atan2(mean_up, mean_across), 0.0)
    return hue, torch.where(is_coloured, length, 0.0)


def _coordinates(
    images: Images,
) -> tuple[Float[Tensor, "batch height width"], Float[Tensor, "batch height width"]]:
    """Return each pixel's chroma along both axes of its plane, without any luminance."""
    first, second = _axes_like(images)
    chroma = images - luminance_of(images)
    return torch.einsum("bchw,c->bhw", chroma, first), torch.einsum("bchw,c->bhw", chroma, second)
