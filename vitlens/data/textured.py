"""Shapes and textures as functions of the plane, and images made of them: a textured shape on a plain ground.

Shapes are signed distances (negative inside, about one unit from centre to tip), textures numbers from -1 to 1 over
pixels; both are rotated at random, so that neither position nor direction determines the class.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.draws import uniform
from vitlens.data.scenes import REFERENCE, colour, paint
from vitlens.shapes import Labels, Masks, Pixels

Plane = Float[Tensor, "batch height width"]

_PERIOD = 5.0  # px of the textures on a canvas of REFERENCE px
_CHUNK = 1 << 18  # canvas pixels drawn at a time, to bound the memory
_TEXTURE_CONTRAST = 0.22  # of luminance, around the shape's own


class TexturedImages(NamedTuple):
    """pixels (batch, 3, height, width) uint8; masks (batch, height, width), True on the shape."""

    pixels: Pixels
    masks: Masks


def _triangle(x: Plane, y: Plane) -> Plane:
    slanted = math.sqrt(3) / 2 * x.abs() - y / 2
    return torch.maximum(slanted, y) - 0.5


def _star(x: Plane, y: Plane) -> Plane:
    """Five points: the angle folded to one of ten equal triangles, and the distance to its outer side."""
    sector, inner = 2 * math.pi / 5, 0.42
    angle = (torch.remainder(torch.atan2(y, x) + sector / 2, sector) - sector / 2).abs()
    far = (x.square() + y.square()).sqrt()
    px, py = far * angle.cos(), far * angle.sin()
    bx, by = inner * math.cos(sector / 2) - 1, inner * math.sin(sector / 2)
    return ((px - 1) * by - py * bx) / math.hypot(bx, by)


def _cross(x: Plane, y: Plane) -> Plane:
    return torch.maximum(torch.minimum(x.abs(), y.abs()) - 0.3, torch.maximum(x.abs(), y.abs()) - 0.95)


def _moon(x: Plane, y: Plane) -> Plane:
    bite = 0.85 - ((x - 0.55).square() + y.square()).sqrt()
    return torch.maximum((x.square() + y.square()).sqrt() - 1, bite)


def _hourglass(x: Plane, y: Plane) -> Plane:
    return torch.maximum((x.abs() - y.abs() - 0.12) / math.sqrt(2), y.abs() - 0.66)


SHAPES: Final[Mapping[str, Callable[[Plane, Plane], Plane]]] = MappingProxyType(
    {
        "circle": lambda x, y: (x.square() + y.square()).sqrt() - 0.9,
        "cross": _cross,
        "hourglass": _hourglass,
        "moon": _moon,
        "ring": lambda x, y: ((x.square() + y.square()).sqrt() - 0.7).abs() - 0.27,
        "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.7,
        "star": _star,
        "triangle": _triangle,
    }
)


def _stripes(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return (3 * u.sin()).clamp(-1, 1) + 0 * v


def _checks(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return (4 * (0.7 * u).sin() * (0.7 * v).sin()).clamp(-1, 1)


def _dots(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return (3 * (u.cos() + v.cos() - 0.75)).clamp(-1, 1)


def _waves(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return (3 * (u + 1.9 * (0.8 * v).sin()).sin()).clamp(-1, 1)


def _rings(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return (3 * (u.square() + v.square()).sqrt().sin()).clamp(-1, 1)


def _plain(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return 0 * (u + v)


def _grain(_u: Plane, _v: Plane, noise: Plane) -> Plane:
    return 2 * (noise > 0.5).to(noise) - 1


def _lines(u: Plane, v: Plane, _noise: Plane) -> Plane:
    return (4 * (torch.maximum((0.8 * u).cos(), (0.8 * v).cos()) - 0.75)).clamp(-1, 1)


TEXTURES: Final[Mapping[str, Callable[[Plane, Plane, Plane], Plane]]] = MappingProxyType(
    {
        "circle": _stripes,
        "cross": _dots,
        "hourglass": _grain,
        "moon": _checks,
        "ring": _plain,
        "square": _waves,
        "star": _lines,
        "triangle": _rings,
    }
)  # the class of a texture in training


def render(shapes: Labels, textures: Labels, keys: Tensor, *, canvas: int) -> TexturedImages:
    """One image for each pair of shape and texture (indices into SHAPES); its key alone decides the rest."""
    step = max(1, _CHUNK // canvas**2)
    starts = range(0, max(1, len(keys)), step)
    parts = [
        _draw(shapes[at : at + step], textures[at : at + step], keys[at : at + step], canvas=canvas) for at in starts
    ]
    return TexturedImages(torch.cat([part.pixels for part in parts]), torch.cat([part.masks for part in parts]))


def _draw(shapes: Tensor, textures: Tensor, keys: Tensor, *, canvas: int) -> TexturedImages:
    place = uniform(keys, 4, stream=11)
    x, y, size = _turned(place, canvas)
    distance = _chosen(list(SHAPES.values()), shapes, x, y) * size[:, None, None]  # px
    cover = (0.5 - distance).clamp(0, 1)

    colours = uniform(keys, 12, stream=12)
    dark, light = 0.08 + 0.2 * colours[:, 0], 0.5 + 0.16 * colours[:, 1]
    hues = colours[:, 2:11].reshape(-1, 3, 3)
    ground = _ground(colour(hues[:, 0], dark), colour(hues[:, 1], dark), colours[:, 11], canvas)
    surface = (
        colour(hues[:, 2], light)[:, :, None, None] + _TEXTURE_CONTRAST * _surface(keys, textures, canvas)[:, None]
    )
    image = ground + cover[:, None] * (surface - ground)
    grain = uniform(keys, canvas**2, stream=13).reshape(-1, canvas, canvas)
    image = image + (grain - 0.5)[:, None] * 0.06
    return TexturedImages((image.clamp(0, 1) * 255).round().to(torch.uint8), cover >= 0.5)


def _turned(draws: Float[Tensor, "batch 4"], canvas: int) -> tuple[Plane, Plane, Tensor]:
    """Coordinates in which the shape is upright and of size 1, and its size in px (batch,)."""
    size = (0.31 + 0.16 * draws[:, 0]) * canvas
    room = canvas - 2 * size
    centres = torch.arange(canvas, device=draws.device) + 0.5
    across = centres[None, None, :] - (size + draws[:, 1] * room)[:, None, None]
    down = centres[None, :, None] - (size + draws[:, 2] * room)[:, None, None]
    cos, sin = (turn[:, None, None] for turn in ((2 * math.pi * draws[:, 3]).cos(), (2 * math.pi * draws[:, 3]).sin()))
    scale = size[:, None, None]
    return (cos * across + sin * down) / scale, (cos * down - sin * across) / scale, size


def _surface(keys: Tensor, textures: Tensor, canvas: int) -> Plane:
    """The textures over the whole canvas, -1 to 1, rotated and shifted at random."""
    draws = uniform(keys, 3, stream=14)
    unit = 2 * math.pi / (_PERIOD * canvas / REFERENCE)
    centres = (torch.arange(canvas, device=keys.device) + 0.5) * unit
    across = centres[None, None, :] - draws[:, 0, None, None] * unit * canvas
    down = centres[None, :, None] - draws[:, 1, None, None] * unit * canvas
    angle = 2 * math.pi * draws[:, 2, None, None]
    u, v = angle.cos() * across + angle.sin() * down, angle.cos() * down - angle.sin() * across
    coarse = uniform(keys, (REFERENCE // 2) ** 2, stream=15).reshape(-1, 1, REFERENCE // 2, REFERENCE // 2)
    noise = F.interpolate(coarse, size=(canvas, canvas), mode="nearest")[:, 0]
    return _chosen(list(TEXTURES.values()), textures, u, v, noise)


def _chosen(functions: list[Callable[..., Plane]], which: Tensor, *planes: Plane) -> Plane:
    """The value of each image's function."""
    result = torch.empty_like(planes[0])
    for index, function in enumerate(functions):
        members = which == index
        if members.any():
            result[members] = function(*(plane[members] for plane in planes))
    return result


def _ground(first: Tensor, second: Tensor, direction: Tensor, canvas: int) -> Float[Tensor, "batch 3 height width"]:
    """A gradient between two colours of the same luminance."""
    centres = (torch.arange(canvas, device=first.device) + 0.5) / canvas - 0.5
    angle = 2 * math.pi * direction[:, None, None]
    along = (angle.cos() * centres[None, None, :] + angle.sin() * centres[None, :, None]) / math.sqrt(2) + 0.5
    return paint(first[:, :, None, None].expand(-1, -1, canvas, canvas), second, along)
