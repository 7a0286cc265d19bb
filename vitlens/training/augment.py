"""Augment a batch on its device, seeded per image: crops, flips, RandAugment, erasing, mixing.

The random numbers of a view come from a hash of (seed, epoch, key), not from a generator's state.
So the augmentation of an image does not depend on the division of a batch among processes, or on
where a killed run is resumed. The key is the image's index in its split, plus the split's size
times the number of the view. Only mixing uses torch's generator.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from vitlens.data import draws
from vitlens.shapes import Images, Pixels
from vitlens.training.recipe import Recipe

BINS: Final = 31  # magnitudes of RandAugment, from 0 to 30
AREA: Final = (0.02, 1 / 3)  # smallest and largest share of the image that is erased
ASPECT: Final = (0.3, 1 / 0.3)  # smallest and largest height over width of an erased rectangle
_WHITE: Final = 255
_SHIFT, _RAND_AUGMENT, _ERASE, _NOISE = range(4)  # streams of random numbers

# draw(count, stream) returns `count` numbers in [0, 1) for each view
Draw = Callable[[int, int], Float[Tensor, "batch count"]]
Change = Callable[[Tensor, float], Tensor]  # takes pixels and a value, returns changed pixels


def augment(pixels: Pixels, keys: Tensor, recipe: Recipe, *, seed: int, epoch: int) -> Images:
    """Return the augmented images in [0, 1]: shifted and flipped, then RandAugment, then erasing.

    Steps that the recipe lacks are left out. A view is shifted by at most crop_padding pixels and
    filled with black.

    keys: the keys of the views, (batch,).
    """
    draw = partial(uniforms, keys.to(pixels.device), seed=seed, epoch=epoch)
    if recipe.crop_padding or recipe.flip:
        pixels = _shift_and_flip(pixels, draw(3, _SHIFT), recipe.crop_padding, recipe.flip)
    if recipe.randaugment:
        pixels = rand_augment(
            pixels, draw, operations=recipe.randaugment, magnitude=recipe.magnitude
        )
    images = pixels.float().div_(_WHITE)
    if recipe.erasing:
        images = erase(images, draw, chance=recipe.erasing)
    return images


def uniforms(
    keys: Tensor, count: int, stream: int, *, seed: int, epoch: int
) -> Float[Tensor, "batch count"]:
    """Return numbers in [0, 1) of 24 bits for each view.

    They depend only on (seed, epoch, key, stream, index).
    """
    # `draws.keys` takes only the lower 32 bits of a seed, which may have 64
    upper_seed = torch.full_like(keys, seed >> 32)
    views = draws.keys(seed, upper_seed, torch.full_like(keys, epoch), keys)
    return draws.uniform(views, count, stream=stream)


def _shift_and_flip(pixels: Pixels, draw: Tensor, crop_padding: int, flip: bool) -> Pixels:
    """Return each image shifted and flipped by its three numbers in [0, 1).

    draw: (batch, 3): for the vertical shift, the horizontal shift, and the flip.
    """
    height, width = pixels.shape[-2:]
    padded = F.pad(pixels, (crop_padding,) * 4)
    corners = (draw[:, :2] * (2 * crop_padding + 1)).long()  # first row and column, (batch, 2)
    # the row and column of the padded image for each pixel of the result: (batch, height or width)
    rows = corners[:, :1] + torch.arange(height, device=pixels.device)
    columns = corners[:, 1:] + torch.arange(width, device=pixels.device)
    if flip:
        columns = torch.where(draw[:, 2:] < 0.5, columns.flip(1), columns)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    shifted = padded[image, :, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, 3)
    return shifted.permute(0, 3, 1, 2).contiguous()


def _affine(
    pixels: Tensor,
    *,
    translate: tuple[float, float] = (0.0, 0.0),
    shear: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Return images translated right and down by whole pixels, then sheared by slopes.

    The shear is about the upper left corner.
    """
    shear_degrees = [math.degrees(math.atan(slope)) for slope in shear]
    pixel_shift = [int(distance) for distance in translate]
    transformed: Tensor = V.affine(
        pixels, angle=0.0, translate=pixel_shift, scale=1.0, shear=shear_degrees, center=[0, 0]
    )
    return transformed


class _Operation(NamedTuple):
    """An operation of RandAugment.

    change: a function of pixels and a value.
    top: the value at magnitude 30.
    is_signed: True if the value is negative half of the time.
    """

    change: Change
    top: float = 0.0
    is_signed: bool = True


def _unsigned(change: Change, top: float = 0.0) -> _Operation:
    return _Operation(change, top, is_signed=False)


