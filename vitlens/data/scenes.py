"""Scenes: a handwritten digit at a random place, size and colour, on a textured canvas among distractor strokes.

And what all drawn sets share.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.draws import uniform
from vitlens.data.registry import SETS
from vitlens.data.split import Drawings, Drawn, InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Labels, Masks

Plane = Float[Tensor, "batch height width"]
Colours = Float[Tensor, "batch 3"]

LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue (Rec. 709)
REFERENCE = 32  # px: thickness and length of strokes are stated for a canvas this wide
STROKES = 4
_DIGIT = (0.65, 0.9)  # smallest and largest height of a digit as a fraction of the canvas
_CONTRAST = 0.45  # least difference in luminance between ink and background, before the texture of at most 0.1
_EDGE = 0.42  # fraction of ink at which the digit's outline is drawn
_SLOPE = 0.9  # difference of that fraction between source pixels that gives an outline one px of smoothing
_OTHER = 100  # added to a stream for the draws of another ground
_CHUNK = 1 << 18  # canvas pixels drawn at a time, to bound the memory


def drawn_split(name: str, part: Part, drawings: Drawings, canvas: int, labels: Labels, **more: Any) -> Split:
    """One part of a drawn set, on canvases of so many px. more: other fields of the Split.

    The test part is held in memory with its masks; the training part is drawn when it is read.
    """
    split = Split(
        name=name, title=SETS[name].title, part=part, source=drawings, size=(canvas, canvas), labels=labels, **more
    )
    if part == "train":
        return split
    drawn = drawings.draw(torch.arange(len(drawings)))
    return replace(split, source=InMemory(drawn.pixels), masks=drawn.masks, places=split.drawn_places)


def require_canvas(canvas: int) -> None:
    """Raise DataError for a canvas (px) on which nothing can be drawn."""
    if not 16 <= canvas <= 1024:
        raise DataError(f"expected a canvas of 16 to 1024 px, found {canvas}; try {REFERENCE}")


def in_chunks(draw: Callable[..., Drawn], canvas: int, *rows: Tensor) -> Drawn:
    """What a function draws of rows (batch, ...), so many at a time that the memory is bounded."""
    step = max(1, _CHUNK // canvas**2)
    starts = range(0, max(1, len(rows[0])), step)
    parts = [draw(*(each[at : at + step] for each in rows)) for at in starts]
    return Drawn(torch.cat([part.pixels for part in parts]), torch.cat([part.masks for part in parts]))


def render(
    glyphs: Float[Tensor, "batch 8 8"],
    keys: Int[Tensor, " batch"],
    canvas: int = REFERENCE,
    strokes: int = STROKES,
    ground: int = 0,
) -> Drawn:
    """Draw one scene for each glyph (fraction of ink); it depends only on its key.

    canvas: px, square; strokes: their number, at most STROKES; ground: 0 for the scene's own texture, 1 for another one
    of the same luminance.
    """
    return in_chunks(partial(_draw, size=canvas, strokes=strokes, ground=ground), canvas, glyphs, keys)


def _draw(glyphs: Tensor, keys: Tensor, *, size: int, strokes: int, ground: int) -> Drawn:
    """The background, then strokes that do not touch the digit, then the digit."""
    ink_share, cell = _place(glyphs, uniform(keys, 4, stream=1), size)
    alpha = ((ink_share - _EDGE) * (cell / _SLOPE) + 0.5).clamp(0, 1)  # outline smoothed over one or two pixels
    clear = 1 - (ink_share * 8).clamp(0, 1)  # no stroke touches the ink, which could change the class
    tone = uniform(keys, 2 + 3 * (3 + STROKES), stream=2)
    # the ink is lighter, always: with random polarity, vit-mini was still at chance after 10,240 images, against a
    # top-1 accuracy of 65 % with light ink
    ground_tone = 0.06 + 0.29 * tone[:, 0]
    ink_tone = ground_tone + _CONTRAST + (0.92 - _CONTRAST - ground_tone) * tone[:, 1]
    hues = tone[:, 2:].reshape(-1, 3 + STROKES, 3)

    canvas = _ground(keys, ground_tone, hues, size, other=_OTHER * ground)
    shape = uniform(keys, 6 * STROKES, stream=3).reshape(-1, STROKES, 6)
    for index in range(strokes):
        between = ground_tone + (0.3 + 0.7 * shape[:, index, 5]) * (ink_tone - ground_tone)
        cover = _stroke(shape[:, index], size) * clear
        canvas = paint(canvas, colour(hues[:, 3 + index], between), cover)
    canvas = paint(canvas, colour(hues[:, 2], ink_tone), alpha)
    return finished(canvas, keys, alpha >= 0.5, stream=4 + _OTHER * ground)


def finished(image: Float[Tensor, "batch 3 height width"], keys: Tensor, masks: Masks, *, stream: int) -> Drawn:
    """The image with its grain, in 8 bits."""
    grain = uniform(keys, math.prod(image.shape[2:]), stream=stream).reshape(-1, *image.shape[2:])
    image = image + (grain - 0.5)[:, None] * 0.06
    return Drawn((image.clamp(0, 1) * 255).round().to(torch.uint8), masks)


def _axes(canvas: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Centres of the canvas' pixels: y (canvas, 1) and x (1, canvas), in px."""
    centres = torch.arange(canvas, device=device) + 0.5
    return centres[:, None], centres[None, :]


