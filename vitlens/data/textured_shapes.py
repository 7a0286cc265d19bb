"""Draw the embedded sets `shapes` and `shapes-conflict`: shape x texture x colour, with masks.

In `shapes`, every shape has a texture of its class, so that both determine the class, and colours
are uninformative. In `shapes-conflict`, the texture is that of another class, so that a prediction
shows which of the two the model uses. The label is the shape. Shapes are signed distances (negative
inside, about one unit from centre to tip). Textures are numbers from -1 to 1 over pixels. Both are
rotated at random, so that neither position nor direction determines the class.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.drawing import (
    REFERENCE,
    add_grain,
    colour,
    drawn_split,
    gradient,
    in_chunks,
    require_canvas,
)
from vitlens.data.draws import keys, uniform
from vitlens.data.registry import DataRequest
from vitlens.data.split import Drawings, Drawn, Split
from vitlens.names import Part

Cue = Literal["agree", "conflict"]
Plane = Float[Tensor, "batch height width"]

# multiples of the 7 other textures, so that all of them are used equally often
PER_CLASS: Final = {"train": 560, "test": 70}
_PART: Final = {"train": 1, "test": 2}  # part of the keys, so that no image is in both parts
_PERIOD: Final = 5.0  # px: the period of the textures on a canvas of REFERENCE px
_TEXTURE_CONTRAST: Final = 0.22  # largest difference of luminance from that of the shape
# smallest radius of a shape as a fraction of the canvas, and the range above it
_RADIUS: Final = 0.31
_RADIUS_RANGE: Final = 0.16
# smallest luminance of the ground and of the shape, and the range above each
_DARK: Final = 0.08
_DARK_RANGE: Final = 0.2
_LIGHT: Final = 0.5
_LIGHT_RANGE: Final = 0.16


def _star(x: Plane, y: Plane) -> Plane:
    """Return the distance to a star of five points.

    The star consists of ten equal triangles around its centre. Each pixel is moved into one of
    them, with the tip at (1, 0). The distance is that to the triangle's outer side.
    """
    sector = 2 * math.pi / 5
    inner_radius = 0.42  # of the corners between two points
    folded_angle = (torch.remainder(torch.atan2(y, x) + sector / 2, sector) - sector / 2).abs()
    radius = (x.square() + y.square()).sqrt()
    folded_x = radius * folded_angle.cos()
    folded_y = radius * folded_angle.sin()
    # The outer side goes from the tip (1, 0) to the inner corner. The signed distance to its line
    # is the cross product of (point - tip) and the side, over the side's length.
    side_x = inner_radius * math.cos(sector / 2) - 1
    side_y = inner_radius * math.sin(sector / 2)
    return ((folded_x - 1) * side_y - folded_y * side_x) / math.hypot(side_x, side_y)


def _moon(x: Plane, y: Plane) -> Plane:
    bite = 0.85 - ((x - 0.55).square() + y.square()).sqrt()
    return torch.maximum((x.square() + y.square()).sqrt() - 1, bite)


def _cross(x: Plane, y: Plane) -> Plane:
    thickness = torch.minimum(x.abs(), y.abs()) - 0.3
    length = torch.maximum(x.abs(), y.abs()) - 0.95
    return torch.maximum(thickness, length)


def _hourglass(x: Plane, y: Plane) -> Plane:
    side = (x.abs() - y.abs() - 0.12) / math.sqrt(2)
    return torch.maximum(side, y.abs() - 0.66)


# signed distances as functions of x, to the right, and y, down; the centre is (0, 0)
SHAPES: Final[Mapping[str, Callable[[Plane, Plane], Plane]]] = MappingProxyType(
    {
        "circle": lambda x, y: (x.square() + y.square()).sqrt() - 0.9,
        "cross": _cross,
        "hourglass": _hourglass,
        "moon": _moon,
        "ring": lambda x, y: ((x.square() + y.square()).sqrt() - 0.7).abs() - 0.27,
        "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.7,
        "star": _star,
        "triangle": lambda x, y: torch.maximum(math.sqrt(3) / 2 * x.abs() - y / 2, y) - 0.5,
    }
)


def _lines(u: Plane, v: Plane, _: Plane) -> Plane:
    return (4 * (torch.maximum((0.8 * u).cos(), (0.8 * v).cos()) - 0.75)).clamp(-1, 1)


def _rings(u: Plane, v: Plane, _: Plane) -> Plane:
    return (3 * (u.square() + v.square()).sqrt().sin()).clamp(-1, 1)


# functions of the rotated coordinates u and v (a period is 2π) and of noise in [0, 1], by the class
# that has this texture in training
TEXTURES: Final[Mapping[str, Callable[[Plane, Plane, Plane], Plane]]] = MappingProxyType(
    {
        # `0 * v` gives the shape of the canvas
        "circle": lambda u, v, _: (3 * u.sin()).clamp(-1, 1) + 0 * v,  # stripes
        "cross": lambda u, v, _: (3 * (u.cos() + v.cos() - 0.75)).clamp(-1, 1),  # dots
        "hourglass": lambda _, __, noise: 2 * (noise > 0.5).to(noise) - 1,  # grain
        "moon": lambda u, v, _: (4 * (0.7 * u).sin() * (0.7 * v).sin()).clamp(-1, 1),  # checks
        "ring": lambda u, v, _: 0 * (u + v),  # plain
        "square": lambda u, v, _: (3 * (u + 1.9 * (0.8 * v).sin()).sin()).clamp(-1, 1),  # waves
        "star": _lines,
        "triangle": _rings,
    }
)
CLASSES: Final = tuple(SHAPES)


def _draw(shapes: Tensor, textures: Tensor, keys: Tensor, *, canvas: int) -> Drawn:
    """Draw a textured shape on a gradient; shapes, textures: the classes of these, (batch,)."""
    x, y, radius = _shape_coordinates(uniform(keys, 4, stream=11), canvas)
    distance = _apply_by_class(list(SHAPES.values()), shapes, x, y) * radius[:, None, None]  # px
    cover = (0.5 - distance).clamp(0, 1)

    draws = uniform(keys, 12, stream=12)
    dark = _DARK + _DARK_RANGE * draws[:, 0]
    light = _LIGHT + _LIGHT_RANGE * draws[:, 1]
    hues = draws[:, 2:11].reshape(-1, 3, 3)  # (batch, two of the ground and one of the shape, RGB)
    direction = draws[:, 11]
    ground = gradient(colour(hues[:, 0], dark), colour(hues[:, 1], dark), direction, canvas)
    texture = _TEXTURE_CONTRAST * _surface(keys, textures, canvas)[:, None]
    surface = colour(hues[:, 2], light)[:, :, None, None] + texture
    return add_grain(ground + cover[:, None] * (surface - ground), keys, cover >= 0.5, stream=13)


def _shape_coordinates(draws: Float[Tensor, "batch 4"], canvas: int) -> tuple[Plane, Plane, Tensor]:
    """Return coordinates in which the shape is upright with radius 1, and its radius in px.

    draws: numbers in [0, 1) for the radius, the centre across and down, and the angle.
    """
    radius = (_RADIUS + _RADIUS_RANGE * draws[:, 0]) * canvas
    room = canvas - 2 * radius
    centres = torch.arange(canvas, device=draws.device) + 0.5
    across = centres[None, None, :] - (radius + draws[:, 1] * room)[:, None, None]
    down = centres[None, :, None] - (radius + draws[:, 2] * room)[:, None, None]
    angle = 2 * math.pi * draws[:, 3, None, None]
    scale = radius[:, None, None]
    cos = angle.cos()
    sin = angle.sin()
    return (cos * across + sin * down) / scale, (cos * down - sin * across) / scale, radius


def _surface(keys: Tensor, textures: Tensor, canvas: int) -> Plane:
    """Return the textures over the whole canvas, -1 to 1, rotated and shifted at random."""
    draws = uniform(keys, 3, stream=14)  # for the shift across and down, and the angle
    unit = 2 * math.pi / (_PERIOD * canvas / REFERENCE)  # radians of the textures for a px
    centres = (torch.arange(canvas, device=keys.device) + 0.5) * unit
    across = centres[None, None, :] - draws[:, 0, None, None] * unit * canvas
    down = centres[None, :, None] - draws[:, 1, None, None] * unit * canvas
    angle = 2 * math.pi * draws[:, 2, None, None]
    u = angle.cos() * across + angle.sin() * down
    v = angle.cos() * down - angle.sin() * across
    side = REFERENCE // 2  # cells of the noise
    coarse = uniform(keys, side**2, stream=15).reshape(-1, 1, side, side)
    noise = F.interpolate(coarse, size=(canvas, canvas), mode="nearest")[:, 0]
    return _apply_by_class(list(TEXTURES.values()), textures, u, v, noise)


def _apply_by_class(
    functions: list[Callable[..., Plane]], classes: Tensor, *planes: Plane
) -> Plane:
    """Return the values of each image's function, by its class (batch,)."""
    result = torch.empty_like(planes[0])
    for index, function in enumerate(functions):
        is_member = classes == index
        if is_member.any():
            result[is_member] = function(*(plane[is_member] for plane in planes))
    return result


