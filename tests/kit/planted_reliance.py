"""Images with independent cues, and models that each rely on one of them."""

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.splits import split_of
from vitlens.analysis.reliance.colour import luminance_of, rotate_hue
from vitlens.data.split import Split
from vitlens.models.model import Model

SIDE = 32
CLASSES = ("a", "b")
CUES = ("hue", "object-hue", "texture", "brightness", "shape")
_WIDTH = 4  # px of the ring in which no object lies
_SHAPE = 14  # px
_STRIPES = 0.1  # of the range of luminance
_RED = (0.24, -0.06, -0.06)


def _shapes() -> Tensor:
    """Return two shapes (2, side, side): two blobs next to each other, and one above the other."""
    bars = torch.zeros(_SHAPE, _SHAPE)
    bars[4:10, :5] = 1
    bars[4:10, 9:] = 1
    return torch.stack([bars, bars.T])


@cache
def images(count: int = 200, seed: int = 0, grey: bool = False) -> tuple[Split, dict[str, Tensor]]:
    """Draw images with masks of their objects, and the value, 0 or 1, of each cue in them."""
    generator = torch.Generator().manual_seed(seed)
    factors = {name: (torch.rand(count, generator=generator) < 0.5).long() for name in CUES}
    rows = torch.arange(SIDE)
    stripes = ((rows // 2) % 2).float() - 0.5
    textures = torch.stack([stripes.expand(SIDE, SIDE), stripes[:, None].expand(SIDE, SIDE)])
    level = torch.tensor([0.36, 0.56])[factors["brightness"]][:, None, None]
    plane = level + _STRIPES * textures[factors["texture"]]
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    starts = torch.randint(_WIDTH + 1, SIDE - _SHAPE - _WIDTH - 1, (count, 2), generator=generator)
    for image, (top, left) in enumerate(starts.tolist()):
        shape = _shapes()[factors["shape"][image]]
        masks[image, top : top + _SHAPE, left : left + _SHAPE] = shape > 0
    plane = torch.where(masks, level + 0.22, plane)
    colour = torch.tensor(_RED)[None, :, None, None].expand(count, 3, SIDE, SIDE)
    pixels = (plane[:, None] + colour).clamp(0, 1)
    objects = rotate_hue(pixels, math.pi * factors["object-hue"].float() + 1.2)
    pixels = rotate_hue(pixels, math.pi * factors["hue"].float() + 0.3)
    pixels = torch.where(masks[:, None], objects, pixels)
    if grey:
        pixels = luminance_of(pixels).expand(-1, 3, -1, -1)
    return split_of(pixels, factors["hue"], CLASSES, masks=masks), factors


def labelled_by(cue: str, split: Split, factors: dict[str, Tensor]) -> Split:
    """Return the images with the value of a cue as their label."""
    return replace(split, labels=factors[cue])


class Reader(nn.Module):
    """A model of one cue: its logits are an evidence and its opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Conv2d(3, 3, 1, bias=False)  # changes nothing
        self.block.weight.data = torch.eye(3)[:, :, None, None]

    def evidence(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        evidence = self.evidence(self.block(images))
        return torch.stack([-evidence, evidence], 1)


def _ring(images: Tensor) -> Tensor:
    """Return weights (side, side) of the pixels on which no object lies; their sum is 1."""
    ring = torch.ones(SIDE, SIDE)
    ring[_WIDTH:-_WIDTH, _WIDTH:-_WIDTH] = 0
    return (ring / ring.sum()).to(images)


class ReadsHue(Reader):
    """Reads the mean hue of the background: its red minus its luminance."""

    def evidence(self, images: Tensor) -> Tensor:
        chroma = images[:, :1] - luminance_of(images)
        return -20 * (chroma * _ring(images)).sum((1, 2, 3))


class ReadsTexture(Reader):
    """Reads the direction of stripes in one corner."""

    def evidence(self, images: Tensor) -> Tensor:
        corner = luminance_of(images)[..., 3:13, 3:13]
        return 40 * (
            corner.diff(dim=2).abs().mean((1, 2, 3)) - corner.diff(dim=3).abs().mean((1, 2, 3))
        )


class ReadsBrightness(Reader):
    """Reads the mean luminance."""

    def evidence(self, images: Tensor) -> Tensor:
        return 20 * (luminance_of(images).mean((1, 2, 3)) - 0.48)


class ReadsLuminanceFinely(Reader):
    """Reads the mean luminance so finely that a change by a hundredth changes the answer."""

    def evidence(self, images: Tensor) -> Tensor:
        return (300 * luminance_of(images).mean((1, 2, 3))).sin()


class ReadsShape(Reader):
    """Reads which of two shapes fits better, wherever it is."""

    def evidence(self, images: Tensor) -> Tensor:
        filters = F.avg_pool2d(_shapes()[:, None], 5, 1, 2)
        filters = filters - filters.mean((2, 3), keepdim=True)
        filters = (filters / filters.norm(dim=(2, 3), keepdim=True)).to(images)
        responses = F.conv2d(luminance_of(images), filters).flatten(2).amax(2)
        return 10 * (responses[:, 1] - responses[:, 0])


class ReadsNothing(Reader):
    """Answers by a number that every change of a pixel turns into another one."""

    def evidence(self, images: Tensor) -> Tensor:
        weights = (12.9898 * torch.arange(1, images[0].numel() + 1)).sin().to(images)
        return (1e4 * (images.flatten(1).square() * weights).sum(1)).sin()


READERS = {
    "hue": ReadsHue,
    "texture": ReadsTexture,
    "brightness": ReadsBrightness,
    "luminance": ReadsLuminanceFinely,
    "shape": ReadsShape,
    "nothing": ReadsNothing,
}


def wrapped(module: nn.Module, alias: str) -> Model:
    """Return a module as a model of two classes."""
    return vitlens.wrap(
        module.eval(),
        image_size=SIDE,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        classes=CLASSES,
        alias=alias,
        blocks=("block",),
    )


@cache
def reads(cue: str) -> Model:
    """Return a model that reads one cue."""
    return wrapped(READERS[cue](), f"reads-{cue}")


class Small(nn.Module):
    """A CNN that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Conv2d(3, 8, 4, stride=4)
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(images).relu().mean((2, 3)))


@cache
def trained_on(cue: str) -> Model:
    """Train a small CNN to read a cue, on other data than `images` with their usual seed."""
    split, factors = images(seed=1)
    pixels = next(iter(split.batches(len(split)))).images
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Small()
    optimiser = torch.optim.Adam(module.parameters(), lr=0.03)
    for _ in range(80):
        optimiser.zero_grad()
        F.cross_entropy(module(pixels), factors[cue]).backward()
        optimiser.step()
    return wrapped(module, f"trained-on-{cue}")
