"""Random erasing: a rectangle of noise in some of the images, seeded per view."""

import math
from typing import Final

import torch
from torch import Tensor

from vitlens.shapes import Images
from vitlens.training.draws import uniforms

AREA: Final = (0.02, 1 / 3)  # of the image
ASPECT: Final = (0.3, 1 / 0.3)  # height over width
_STREAM = 2


def erase(images: Images, keys: Tensor, *, seed: int, epoch: int, chance: float) -> Images:
    """The images, each with the given chance one rectangle of uniform noise in it (Zhong 2020; noise as in timm).

    images: in [0, 1]; keys: (batch,) of the views. Area and log aspect are uniform; a side is cut at the image's.
    """
    height, width = images.shape[-2:]
    draw = uniforms(keys, 5, seed=seed, epoch=epoch, stream=_STREAM)
    area = (AREA[0] + draw[:, 1] * (AREA[1] - AREA[0])) * height * width
    aspect = torch.exp(math.log(ASPECT[0]) + draw[:, 2] * math.log(ASPECT[1] / ASPECT[0]))
    tall = (area * aspect).sqrt().round().clamp(1, height)
    wide = (area / aspect).sqrt().round().clamp(1, width)
    top = (draw[:, 3] * (height - tall + 1)).floor()
    left = (draw[:, 4] * (width - wide + 1)).floor()
    inside = _between(top, tall, height)[:, :, None] & _between(left, wide, width)[:, None, :]
    inside &= (draw[:, 0] < chance)[:, None, None]
    noise = uniforms(keys, images[0].numel(), seed=seed, epoch=epoch, stream=_STREAM + 1).view_as(images)
    return torch.where(inside[:, None], noise, images)


def _between(start: Tensor, length: Tensor, size: int) -> Tensor:
    """(batch, size): whether a row or column lies in [start, start + length)."""
    place = torch.arange(size, device=start.device)
    return (place >= start[:, None]) & (place < (start + length)[:, None])
