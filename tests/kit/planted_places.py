"""Images of one bar at any place, and models that fail by its place or size."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.splits import split_of
from vitlens.analysis.reliance.colour import luminance_of
from vitlens.data.split import Split
from vitlens.models.model import Model

SIDE = 32
CLASSES = ("across", "down")
GROUND = 0.35
CONTRAST = 0.4
_WIDTHS = (3, 4)  # px, of small and large bars
_SLIMNESS = 3  # times as long as wide
_GRAIN = 0.02
_FAR = 8.0  # px from the centre of the image
_SMALL = 36  # pixels: between the areas of small and large bars

_SQUARE = 5  # px, side of a dark square
_NEAR = 7  # px, the largest distance of a square from the middle of its bar, along each axis
_TOUCHED = 3  # pixels of a dark region next to the bar

# the bar (n, height, width), 1 or 0, and the luminance (n, height, width), to (n,) whether the
# model fails
Rule = Callable[[Tensor, Tensor], Tensor]


@cache
def bars(count: int = 120, *, seed: int = 0, masks: bool = True) -> Split:
    """Return bars across or down, of two sizes, at any place at which they lie inside the image."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    sizes = torch.randint(0, len(_WIDTHS), (count,), generator=generator)
    places = torch.rand(count, 2, generator=generator)
    objects = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    for at in range(count):
        width = _WIDTHS[sizes[at]]
        extent = (width, _SLIMNESS * width) if labels[at] == 0 else (_SLIMNESS * width, width)
        top, left = (
            int(share * (SIDE - side + 1)) for share, side in zip(places[at].tolist(), extent)
        )
        objects[at, top : top + extent[0], left : left + extent[1]] = True
    planes = (
        GROUND + CONTRAST * objects + _GRAIN * torch.rand(count, SIDE, SIDE, generator=generator)
    )
    pixels = planes[:, None].expand(count, 3, SIDE, SIDE)
    return split_of(pixels.clone(), labels, CLASSES, masks=objects if masks else None)


@cache
def covered_bars(count: int = 200, *, seed: int = 0) -> Split:
    """Return bars, most with a dark square near or on them; masks have what remains visible."""
    split = bars(count, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    pixels = split.source.read(torch.arange(count)).clone()
    masks = split.masks.clone()
    offsets = torch.randint(-_NEAR, _NEAR + 1, (count, 2), generator=generator)
    for at in range(count):
        middle = masks[at].nonzero().float().mean(0).round().long() + offsets[at]
        top, left = (max(0, int(place) - _SQUARE // 2) for place in middle)
        where = slice(top, top + _SQUARE), slice(left, left + _SQUARE)
        pixels[(at, slice(None), *where)] = 0
        masks[(at, *where)] = False
    return replace(split_of(pixels, split.labels, CLASSES), masks=masks)


class ReadsDirection(nn.Module):
    """A model that reads whether the bar is wider than high, by its bright pixels."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, images: Tensor) -> Tensor:
        planes = luminance_of(images)[:, 0]
        flat = planes.flatten(1)
        middle = (flat.median(1).values + flat.amax(1)) / 2
        bar = (planes > middle[:, None, None]).float()
        score = _spread(bar.sum(1)) - _spread(bar.sum(2))
        score = torch.where(self.rule(bar, planes), -score, score)
        return torch.stack([score, -score], 1)


def _spread(profile: Tensor) -> Tensor:
    """Return the variance of places, weighted by a profile (n, places)."""
    places = torch.arange(profile.shape[1]).float()
    weights = profile / profile.sum(1, keepdim=True).clamp_min(1)
    mean = weights @ places
    return weights @ places.square() - mean.square()


def never(bar: Tensor, _planes: Tensor) -> Tensor:
    """Return False for every image."""
    return torch.zeros(len(bar), dtype=torch.bool)


def off_centre(bar: Tensor, _planes: Tensor) -> Tensor:
    """Return True where the middle of the bar lies far from that of the image."""
    places = torch.arange(SIDE) + 0.5
    total = bar.sum((1, 2)).clamp_min(1)
    down = bar.sum(2) @ places / total - SIDE / 2
    across = bar.sum(1) @ places / total - SIDE / 2
    return torch.hypot(down, across) > _FAR


def small(bar: Tensor, _planes: Tensor) -> Tensor:
    """Return True where the bar has few pixels."""
    return bar.sum((1, 2)) < _SMALL


def touched(bar: Tensor, planes: Tensor) -> Tensor:
    """Return True where a dark region touches the bar."""
    dark = planes < planes.flatten(1).median(1).values[:, None, None] / 2
    around = F.max_pool2d(bar[:, None], 5, stride=1, padding=2)[:, 0]
    return (around * dark).sum((1, 2)) >= _TOUCHED


def failing(rule: Rule) -> Model:
    """Return a model that reads the direction of bars, and fails where a rule holds."""
    return vitlens.wrap(
        ReadsDirection(rule).eval(),
        alias=rule.__name__,
        image_size=SIDE,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        classes=CLASSES,
    )


class ReadsSaturation(nn.Module):
    """Reads how far the channels of an image lie apart on average."""

    def forward(self, images: Tensor) -> Tensor:
        evidence = 50 * ((images.amax(1) - images.amin(1)).mean((1, 2)) - 0.15)
        return torch.stack([-evidence, evidence], 1)


def reads_saturation() -> Model:
    """Return a model that reads how colourful an image is."""
    return vitlens.wrap(
        ReadsSaturation().eval(),
        alias="saturation",
        image_size=SIDE,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        classes=CLASSES,
    )