def shapes(
    part: Part,
    *,
    cue: Cue = "agree",
    seed: int = 0,
    canvas: int = REFERENCE,
    per_class: int | None = None,
) -> Split:
    """Return one part of the set; class = shape, masks = its silhouette (test part).

    The file names contain shape and texture (`circle/circle3-star3.png`), as in folders of cue
    conflicts. The test part is held in memory. The training part is drawn when it is read, with new
    images every epoch. Raises DataError for a canvas on which nothing can be drawn.

    cue: "agree" for the texture of the shape's class, or "conflict" for the textures of the other
        classes, all equally often.
    canvas: the size of the images in pixels.
    per_class: the number of images in each class; None means PER_CLASS.
    """
    require_canvas(canvas)
    if per_class is None:
        per_class = PER_CLASS[part]
    class_count = len(CLASSES)
    order = torch.arange(per_class * class_count)
    labels = order % class_count
    numbers = order // class_count
    textures = labels
    if cue == "conflict":  # the other classes in turn
        textures = (labels + 1 + numbers % (class_count - 1)) % class_count
    drawings = Drawings(
        render=partial(_draw_images, part=part, seed=seed, canvas=canvas),
        subjects=torch.stack((labels, textures), 1),
        numbers=numbers,
        place=partial(_compute_places, part=part, seed=seed),
    )
    files = []
    for label, texture, index in zip(labels.tolist(), textures.tolist(), numbers.tolist()):
        shape = CLASSES[label]
        number = index + 1
        files.append(f"{shape}/{shape}{number}-{CLASSES[texture]}{number}.png")
    name = "shapes" if cue == "agree" else "shapes-conflict"
    return drawn_split(name, part, drawings, canvas, labels, classes=CLASSES, files=tuple(files))


