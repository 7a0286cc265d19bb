"""Corrupted images for activation patching: noise, blur, shuffled tiles or the mean colour."""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Generator, Tensor

from vitlens.errors import UnknownNameError
from vitlens.references import import_without_compiler
from vitlens.shapes import Images

transforms = import_without_compiler("torchvision.transforms.v2.functional")

NOISE = 0.5  # standard deviation, pixels in [0, 1]


def corrupt(images: Images, how: str = "noise", *, seed: int = 0) -> Images:
    """Images with their content removed, in [0, 1].

    noise: Gaussian noise of standard deviation 0.5 added; blur: a Gaussian of an eighth of the shorter side; shuffle:
    4 x 4 tiles (more where 4 does not divide the sides) in random order; mean: each image's own mean colour. seed: of
    noise and shuffle; an image's corruption depends on its index in the batch, not on the other images. Raises
    UnknownNameError for another name.
    """
    if how not in CORRUPTIONS:
        raise UnknownNameError("corruption", how, CORRUPTIONS)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([CORRUPTIONS[how](image, generator) for image in images]).clamp(0, 1)


def _noise(image: Tensor, generator: Generator) -> Tensor:
    return image + NOISE * torch.randn(image.shape, generator=generator).to(image)


def _blur(image: Tensor, _generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    side = min(height, width)
    size = min(2 * (side // 4) + 1, 2 * ((side - 1) // 2) + 1)  # odd; the padding must be smaller than the image
    blurred: Tensor = transforms.gaussian_blur(image, [size, size], [side / 8, side / 8])
    return blurred


def _shuffle(image: Tensor, generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    common = math.gcd(height, width)
    parts = next((count for count in range(4, common + 1) if common % count == 0), common)
    rows, columns = height // parts, width // parts
    tiles = image.unflatten(1, (parts, rows)).unflatten(3, (parts, columns)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    order = torch.randperm(len(tiles), generator=generator).to(image.device)
    laid = tiles[order].unflatten(0, (parts, parts)).permute(2, 0, 3, 1, 4)  # (3, parts, rows, parts, columns)
    shuffled: Tensor = laid.reshape(image.shape)
    return shuffled


def _mean(image: Tensor, _generator: Generator) -> Tensor:
    return image.mean(dim=(1, 2), keepdim=True).expand_as(image)


CORRUPTIONS: Final[dict[str, Callable[[Tensor, Generator], Tensor]]] = {
    "noise": _noise,
    "blur": _blur,
    "shuffle": _shuffle,
    "mean": _mean,
}
