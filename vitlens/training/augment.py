"""Augmentation of a whole batch on its device, seeded per image.

Each image's numbers come from a hash of (seed, epoch, index), not from a generator's state: however a batch is cut
among processes, and wherever a killed run goes on, an image is augmented in the same way.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.shapes import Images, Pixels

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: consecutive counters land far apart


def uniforms(indices: Tensor, draws: int, *, seed: int, epoch: int) -> Float[Tensor, "batch draws"]:
    """Numbers in [0, 1) for each image, that depend on (seed, epoch, index, draw) alone; 24 bits each."""
    key = _mix(torch.tensor([seed & _WORD, (seed >> 32) & _WORD, epoch & _WORD], device=indices.device))
    image = indices.long() & _WORD
    for word in key:
        image = _mix((image * _GOLDEN + word) & _WORD)
    counters = torch.arange(1, draws + 1, device=indices.device) * _GOLDEN
    return (_mix((image[:, None] + counters) & _WORD) >> 8).float() / 2**24


def augment(pixels: Pixels, indices: Tensor, *, seed: int, epoch: int, crop_padding: int, flip: bool) -> Images:
    """The images in [0, 1], each shifted by up to crop_padding pixels (black comes in) and flipped half of the time.

    indices: (batch,) place of each image within its split. Raises InputError on a negative padding or when there is
    not one index an image.
    """
    if crop_padding < 0 or len(indices) != len(pixels):
        raise InputError(
            f"expected crop padding >= 0 and {len(pixels)} indices, found {crop_padding} and {len(indices)}"
        )
    if not crop_padding and not flip:
        return pixels.float().div_(255)
    height, width = pixels.shape[-2:]
    draw = uniforms(indices.to(pixels.device), 3, seed=seed, epoch=epoch)
    shift = (draw[:, :2] * (2 * crop_padding + 1)).long()
    rows = shift[:, :1] + torch.arange(height, device=pixels.device)
    columns = shift[:, 1:] + torch.arange(width, device=pixels.device)
    if flip:
        columns = torch.where(draw[:, 2:] < 0.5, columns.flip(1), columns)
    padded = F.pad(pixels, (crop_padding,) * 4)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    taken = padded[image, :, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, 3)
    return taken.permute(0, 3, 1, 2).contiguous().float().div_(255)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words that looks random (Wellons' lowbias32); int64 in and out."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)