def _draw_images(subjects: Tensor, numbers: Tensor, *, part: Part, seed: int, canvas: int) -> Drawn:
    """Draw images, each from its shape and texture (indices into SHAPES) and its number."""
    image_keys = _keys(subjects, numbers, part=part, seed=seed)
    return in_chunks(partial(_draw, canvas=canvas), canvas, *subjects.unbind(1), image_keys)


def _keys(subjects: Tensor, numbers: Tensor, *, part: Part, seed: int) -> Tensor:
    return keys(seed, torch.full_like(numbers, _PART[part]), subjects[:, 0], numbers)


def _compute_places(subjects: Tensor, numbers: Tensor, *, part: Part, seed: int) -> Tensor:
    """Return the size and centre of each shape, as `Drawings.place` does.

    They are those of `_shape_coordinates`, by the same random numbers.
    """
    # the first three of the four draws of `_shape_coordinates`
    draws = uniform(_keys(subjects, numbers, part=part, seed=seed), 3, stream=11)
    size = draws[:, :1]
    radius = _RADIUS + _RADIUS_RANGE * size
    centre = radius + draws[:, 1:] * (1 - 2 * radius)
    return torch.cat((size, centre), 1)


def load(request: DataRequest) -> Split:
    """Return the requested part of the set of that name."""
    cue: Cue = "agree" if request.name == "shapes" else "conflict"
    return shapes(request.part, cue=cue, seed=request.seed)
