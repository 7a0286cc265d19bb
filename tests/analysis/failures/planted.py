"""Scenes and models in which the cause of every error is known: a coloured square, its class, and what misleads."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import vitlens
from vitlens.data.split import InMemory, Split
from vitlens.models.model import Model

SIDE, PATCH = 32, 4
CLASSES = ("none", "red", "green", "blue")  # the colour of the object; no image is of class none
GROUND, OBJECT, LOUD, QUIET = 0.2, 0.7, 1.0, 0.4


@dataclass(frozen=True)
class Squares:
    """Grey scenes of a coloured square, each with a patch of another class's colour off the object; drawn again on
    request without it, or with other noise."""

    pixels: Tensor
    plain: Tensor
    other: Tensor

    def redrawn(self, change: str) -> Tensor:
        return self.plain if change == "without distractors" else self.other

    def pick(self, indices: Tensor) -> "Squares":
        return Squares(self.pixels[indices], self.plain[indices], self.other[indices])


def squares(
    count: int = 160, *, seed: int = 0, loud: float = 0.4, on_object: bool = False, redraw: bool = True
) -> Split:
    """Scenes of which a fraction `loud` has a distracting patch brighter than the object, the others a dull one.

    on_object: the patch is part of the object (a corner of it).
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, 4, (count,), generator=draw)
    wrong = 1 + (labels - 1 + torch.randint(1, 3, (count,), generator=draw)) % 3
    sizes = torch.randint(2, 5, (count,), generator=draw)  # patches
    brightness = torch.where(torch.rand(count, generator=draw) < loud, LOUD, QUIET)
    plain = GROUND + 0.02 * torch.rand(count, 3, SIDE, SIDE, generator=draw)
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    pixels, other = [], []
    for index, size in enumerate(sizes.tolist()):
        row, column = (int(torch.randint(1, 8 - size, (1,), generator=draw)) for _ in range(2))
        square = slice(PATCH * row, PATCH * (row + size)), slice(PATCH * column, PATCH * (column + size))
        masks[(index, *square)] = True
        plain[(index, labels[index] - 1, *square)] = OBJECT
        corner = (row, column) if on_object else (0, 0) if torch.rand((), generator=draw) < 0.5 else (7, 7)
        pixels.append(_with_patch(plain[index], corner, wrong[index], float(brightness[index])))
        other.append(pixels[-1] + 0.02 * (torch.rand(3, SIDE, SIDE, generator=draw) - 0.5))
    scenes = Squares(*((255 * torch.stack(each).clamp(0, 1)).round().byte() for each in (pixels, list(plain), other)))
    source = InMemory(scenes.pixels)
    split = Split("squares", "test", source, (SIDE, SIDE), CLASSES, labels=labels, masks=masks, scenes=scenes)
    return split if redraw else replace(split, scenes=None)


def _with_patch(image: Tensor, corner: tuple[int, int], colour: Tensor, brightness: float) -> Tensor:
    changed = image.clone()
    rows, columns = (slice(PATCH * at, PATCH * (at + 1)) for at in corner)
    changed[:, rows, columns] = GROUND
    changed[colour - 1, rows, columns] = brightness
    return changed


class Brightest(nn.Module):
    """Predicts the colour of the brightest patches."""

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.avg_pool2d(images, PATCH).flatten(2) - GROUND
        weights = (40 * patches.amax(1)).softmax(-1)
        colours = (weights[:, None] * patches).sum(-1)
        return 20 * torch.cat([torch.zeros_like(colours[:, :1]), colours], 1)


class LargeOnly(nn.Module):
    """Predicts the colour of most of the image, and none unless it covers enough."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, images: Tensor) -> Tensor:
        colours = (images - images.amin(1, keepdim=True)).mean((2, 3))
        return 400 * torch.cat([self.least * (OBJECT - GROUND) + 0 * colours[:, :1], colours], 1)


class AtRandom(nn.Module):
    """Predicts the colour of most of the image, and a wrong one for images that no feature tells apart."""

    def forward(self, images: Tensor) -> Tensor:
        colours = (images - images.amin(1, keepdim=True)).mean((2, 3))
        unlucky, which = (1e5 * images.mean((1, 2, 3))).sin() > 0.5, (3e5 * images.mean((1, 2, 3))).sin() > 0
        wrong = torch.where(which[:, None], colours.roll(1, 1), colours.roll(2, 1))
        colours = torch.where(unlucky[:, None], wrong, colours)
        return 400 * torch.cat([torch.zeros_like(colours[:, :1]), colours], 1)


def model(module: nn.Module) -> Model:
    return vitlens.wrap(
        module, alias="planted", image_size=SIDE, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), classes=CLASSES
    )
