"""RandAugment on a whole batch: views that drew the same operation go through torchvision's together."""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from vitlens.errors import InputError
from vitlens.shapes import Pixels
from vitlens.training.draws import uniforms

BINS: Final = 31  # magnitudes from 0 to 30
_STREAM = 1


Operation = Callable[[Tensor, float], Tensor]


def _affine(
    pixels: Tensor, *, move: tuple[float, float] = (0.0, 0.0), shear: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Moved right and down by whole pixels, then sheared by slopes, about the upper left corner."""
    degrees = [math.degrees(math.atan(slope)) for slope in shear]
    whole = [int(one) for one in move]
    moved: Tensor = V.affine(pixels, angle=0.0, translate=whole, scale=1.0, shear=degrees, center=[0, 0])
    return moved


# what the value is at magnitude 30 (translations: as a share of the side), whether it has a sign, and what is done;
# ranges are torchvision's (Cubuk 2020)
OPERATIONS: Final[dict[str, tuple[float, bool, Operation]]] = {
    "identity": (0.0, False, lambda pixels, _: pixels),
    "shear-x": (0.3, True, lambda pixels, value: _affine(pixels, shear=(value, 0.0))),
    "shear-y": (0.3, True, lambda pixels, value: _affine(pixels, shear=(0.0, value))),
    "translate-x": (150 / 331, True, lambda pixels, value: _affine(pixels, move=(value * pixels.shape[-1], 0.0))),
    "translate-y": (150 / 331, True, lambda pixels, value: _affine(pixels, move=(0.0, value * pixels.shape[-2]))),
    "rotate": (30.0, True, lambda pixels, value: V.rotate(pixels, value)),
    "brightness": (0.9, True, lambda pixels, value: V.adjust_brightness(pixels, 1 + value)),
    "colour": (0.9, True, lambda pixels, value: V.adjust_saturation(pixels, 1 + value)),
    "contrast": (0.9, True, lambda pixels, value: V.adjust_contrast(pixels, 1 + value)),
    "sharpness": (0.9, True, lambda pixels, value: V.adjust_sharpness(pixels, 1 + value)),
    "posterize": (4.0, False, lambda pixels, value: V.posterize(pixels, 8 - round(value))),
    "solarize": (1.0, False, lambda pixels, value: V.solarize(pixels, 255 * (1 - value))),
    "autocontrast": (0.0, False, lambda pixels, _: V.autocontrast(pixels)),
    "equalize": (0.0, False, lambda pixels, _: V.equalize(pixels)),
}


def strength(top: float, magnitude: int) -> float:
    """An operation's value at a magnitude: linear up to top at 30, in float32 as torchvision has it."""
    return float(torch.linspace(0.0, top, BINS)[magnitude])


def rand_augment(pixels: Pixels, keys: Tensor, *, seed: int, epoch: int, operations: int, magnitude: int) -> Pixels:
    """Each image changed by so many operations of one strength, drawn for each view (Cubuk 2020, RandAugment).

    pixels: uint8; keys: (batch,) of the views; magnitude: 0 to 30 of 30. Raises InputError for another magnitude.
    """
    if not 0 <= magnitude < BINS or operations < 0:
        raise InputError(f"expected a magnitude from 0 to {BINS - 1}, found {magnitude} ({operations} operations)")
    draw = uniforms(keys, 2 * operations, seed=seed, epoch=epoch, stream=_STREAM).to("cpu")
    known = list(OPERATIONS.values())
    for turn in range(operations):
        chosen = (draw[:, 2 * turn] * len(known)).long()
        negative = draw[:, 2 * turn + 1] < 0.5
        changed = pixels.clone()
        for index, (top, signed, operation) in enumerate(known[1:], start=1):
            for sign in (1, -1) if signed else (1,):
                drawn = (chosen == index) & (negative == (sign < 0)) if signed else chosen == index
                views = drawn.nonzero()[:, 0].to(pixels.device)
                if len(views):
                    changed[views] = operation(pixels[views], sign * strength(top, magnitude))
        pixels = changed
    return pixels
