"""Augmentation of a whole batch on its device, seeded per image.

Each view's numbers come from a hash of (seed, epoch, key), not from a generator's state: however a batch is cut among
processes, and wherever a killed run goes on, an image is augmented in the same way. The key is the image's place in
its split, or that plus the split's size times the number of the view.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.shapes import Images, Pixels
from vitlens.training.draws import uniforms
from vitlens.training.erase import erase
from vitlens.training.randaugment import rand_augment


def augment(
    pixels: Pixels,
    keys: Tensor,
    *,
    seed: int,
    epoch: int,
    crop_padding: int = 0,
    flip: bool = False,
    operations: int = 0,
    magnitude: int = 9,
    erasing: float = 0.0,
) -> Images:
    """The images in [0, 1]: shifted and flipped, then RandAugment, then random erasing, each where it is asked for.

    keys: (batch,) of the views; crop_padding: pixels that a view is shifted by at most (black comes in); flip: left
    and right exchanged half of the time; operations, magnitude: see rand_augment; erasing: see erase. Raises
    InputError on a negative padding or when there is not one key a view.
    """
    if crop_padding < 0 or len(keys) != len(pixels):
        raise InputError(f"expected crop padding >= 0 and {len(pixels)} keys, found {crop_padding} and {len(keys)}")
    keys = keys.to(pixels.device)
    if crop_padding or flip:
        pixels = _shifted(pixels, uniforms(keys, 3, seed=seed, epoch=epoch), crop_padding, flip)
    if operations:
        pixels = rand_augment(pixels, keys, seed=seed, epoch=epoch, operations=operations, magnitude=magnitude)
    images = pixels.float().div_(255)
    return erase(images, keys, seed=seed, epoch=epoch, chance=erasing) if erasing else images


def _shifted(pixels: Pixels, draw: Tensor, crop_padding: int, flip: bool) -> Pixels:
    """Each image shifted and flipped by its three numbers in [0, 1)."""
    height, width = pixels.shape[-2:]
    shift = (draw[:, :2] * (2 * crop_padding + 1)).long()
    rows = shift[:, :1] + torch.arange(height, device=pixels.device)
    columns = shift[:, 1:] + torch.arange(width, device=pixels.device)
    if flip:
        columns = torch.where(draw[:, 2:] < 0.5, columns.flip(1), columns)
    padded = F.pad(pixels, (crop_padding,) * 4)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    taken = padded[image, :, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, 3)
    return taken.permute(0, 3, 1, 2).contiguous()