def _place(glyphs: Tensor, draws: Tensor, canvas: int) -> tuple[Plane, Tensor]:
    """The glyph's ink on the canvas, and the size of its source pixels in px (batch, 1, 1).

    Bicubic: eight source pixels are upsampled to fifteen or more, so that there is no aliasing.
    """
    low, high = _DIGIT
    size = (low + (high - low) * draws[:, 0]) * canvas
    angle = (draws[:, 1] - 0.5) * math.radians(24)
    extent = size * (angle.cos() + angle.sin().abs())  # of the rotated square
    room = (canvas - extent).clamp(min=0)
    y, x = _axes(canvas, glyphs.device)
    y = y - (canvas / 2 + (draws[:, 2] - 0.5) * room)[:, None, None]
    x = x - (canvas / 2 + (draws[:, 3] - 0.5) * room)[:, None, None]
    cos, sin, half = (value[:, None, None] for value in (angle.cos(), angle.sin(), size / 2))
    grid = torch.stack(((cos * x + sin * y) / half, (cos * y - sin * x) / half), dim=-1)
    ink_share = F.grid_sample(glyphs[:, None], grid, mode="bicubic", padding_mode="zeros", align_corners=False)[:, 0]
    return ink_share, half / 4


def whereabouts(keys: Int[Tensor, " batch"]) -> Float[Tensor, "batch 3"]:
    """Size and centre of each scene's digit, see `Drawings`."""
    draws = uniform(keys, 4, stream=1)
    low, high = _DIGIT
    angle = (draws[:, 1:2] - 0.5) * math.radians(24)
    room = 1 - (low + (high - low) * draws[:, :1]) * (angle.cos() + angle.sin().abs())
    return torch.cat((draws[:, :1], 0.5 + (draws[:, [3, 2]] - 0.5) * room.clamp(min=0)), 1)  # as in _place


def colour(hue: Colours, luminance: Tensor) -> Colours:
    """A colour of this luminance: a random one shifted along grey, desaturated as needed to stay in [0, 1]."""
    weights = torch.tensor(LUMINANCE, device=hue.device)
    chroma = hue - (hue * weights).sum(1, keepdim=True)  # the component without luminance
    target = luminance[:, None]
    room = torch.where(chroma > 0, 1 - target, target) / chroma.abs().clamp(min=1e-6)
    return target + chroma * room.amin(1, keepdim=True).clamp(max=1.0)


def _ground(
    keys: Tensor, tone: Tensor, hues: Tensor, canvas: int, *, other: int
) -> Float[Tensor, "batch 3 height width"]:
    """A gradient between two colours of one luminance, with clouds and stripes of luminance (at most 0.07)."""
    draws = uniform(keys, 5, stream=5 + other)[:, :, None, None]
    y, x = _axes(canvas, keys.device)
    colours = gradient(colour(hues[:, 0], tone), colour(hues[:, 1], tone), draws[:, 0, 0, 0], canvas)

    lattice = uniform(keys, 36, stream=6 + other).reshape(-1, 1, 6, 6) - 0.5
    clouds = F.interpolate(lattice, size=(canvas, canvas), mode="bicubic", align_corners=True)[:, 0].clamp(-0.5, 0.5)
    slant = draws[:, 1] * math.pi
    across = slant.cos() * x / canvas + slant.sin() * y / canvas
    stripes = (2 * math.pi * (across * (2 + 4 * draws[:, 2]) + draws[:, 3])).sin() / 2
    texture = clouds + draws[:, 4] * (stripes - clouds)
    return colours + 0.14 * texture[:, None]


def gradient(first: Colours, second: Colours, turn: Tensor, canvas: int) -> Float[Tensor, "batch 3 height width"]:
    """From one colour to another across the canvas; turn: (batch,) its direction as a fraction of a circle."""
    angle = 2 * math.pi * turn[:, None, None]
    y, x = (axis / canvas - 0.5 for axis in _axes(canvas, turn.device))
    along = (angle.cos() * x + angle.sin() * y) / math.sqrt(2) + 0.5  # 0 to 1
    return paint(first[:, :, None, None].expand(-1, -1, canvas, canvas), second, along)


def _stroke(draws: Float[Tensor, "batch 6"], canvas: int) -> Plane:
    """The coverage of each pixel by a short straight stroke; draws: centre y, x, angle, length, thickness, tone."""
    unit = canvas / REFERENCE
    centre_y, centre_x, angle, length, thickness, _ = (value[:, None, None] for value in draws.unbind(1))
    y, x = _axes(canvas, draws.device)
    y, x = y - centre_y * canvas, x - centre_x * canvas
    cos, sin = (angle * math.pi).cos(), (angle * math.pi).sin()
    half_length = (1.5 + 2.5 * length) * unit
    half_width = (0.5 + 0.4 * thickness) * unit
    beyond = ((cos * x + sin * y).abs() - half_length).clamp(min=0)
    distance = (beyond**2 + (cos * y - sin * x) ** 2).sqrt()
    return (half_width - distance + 0.5).clamp(0, 1)


def paint(canvas: Tensor, colour: Colours, cover: Plane) -> Tensor:
    """The canvas blended with a colour by `cover`, 0 to 1."""
    return canvas + cover[:, None] * (colour[:, :, None, None] - canvas)
