"""Drawn images of bright bars, the classes of which are directions, and what can be read off their
pixels.

Everything is read relative to the contrast of an image, so that no change of brightness or contrast
decides it.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.reliance.colour import luminance_of
from vitlens.data.drawing import colour, pure_hue
from vitlens.data.split import InMemory, Split
from vitlens.shapes import Images, Labels, Logits, Masks

SIDE: Final = 32  # px
CLASSES: Final = ("0 degrees", "36 degrees", "72 degrees", "108 degrees", "144 degrees")
HUES: Final = 10
MARK: Final = 3  # px, side of a mark in the upper left corner
TEXTURES: Final = (
    (0.5, 0.0),
    (0.0, 0.5),
    (0.5, 0.5),
    (0.25, 0.5),
    (0.5, 0.25),
)  # cycles a pixel, one for each class
_LENGTH: Final = (9.0, 16.0)  # px, of a bar
_SLIMNESS: Final = 3.0  # times as long as wide
_PLACE: Final = (
    11.0,
    21.0,
)  # px: at any place a bar of any length lies inside, and leaves the corner free
_JITTER: Final = 5.0  # degrees
_GROUND: Final = (0.25, 0.45)  # luminance
_CONTRAST: Final = (0.15, 0.5)  # luminance of a bar minus that of the ground
_HEADROOM: Final = 0.1  # of the ground's channels, so that clouds and grain are not clipped
_CLOUDS: Final = 0.06  # range of luminance
_GRAIN: Final = 0.03
_DOTS: Final = 0.02  # the largest share of bright dots
_MARKED: Final = 0.12  # of the images
_SQUARE: Final = 6  # px, side of a dark square
_COVERED: Final = 0.5  # of the images have a dark square
# px, the largest distance of a square from the middle of its bar, along each axis
_NEAR: Final = 10.0
_TEXTURE: Final = 0.15  # the largest amplitude
_BRIGHTEST: Final = 16  # pixels: the darkest of so many of the brightest counts as the bar
_SCALE: Final = 10.0  # of the logits
_TEMPLATES: Final = (10.0, 14.0)  # px, lengths
_HALF: Final = 8  # px, half of the side of a template
# of the contrast: brighter pixels off the bar are dots; clouds and grain reach 0.4 of the faintest
_DOT: Final = 0.5
_CORNER: Final = 7  # px, side of the region in which a mark is seen
_DARK: Final = 0.35  # below the ground by this share of the contrast


@dataclass(frozen=True)
class Extras:
    """What is drawn in addition."""

    marks: bool = False
    squares: bool = False
    textures: bool = False


def draw(count: int, seed: int, extras: Extras) -> Split:
    """Return images with their masks; hue, place, size, contrast, brightness and dots do not depend
    on the class.
    """
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    labels = torch.randint(0, len(CLASSES), (count,), generator=generator)
    turn = math.radians(180 / len(CLASSES)) * labels[:, None, None] + torch.deg2rad(
        between(-_JITTER, _JITTER)
    )
    down = between(*_PLACE)
    across = between(*_PLACE)
    cover = _bar(down, across, turn, between(*_LENGTH))
    masks = cover >= 0.5
    tone = between(*_GROUND)
    contrast = between(*_CONTRAST)
    hues = torch.randint(0, HUES, (count,), generator=generator)
    ground = colour(pure_hue(hues / HUES), tone[:, 0, 0], _HEADROOM)[:, :, None, None]
    lattice = torch.rand(count, 1, 5, 5, generator=generator) - 0.5
    clouds = F.interpolate(lattice, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    images = ground + _CLOUDS * clouds
    free = F.max_pool2d(cover[:, None], 5, 1, 2)[:, 0] == 0
    dots = (torch.rand(count, SIDE, SIDE, generator=generator) < between(0, _DOTS)) & free
    bright = (tone + contrast)[:, None]
    images = torch.where(dots[:, None], bright, images)
    ink = bright
    if extras.textures:
        kinds = torch.randint(0, len(TEXTURES), (count,), generator=generator)
        amplitude = between(0, 1)[:, None] * contrast[:, None] * _TEXTURE / _CONTRAST[1]
        ink = bright + amplitude * _waves()[0][kinds][:, None].sign()
    images = torch.lerp(images, ink.expand_as(images), cover[:, None])
    if extras.squares:
        images, masks = _with_squares(
            images, masks, torch.cat([down, across], 1)[:, :, 0], generator
        )
    images = images + _GRAIN * (torch.rand(count, 1, SIDE, SIDE, generator=generator) - 0.5)
    if extras.marks:
        marked = torch.rand(count, generator=generator) < _MARKED
        images[marked, :, :MARK, :MARK] = 1.0
    pixels = (255 * images.clamp(0, 1)).round().to(torch.uint8)
    return Split("bars", "test", InMemory(pixels), (SIDE, SIDE), CLASSES, labels, masks=masks)


def _axes() -> tuple[Tensor, Tensor]:
    """Return the centres of pixels, rows (SIDE, 1) and columns (1, SIDE)."""
    centres = torch.arange(SIDE) + 0.5
    return centres[:, None], centres[None, :]


def _bar(down: Tensor, across: Tensor, turn: Tensor, length: Tensor) -> Tensor:
    """Return the coverage of each pixel by a bar."""
    rows, columns = _axes()
    along = turn.cos() * (columns - across) + turn.sin() * (rows - down)
    aside = turn.cos() * (rows - down) - turn.sin() * (columns - across)
    inside_along = (length / 2 - along.abs() + 0.5).clamp(0, 1)
    return inside_along * (length / (2 * _SLIMNESS) - aside.abs() + 0.5).clamp(0, 1)


def _with_squares(
    images: Images, masks: Masks, centres: Tensor, generator: torch.Generator
) -> tuple[Images, Masks]:
    """Return half of the images with a dark square near the bar, or on it, and what remains visible
    of the bars.
    """
    count = len(images)
    middle = centres + _NEAR * (2 * torch.rand(count, 2, generator=generator) - 1)
    rows, columns = _axes()
    inside_rows = (rows - middle[:, :1, None]).abs() < _SQUARE / 2
    inside_columns = (columns - middle[:, 1:, None]).abs() < _SQUARE / 2
    has_square = torch.rand(count, generator=generator) < _COVERED
    squares = inside_rows & inside_columns & has_square[:, None, None]
    return torch.where(squares[:, None], torch.zeros(()), images), masks & ~squares


@lru_cache(maxsize=1)  # the oracle and its fault read the same images
def normalized(images: Images) -> tuple[Tensor, Tensor]:
    """Return the luminance (n, height, width), 0 for the ground and 1 for the bar, and their
    distance (n,).
    """
    planes = luminance_of(images)[:, 0]
    ground = _ground_of(planes)
    contrast = (planes.flatten(1).topk(_BRIGHTEST, dim=1).values[:, -1] - ground).clamp_min(1e-3)
    return (planes - ground[:, None, None]) / contrast[:, None, None], contrast


def _ground_of(planes: Tensor) -> Tensor:
    """Return the median luminance of every second pixel of each image."""
    return planes[:, ::2, ::2].flatten(1).median(1).values


def object_contrast(images: Images) -> Tensor:
    return normalized(images)[1]


@lru_cache(maxsize=1)
def bars_of(images: Images) -> Tensor:
    """Return 1 on the bar (n, height, width); dots are too small, and a mark lies too far out."""
    return _regions(normalized(images)[0] > 0.5)


def _regions(chosen: Tensor) -> Tensor:
    """Return the parts of chosen pixels that are at least three pixels wide, off the edge of the
    image.
    """
    planes = chosen[:, None].float()
    cores = (F.avg_pool2d(planes, 3, 1, 1) > 0.7).float()
    regions = F.max_pool2d(cores, 3, 1, 1)[:, 0] * planes[:, 0]
    inside = torch.zeros_like(regions)
    edge = MARK
    inside[:, edge:-edge, edge:-edge] = regions[:, edge:-edge, edge:-edge]
    return inside


def object_area(images: Images) -> Tensor:
    return bars_of(images).sum((1, 2))


def distance_from_centre(images: Images) -> Tensor:
    """Return the distance of the middle of the bar from that of the image, px."""
    bars = bars_of(images)
    total = bars.sum((1, 2)).clamp_min(1)
    rows, columns = _axes()
    return torch.hypot(
        (bars * rows).sum((1, 2)) / total - SIDE / 2,
        (bars * columns).sum((1, 2)) / total - SIDE / 2,
    )


def brightness(images: Images) -> Tensor:
    return luminance_of(images).mean((1, 2, 3))


def clutter(images: Images) -> Tensor:
    """Return the share of bright pixels off the bar."""
    around = 1 - F.max_pool2d(bars_of(images)[:, None], 5, 1, 2)[:, 0]
    dots = (normalized(images)[0] > _DOT).float()
    return (dots * around).sum((1, 2)) / around.sum((1, 2)).clamp_min(1)


def mark_in_corner(images: Images) -> Tensor:
    """Return how much brighter than the ground a region of a mark's size near the upper left corner
    is.
    """
    planes = luminance_of(images)[:, 0]
    ground = _ground_of(planes)
    regions = F.avg_pool2d(planes[:, None, :_CORNER, :_CORNER], MARK, 1)
    return regions.amax((1, 2, 3)) - ground


def covered(images: Images) -> Tensor:
    """Return the share of the bar's outline at which it touches a dark region, whatever the size of
    the bar.
    """
    dark = _regions(normalized(images)[0] < -_DARK)
    bars = bars_of(images)
    outline = F.max_pool2d(bars[:, None], 3, 1, 1)[:, 0] - bars
    return (outline * dark).sum((1, 2)) / outline.sum((1, 2)).clamp_min(1)


@cache
def _waves() -> tuple[Tensor, Tensor]:
    """Return the waves of all textures, and the same a quarter of a period on, (textures, height,
    width).
    """
    rows = torch.arange(SIDE)[:, None]
    columns = torch.arange(SIDE)[None, :]
    phases = torch.stack(
        [2 * math.pi * (down * rows + across * columns) for down, across in TEXTURES]
    )
    return (phases + math.pi / 4).cos(), (phases + math.pi / 4).sin()


def textures(images: Images) -> Tensor:
    """Return the amplitude of every texture on the bar, relative to its contrast (n, textures)."""
    planes, _ = normalized(images)
    bars = bars_of(images)
    inside = 1 - F.max_pool2d(1 - bars[:, None], 3, 1, 1)[:, 0]  # without the bar's outline
    area = inside.sum((1, 2)).clamp_min(1)
    fine = (planes - (planes * inside).sum((1, 2))[:, None, None] / area[:, None, None]) * inside
    parts = [torch.einsum("nhw,thw->nt", fine, wave) / area[:, None] for wave in _waves()]
    return torch.hypot(*parts)


@cache
def _templates() -> Tensor:
    """Return bars of every direction and length (directions * lengths, 1, size, size), of mean 0
    and norm 1.
    """
    turns = torch.arange(len(CLASSES)) * math.radians(180 / len(CLASSES))
    middle = torch.full((len(CLASSES), 1, 1), SIDE / 2 + 0.5)
    bars = [
        _bar(middle, middle, turns[:, None, None], torch.tensor(length)) for length in _TEMPLATES
    ]
    inside = slice(SIDE // 2 - _HALF, SIDE // 2 + _HALF + 1)
    cut = torch.stack(bars, 1)[..., inside, inside].flatten(0, 1)
    cut = cut - cut.mean((1, 2), keepdim=True)
    return (cut / cut.flatten(1).norm(dim=1)[:, None, None])[:, None]


def read_direction(images: Images) -> Logits:
    """Return the logits of an oracle: for each class the best match of any template at any
    place."""
    planes = normalized(images)[0].clamp(0, 1)[:, None]
    matches = F.conv2d(planes, _templates().to(planes), padding=_HALF)
    return _SCALE * matches.unflatten(1, (len(CLASSES), len(_TEMPLATES))).amax((2, 3, 4))


def labels_of(split: Split) -> Labels:
    assert split.labels is not None
    return split.labels
