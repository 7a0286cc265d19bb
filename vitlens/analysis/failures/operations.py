"""Operations on images: the disturbances of disturbances.py, and accuracy after them.

Random numbers depend on an image's key, not on its index in a batch. A square that is covered at
one level is also covered at higher levels. Each corruption is one operation of torchvision (JPEG of
Pillow). Frequencies are shares of Nyquist's frequency, half a cycle per pixel: 1 is the highest
along an axis, sqrt(2) the highest of all. Images are treated as periodic.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import chain, count
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size, require_labels
from vitlens.analysis.evaluation.intervals import resampled_means, sizes_of_groups
from vitlens.analysis.failures.disturbances import CORRUPTIONS
from vitlens.classes import reading
from vitlens.data.drawing import LUMINANCE
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model
from vitlens.references import import_without_compiler
from vitlens.resampling import drawn_interval, enough_to_draw
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate, bootstrap_mean

Keys = Int[Tensor, " batch"]
_COVERED = 8  # about so many squares along a side are covered or not
# streams of random numbers of an image, one for each use
_SHUFFLE_STREAM = 1
_COVER_STREAM = 2
_NOISE_STREAMS = (3, 4)
_PLACE_STREAM = 5


@cache
def _torchvision() -> Any:
    return import_without_compiler("torchvision.transforms.v2.functional")


def _noise(images: Images, strength: float, keys: Keys) -> Images:
    count = images[0].numel()
    keys = keys.to(images.device)
    # two independent uniform numbers in [0, 1) make a normal one (Box and Muller)
    u, v = (uniform(keys, count, stream=stream).double() for stream in _NOISE_STREAMS)
    normal = (-2 * (1 - u).log()).sqrt() * (2 * torch.pi * v).cos()
    return images + strength * normal.view_as(images).to(images.dtype)


def blurred(images: Images, sigma: float) -> Images:
    """Return a Gaussian blur of this standard deviation, px."""
    # the padding, half of the odd kernel, must be smaller than the image
    largest_kernel = 2 * ((min(images.shape[-2:]) - 1) // 2) + 1
    kernel = min(2 * round(3 * sigma) + 1, largest_kernel)  # px, up to 3 sigma on both sides
    smooth: Tensor = _torchvision().gaussian_blur(images, [kernel, kernel], [sigma, sigma])
    return smooth


def _jpeg(images: Images, strength: float, _keys: Keys) -> Images:
    bytes_of_images = (images.cpu() * 255).round().clamp(0, 255).byte()
    decoded = list[Tensor]()
    for pixels in bytes_of_images.permute(0, 2, 3, 1).numpy():
        file = BytesIO()
        Image.fromarray(pixels).save(file, format="JPEG", quality=int(strength))
        decoded.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(decoded).permute(0, 3, 1, 2).to(images.device, images.dtype) / 255


def _pixelate(images: Images, strength: float, _keys: Keys) -> Images:
    transforms = _torchvision()
    sides = list(images.shape[-2:])
    small = [max(1, round(side * strength)) for side in sides]
    modes = transforms.InterpolationMode
    coarse = transforms.resize(images, small, interpolation=modes.BILINEAR, antialias=True)
    large: Tensor = transforms.resize(coarse, sides, interpolation=modes.NEAREST_EXACT)
    return large


def _occlude(images: Images, strength: float, keys: Keys) -> Images:
    height, width = images.shape[-2:]
    side = max(1, round(strength * min(height, width)))
    occluded = images.clone()
    # two numbers in [0, 1) for each image: the place of the square as shares of the free sides
    places = uniform(keys.to(images.device), 2, stream=_PLACE_STREAM).cpu()
    for image, original, (down, across) in zip(occluded, images, places.tolist()):
        top = int(down * (height - side + 1))
        left = int(across * (width - side + 1))
        image[:, top : top + side, left : left + side] = original.mean((1, 2), keepdim=True)
    return occluded


def frequency_bands(images: Images, *, cutoff: float) -> tuple[Images, Images]:
    """Return the low and the high frequencies of images. Their sum is the image.

    The mean is in the low part, so the high part has the mean 0. Values are not clipped.

    cutoff: the highest frequency of the low part, as a share of Nyquist's frequency, 0 or more.
    """
    height, width = images.shape[-2:]
    # frequencies along both axes as shares of Nyquist's, which is half a cycle per pixel
    down = 2 * torch.fft.fftfreq(height, device=images.device)
    across = 2 * torch.fft.rfftfreq(width, device=images.device)
    radius = (down[:, None].square() + across[None].square()).sqrt()
    is_low = radius <= cutoff + 1e-6  # also components on the circle, despite rounding
    components = torch.fft.rfft2(images.float())
    low: Tensor = torch.fft.irfft2(components * is_low, s=(height, width))
    return low, images - low


def shuffle_tiles(images: Images, level: float, keys: Keys) -> Images:
    """Return each image cut into level x level equal tiles in random order.

    This destroys shape before texture.
    """
    count = int(level)
    height, width = images.shape[-2:]
    # as (batch, 3, count, tile height, count, tile width)
    cut = images.unflatten(2, (count, height // count)).unflatten(4, (count, width // count))
    # as (batch, count * count, 3, tile height, tile width)
    tiles = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = uniform(keys.to(images.device), count * count, stream=_SHUFFLE_STREAM).argsort(1)
    image_numbers = torch.arange(len(images), device=images.device)[:, None]
    shuffled = tiles[image_numbers, order]
    # back to (batch, 3, count, tile height, count, tile width)
    grid = shuffled.unflatten(1, (count, count)).permute(0, 3, 1, 4, 2, 5)
    result: Tensor = grid.reshape(images.shape)
    return result


def cover_squares(images: Images, share: float, keys: Keys) -> Images:
    """Return each image with this share of its squares filled with its mean colour.

    The squares have about an eighth of a side. They must not lie on the patch grid of a ViT, where
    they would remove complete tokens and leave the others unchanged. So the grid of squares begins
    half a square outside the image, and side and shift have no divisor in common with the image:
    5 px, shifted by 3 px, in images of 32 px, and 29 and 15 px in images of 224 px.

    The number of squares is rounded. Squares at the edges are cut, so the share of pixels is right
    only on average.
    """
    height, width = images.shape[-2:]
    eighth = -(-min(height, width) // _COVERED)  # rounded up
    side = _first_coprime(count(max(2, eighth)), (height, width))
    # from half a side on, and below it if none is smaller than the side; 1 is always coprime
    half = side // 2
    offset = _first_coprime(chain(range(half, side), range(half, 0, -1)), (height, width))
    # the number of the square of each pixel, row by row: (height, width)
    rows = (torch.arange(height) + offset) // side
    columns = (torch.arange(width) + offset) // side
    squares_in_row = int(columns[-1]) + 1
    square_of_pixel = (rows[:, None] * squares_in_row + columns).to(images.device)
    squares = int(square_of_pixel[-1, -1]) + 1
    # a random rank for each square: argsort of argsort gives ranks
    rank = uniform(keys.to(images.device), squares, stream=_COVER_STREAM).argsort(1).argsort(1)
    is_square_covered = rank < round(share * squares)  # (batch, squares)
    is_covered = is_square_covered[:, square_of_pixel]  # (batch, height, width)
    return torch.where(is_covered[:, None], images.mean((-2, -1), keepdim=True), images)


def _first_coprime(numbers: Iterable[int], sides: tuple[int, int]) -> int:
    """Return the first of some numbers without a divisor in common with a side.

    As patches divide the sides, they have no divisor in common with it either.
    """
    return next(n for n in numbers if all(math.gcd(n, side) == 1 for side in sides))


def luminance(images: Images) -> Float[Tensor, "batch height width"]:
    """Return the luminance in [0, 1] of images in [0, 1], without gamma correction."""
    weights = torch.tensor(LUMINANCE, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)


def distance(images: Images, changed: Images) -> Float[Tensor, " batch"]:
    """Return the mean absolute distance of the pixels of each pair of images."""
    return (images - changed).abs().mean((1, 2, 3))


def _blur(images: Images, level: float, _keys: Keys) -> Images:
    shorter_side = min(images.shape[-2:])
    return blurred(images, max(level * shorter_side, 1e-3))  # sigma must be above 0


def _low_pass(images: Images, cutoff: float, _keys: Keys) -> Images:
    low, _ = frequency_bands(images, cutoff=cutoff)
    return low.clamp(0, 1)


def _high_pass(images: Images, cutoff: float, _keys: Keys) -> Images:
    _, high = frequency_bands(images, cutoff=cutoff)
    mean = images.mean((-2, -1), keepdim=True)
    return (high + mean).clamp(0, 1)


# Functions from images, a level and keys to images of about [0, 1], by their name in the table of
# disturbances. That table describes the level. The key of an image decides its random numbers.
OPERATIONS: Final[Mapping[str, Callable[[Images, float, Keys], Images]]] = MappingProxyType(
    {
        "noise": _noise,
        "blur": _blur,
        "brightness": lambda images, level, _: _torchvision().adjust_brightness(images, 1 + level),
        "contrast": lambda images, level, _: _torchvision().adjust_contrast(images, level),
        "jpeg": _jpeg,
        "pixelate": _pixelate,
        "occlusion": _occlude,
        "low-pass": _low_pass,
        "high-pass": _high_pass,
        "shuffle": shuffle_tiles,
        "cover": cover_squares,
    }
)


def correct_after(
    model: Model,
    split: Split,
    changes: Sequence[tuple[str, float]],
    *,
    keys: Keys,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Bool[Tensor, "changes batch"]:
    """Return True for images that are predicted correctly after each change.

    Images are changed at the size of the split, before the model resizes them.

    changes: operations, each with a level.
    keys (n,): the seed of each image's random numbers, so that all models and processes get the
        same pixels.
    advance: called with the number of finished passes over an image.

    Raises DataError without labels, and InputError if the classes do not match.
    """
    truth = require_labels(split).cpu()
    read = reading(model.classes, split.classes).read
    batch_size = batch_size or fitting_batch_size(model)
    right = torch.zeros(len(changes), len(split), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(batch_size, device=model.device):
            indices = batch.indices.cpu()
            for row, (name, level) in enumerate(changes):
                changed = OPERATIONS[name](batch.images, level, keys[indices]).clamp(0, 1)
                predictions = read(model(changed)).argmax(-1).cpu()
                right[row, indices] = predictions == truth[indices]
                advance(len(indices))
    return right


@dataclass(frozen=True)
class Corrupted:
    """One model on corrupted images.

    alias: the alias of the model.
    correct (kinds, severities, n): True for correct predictions; kinds are those of CORRUPTIONS.
    groups (n,): the group of each image, None if images are independent.
    """

    alias: str
    correct: Bool[Tensor, "kinds severities batch"]
    groups: Tensor | None = None

    def accuracy(self, kind: str, severity: int) -> Estimate:
        """Return the accuracy under one corruption at a severity from 1 to 5."""
        row = self.correct[list(CORRUPTIONS).index(kind), severity - 1]
        return accuracy(row, groups=self.groups)

    def mean_error(self, *, seed: int = 0) -> Estimate:
        """Return the mean of the errors of all kinds and severities, a fraction.

        Its interval is a bootstrap over images.
        """
        errors = 1 - self.correct.double().mean((0, 1))
        return bootstrap_mean(errors, groups=self.groups, seed=seed, least=0.0, most=1.0)

    def lost(self, clean: Bool[Tensor, " batch"], *, seed: int = 0) -> Estimate:
        """Return clean accuracy minus the mean accuracy of all kinds and severities, in points.

        Its interval is paired over images.

        clean: True for clean images that are predicted correctly.
        """
        lost = 100.0 * (clean.double() - self.correct.double().mean((0, 1)))
        return bootstrap_mean(
            lost, groups=self.groups, seed=seed, unit="points", least=-100.0, most=100.0
        )

    def relative_error(self, baseline: "Corrupted", *, seed: int = 0) -> Estimate | None:
        """Return the mean corruption error, relative to a baseline (Hendrycks & Dietterich 2019).

        It is the mean over kinds of the errors, averaged over severities, divided by those of the
        baseline. The baseline itself has 1. The interval is a paired bootstrap over images (or
        groups); fewer than 6 have none. The result is None if the baseline makes no error under one
        of the kinds.
        """
        errors = (~self.correct).double().mean(1)  # (kinds, n)
        baseline_errors = (~baseline.correct).double().mean(1)
        if bool((baseline_errors.sum(1) == 0).any()):
            return None
        kinds, n = errors.shape
        both = torch.cat((errors, baseline_errors))
        means = resampled_means(both, groups=self.groups, seed=seed)  # (draws, 2 * kinds)
        ratios = (means[:, :kinds] / means[:, kinds:]).mean(1).numpy()
        # draws in which the baseline makes no error have no ratio
        ratios = ratios[np.isfinite(ratios)]
        value = float((errors.mean(1) / baseline_errors.mean(1)).mean())
        counts = sizes_of_groups(n, self.groups)
        if not enough_to_draw(counts):
            return Estimate(value, n=n)
        low, high = drawn_interval(ratios, counts)
        return Estimate(value, min(float(low), value), max(float(high), value), n)