# values of translations are shares of the side; the ranges are torchvision's (Cubuk 2020)
OPERATIONS: Final[dict[str, _Operation]] = {
    "identity": _unsigned(lambda pixels, _: pixels),
    "shear-x": _Operation(lambda pixels, value: _affine(pixels, shear=(value, 0.0)), 0.3),
    "shear-y": _Operation(lambda pixels, value: _affine(pixels, shear=(0.0, value)), 0.3),
    "translate-x": _Operation(
        lambda pixels, value: _affine(pixels, translate=(value * pixels.shape[-1], 0.0)), 150 / 331
    ),
    "translate-y": _Operation(
        lambda pixels, value: _affine(pixels, translate=(0.0, value * pixels.shape[-2])), 150 / 331
    ),
    "rotate": _Operation(lambda pixels, value: V.rotate(pixels, value), 30.0),
    "brightness": _Operation(lambda pixels, value: V.adjust_brightness(pixels, 1 + value), 0.9),
    "colour": _Operation(lambda pixels, value: V.adjust_saturation(pixels, 1 + value), 0.9),
    "contrast": _Operation(lambda pixels, value: V.adjust_contrast(pixels, 1 + value), 0.9),
    "sharpness": _Operation(lambda pixels, value: V.adjust_sharpness(pixels, 1 + value), 0.9),
    "posterize": _unsigned(lambda pixels, value: V.posterize(pixels, 8 - round(value)), 4.0),
    "solarize": _unsigned(lambda pixels, value: V.solarize(pixels, 255 * (1 - value)), 1.0),
    "autocontrast": _unsigned(lambda pixels, _: V.autocontrast(pixels)),
    "equalize": _unsigned(lambda pixels, _: V.equalize(pixels)),
}


def strength(top: float, magnitude: int) -> float:
    """Return an operation's value at a magnitude: linear up to `top` at 30, in float32."""
    return float(torch.linspace(0.0, top, BINS)[magnitude])


def rand_augment(pixels: Pixels, draw: Draw, *, operations: int, magnitude: int) -> Pixels:
    """Return each image changed by random operations of one strength (RandAugment, Cubuk 2020).

    operations: the number of operations on each image.
    magnitude: the strength, from 0 to 30.
    """
    drawn = draw(2 * operations, _RAND_AUGMENT).cpu()  # two for each operation: which, and sign
    table = list(OPERATIONS.values())
    for turn in range(operations):
        operation_index = (drawn[:, 2 * turn] * len(table)).long()  # one for each image
        is_negative = drawn[:, 2 * turn + 1] < 0.5
        changed = pixels.clone()
        # the first operation is the identity
        for index, operation in enumerate(table[1:], start=1):
            value = strength(operation.top, magnitude)
            is_selected = operation_index == index
            selections = [(is_selected, value)]
            if operation.is_signed:
                selections = [
                    (is_selected & ~is_negative, value),
                    (is_selected & is_negative, -value),
                ]
            for selection, signed_value in selections:
                views = selection.nonzero()[:, 0].to(pixels.device)
                if len(views):
                    changed[views] = operation.change(pixels[views], signed_value)
        pixels = changed
    return pixels


def erase(images: Images, draw: Draw, *, chance: float) -> Images:
    """Return the images with a rectangle of uniform noise in a random share `chance` of them.

    From Zhong 2020, with timm's noise. Area and log aspect ratio are uniform; sides are clamped.
    """
    height, width = images.shape[-2:]
    drawn = draw(5, _ERASE)  # for each image: if it is erased, area, aspect ratio, top, left
    area = (AREA[0] + drawn[:, 1] * (AREA[1] - AREA[0])) * height * width
    aspect = torch.exp(math.log(ASPECT[0]) + drawn[:, 2] * math.log(ASPECT[1] / ASPECT[0]))
    erased_height = (area * aspect).sqrt().round().clamp(1, height)
    erased_width = (area / aspect).sqrt().round().clamp(1, width)
    top = (drawn[:, 3] * (height - erased_height + 1)).floor()
    left = (drawn[:, 4] * (width - erased_width + 1)).floor()
    is_row_erased = _between(top, erased_height, height)
    is_column_erased = _between(left, erased_width, width)
    is_erased = is_row_erased[:, :, None] & is_column_erased[:, None, :]
    is_erased &= (drawn[:, 0] < chance)[:, None, None]
    noise = draw(images[0].numel(), _NOISE).view_as(images)
    return torch.where(is_erased[:, None], noise, images)  # the same place in all channels


def _between(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return a mask (batch, size) of the rows or columns in [start, start + length)."""
    index = torch.arange(size, device=start.device)
    return (index >= start[:, None]) & (index < (start + length)[:, None])


def mix(images: Images, labels: Tensor, recipe: Recipe, *, classes: int) -> tuple[Images, Tensor]:
    """Return images mixed with others of the batch, and their targets (batch, classes).

    A batch is mixed with a probability of mix_chance, by mixup (Zhang 2018) or cutmix (Yun 2019).
    If the recipe has both, one is drawn for each batch. Random numbers come from torch's generator.
    A batch that is not mixed keeps its labels (batch,).
    """
    transforms = []
    if recipe.mixup:
        transforms.append(v2.MixUp(alpha=recipe.mixup, num_classes=classes))
    if recipe.cutmix:
        transforms.append(v2.CutMix(alpha=recipe.cutmix, num_classes=classes))
    if not transforms or len(images) < 2:
        return images, labels
    if torch.rand(()).item() >= recipe.mix_chance:
        return images, labels
    transform = transforms[int(torch.randint(len(transforms), ()).item())]
    mixed, targets = transform(images, labels)
    return mixed, targets
