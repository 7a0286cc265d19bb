"""Draw images: what all embedded sets share, from colours and gradients to the split.

A drawing is made of tensors with a row for each image. `in_chunks` calls the function that draws a
set (scenes.py, textured_shapes.py), which paints on a `gradient` and ends with `add_grain`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.data.draws import uniform
from vitlens.data.registry import SETS
from vitlens.data.split import Drawings, Drawn, InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Labels, Masks

Plane = Float[Tensor, "batch height width"]
Colours = Float[Tensor, "batch 3"]

LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue (Rec. 709)
REFERENCE = 32  # px: sizes of details are stated for a canvas this wide
_SIDES = (16, 1024)  # px: the smallest and the largest canvas
_GRAIN = 0.06  # range of the grain in each channel
_CHUNK = 1 << 18  # canvas pixels drawn at a time, to bound the memory


def drawn_split(
    name: str, part: Part, drawings: Drawings, canvas: int, labels: Labels, **more: Any
) -> Split:
    """Return one part of a drawn set.

    The test part is held in memory with its masks; the training part is drawn when it is read.

    canvas: the size of the images in pixels.
    more: other fields of the Split.
    """
    split = Split(
        name=name,
        title=SETS[name].title,
        part=part,
        source=drawings,
        size=(canvas, canvas),
        labels=labels,
        factors=drawings.factors,
        **more,
    )
    if part == "train":
        return split
    drawn = drawings.draw(torch.arange(len(drawings)))
    return replace(
        split, source=InMemory(drawn.pixels), masks=drawn.masks, places=split.drawn_places
    )


def require_canvas(canvas: int) -> None:
    """Raise DataError for a canvas (px) on which nothing can be drawn."""
    smallest, largest = _SIDES
    if not smallest <= canvas <= largest:
        raise DataError(
            f"expected a canvas of {smallest} to {largest} px, found {canvas}; try {REFERENCE}"
        )


def in_chunks(draw: Callable[..., Drawn], canvas: int, *rows: Tensor) -> Drawn:
    """Return the drawings of images, drawn in chunks to bound the memory.

    draw: a function of all `rows` that returns their images.
    rows: tensors (batch, ...) with a row for each image.
    """
    step = max(1, _CHUNK // canvas**2)
    pixels = []
    masks = []
    for start in range(0, max(1, len(rows[0])), step):  # once also without images, for the shape
        chunk = draw(*(tensor[start : start + step] for tensor in rows))
        pixels.append(chunk.pixels)
        masks.append(chunk.masks)
    return Drawn(torch.cat(pixels), torch.cat(masks))


def pixel_axes(canvas: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the centres of the canvas' pixels in px: y (canvas, 1) and x (1, canvas)."""
    centres = torch.arange(canvas, device=device) + 0.5
    return centres[:, None], centres[None, :]


def colour(hue: Colours, luminance: Tensor, headroom: float = 0.0) -> Colours:
    """Return a colour with this luminance: `hue` shifted along grey.

    It is desaturated as needed to stay in [0, 1].

    hue: any colour, for example a random one.
    headroom: the distance from 0 and 1 that the channels keep.
    """
    weights = torch.tensor(LUMINANCE, device=hue.device)
    chroma = hue - (hue * weights).sum(1, keepdim=True)  # the component without luminance
    target = luminance[:, None]
    # the largest share of the chroma with which every channel stays within its limits
    distance_to_limit = torch.where(chroma > 0, 1 - headroom - target, target - headroom)
    share_by_channel = distance_to_limit / chroma.abs().clamp(min=1e-6)
    return target + chroma * share_by_channel.amin(1, keepdim=True).clamp(max=1.0)


def pure_hue(turn: Tensor) -> Colours:
    """Return the most saturated colours of hues: fractions of a circle from red over green."""
    # the formula of HSV with full saturation and value: the circle has six sectors, and the
    # channels are shifted by two sectors
    sector = torch.tensor((5.0, 3.0, 1.0), device=turn.device)
    # a channel is 1 within one sector of its middle, and 0 from two sectors on
    distance = torch.remainder(sector + 6 * turn[:, None], 6)
    return 1 - torch.minimum(distance, 4 - distance).clamp(0, 1)


def gradient(
    first: Colours, second: Colours, turn: Tensor, canvas: int
) -> Float[Tensor, "batch 3 height width"]:
    """Return a gradient from one colour to another across the canvas.

    turn: the direction of the gradient, (batch,), as a fraction of a circle.
    """
    angle = 2 * math.pi * turn[:, None, None]
    y, x = pixel_axes(canvas, turn.device)
    y = y / canvas - 0.5
    x = x / canvas - 0.5
    along = (angle.cos() * x + angle.sin() * y) / math.sqrt(2) + 0.5  # 0 to 1
    return paint(first[:, :, None, None].expand(-1, -1, canvas, canvas), second, along)


def paint(canvas: Tensor, colour: Colours, cover: Plane) -> Tensor:
    """Return the canvas blended with a colour by `cover`, 0 to 1."""
    return canvas + cover[:, None] * (colour[:, :, None, None] - canvas)


def add_grain(
    image: Float[Tensor, "batch 3 height width"], keys: Tensor, masks: Masks, *, stream: int
) -> Drawn:
    """Return images with their grain, in 8 bits, and their masks."""
    height, width = image.shape[2:]
    grain = uniform(keys, height * width, stream=stream).reshape(-1, height, width)
    image = image + (grain - 0.5)[:, None] * _GRAIN
    return Drawn((image.clamp(0, 1) * 255).round().to(torch.uint8), masks)
