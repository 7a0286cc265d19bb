"""Disturbed images: the operations of the table of disturbances, and which images are classified
correctly after them.

Random numbers depend on an image's own key, not on its index in a batch; a square that is covered
at one level is also covered at higher levels. Each corruption is one operation of torchvision
(JPEG: of Pillow). Frequencies are shares of Nyquist's (half a cycle a pixel): 1 is the highest
along an axis, sqrt(2) the highest of all; the image is treated as periodic.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from PIL import Image
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size, require_labels
from vitlens.analysis.evaluation.intervals import resampled_means, sizes_of_groups
from vitlens.analysis.failures.disturbances import CORRUPTIONS
from vitlens.classes import reading
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model
from vitlens.references import import_without_compiler
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate, bootstrap_mean, drawn_interval, enough_to_draw

Keys = Int[Tensor, " batch"]
_COVERED = 8  # squares along a side, nearly


@cache
def _torchvision() -> Any:
    return import_without_compiler("torchvision.transforms.v2.functional")


def _noise(images: Images, strength: float, keys: Keys) -> Images:
    count = images[0].numel()
    first, second = (
        uniform(keys.to(images.device), count, stream=stream).double() for stream in (3, 4)
    )
    normal = (-2 * (1 - first).log()).sqrt() * (2 * torch.pi * second).cos()  # Box and Muller
    return images + strength * normal.view_as(images).to(images.dtype)


def blurred(images: Images, sigma: float) -> Images:
    """Return a Gaussian blur of this standard deviation, px."""
    most = 2 * ((min(images.shape[-2:]) - 1) // 2) + 1  # the padding must be smaller than the image
    size = min(2 * round(3 * sigma) + 1, most)
    smooth: Tensor = _torchvision().gaussian_blur(images, [size, size], [sigma, sigma])
    return smooth


def _jpeg(images: Images, strength: float, _keys: Keys) -> Images:
    read = []
    for pixels in (images.cpu() * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy():
        file = BytesIO()
        Image.fromarray(pixels).save(file, format="JPEG", quality=int(strength))
        read.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(read).permute(0, 3, 1, 2).to(images.device, images.dtype) / 255


def _pixelated(images: Images, strength: float, _keys: Keys) -> Images:
    transforms = _torchvision()
    sides = list(images.shape[-2:])
    small = [max(1, round(side * strength)) for side in sides]
    modes = transforms.InterpolationMode
    coarse = transforms.resize(images, small, interpolation=modes.BILINEAR, antialias=True)
    large: Tensor = transforms.resize(coarse, sides, interpolation=modes.NEAREST_EXACT)
    return large


def _occluded(images: Images, strength: float, keys: Keys) -> Images:
    height, width = images.shape[-2:]
    side = max(1, round(strength * min(height, width)))
    erased = images.clone()
    places = uniform(keys.to(images.device), 2, stream=5).cpu()
    for image, own, (down, across) in zip(erased, images, places.tolist()):
        top = int(down * (height - side + 1))
        left = int(across * (width - side + 1))
        image[:, top : top + side, left : left + side] = own.mean((1, 2), keepdim=True)
    return erased


def frequency_bands(images: Images, *, cutoff: float) -> tuple[Images, Images]:
    """Return the images' low (up to the cut-off) and high frequencies; their sum is the image.

    The mean is in the low part. cutoff: share of Nyquist's frequency, 0 or more. Values are not
    clipped; the high part has mean 0.
    """
    height, width = images.shape[-2:]
    down = 2 * torch.fft.fftfreq(height, device=images.device)
    across = 2 * torch.fft.rfftfreq(width, device=images.device)
    radius = (
        down[:, None].square() + across[None].square()
    ).sqrt()  # of each component, alike in all directions
    inside = radius <= cutoff + 1e-6  # also components on the circle, despite rounding
    low: Tensor = torch.fft.irfft2(torch.fft.rfft2(images.float()) * inside, s=(height, width))
    return low, images - low


def shuffled(images: Images, level: float, keys: Keys) -> Images:
    """Return each image cut into level x level equal tiles in random order, which destroys shape
    before texture.
    """
    parts, (height, width) = int(level), images.shape[-2:]
    cut = images.unflatten(2, (parts, height // parts)).unflatten(4, (parts, width // parts))
    tiles = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (batch, parts * parts, 3, rows, columns)
    order = uniform(keys.to(images.device), parts * parts, stream=1).argsort(1)
    drawn = tiles[torch.arange(len(images), device=images.device)[:, None], order]
    laid: Tensor = (
        drawn.unflatten(1, (parts, parts)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    )
    return laid


def covered(images: Images, share: float, keys: Keys) -> Images:
    """Return each image with that share of its squares filled with its own mean colour, off the
    grid of a ViT's patches.

    The squares, about an eighth of a side, begin half a square outside the image, with sides of no
    divisor in common with it (5 px, shifted by 3 px, in images of 32 px; 29 and 15 in 224 px):
    squares of the patches' own grid would remove whole tokens and leave the others as they are.
    share: a fraction; the number of squares is rounded, and as those at the edges are cut, the
    share of pixels is this one on average.
    """
    size = images.shape[-2], images.shape[-1]

    def coprime(least: int) -> int:
        """Return the smallest number from `least` on without a divisor in common with a side, as
        patches that divide it.
        """
        while any(math.gcd(least, whole) > 1 for whole in size):
            least += 1
        return least

    side = coprime(max(2, -(-min(size) // _COVERED)))
    rows, columns = ((torch.arange(whole) + coprime(side // 2)) // side for whole in size)
    number = (rows[:, None] * (int(columns[-1]) + 1) + columns).to(images.device)
    squares = int(number[-1, -1]) + 1
    rank = uniform(keys.to(images.device), squares, stream=2).argsort(1).argsort(1)
    gone = (rank < round(share * squares))[:, number]
    return torch.where(gone[:, None], images.mean((-2, -1), keepdim=True), images)


# by their names in the table of disturbances, which says what the level is: images, level and keys
# to images of about
# [0, 1], drawn by each image's key
OPERATIONS: Final[Mapping[str, Callable[[Images, float, Keys], Images]]] = MappingProxyType(
    {
        "noise": _noise,
        "blur": lambda images, level, _: blurred(images, max(level * min(images.shape[-2:]), 1e-3)),
        "brightness": lambda images, level, _: _torchvision().adjust_brightness(images, 1 + level),
        "contrast": lambda images, level, _: _torchvision().adjust_contrast(images, level),
        "jpeg": _jpeg,
        "pixelate": _pixelated,
        "occlusion": _occluded,
        "low-pass": lambda images, level, _: frequency_bands(images, cutoff=level)[0].clamp(0, 1),
        "high-pass": lambda images, level, _: (
            frequency_bands(images, cutoff=level)[1] + images.mean((-2, -1), keepdim=True)
        ).clamp(0, 1),
        "shuffle": shuffled,
        "cover": covered,
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
    """Return which images are classified correctly after each change, an operation at a level.

    keys: (n,), one per image, which seeds its random numbers, so that all models and processes have
    the same pixels. Images are changed at the split's own size, before the model resizes them.
    advance: called with the number of passes over an image just done. Raises DataError without
    labels, InputError when the classes do not match.
    """
    truth = require_labels(split).cpu()
    read = reading(model.classes, split.classes).read
    right = torch.zeros(len(changes), len(split), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(batch_size or fitting_batch_size(model), device=model.device):
            own = batch.indices.cpu()
            for row, (name, level) in enumerate(changes):
                changed = OPERATIONS[name](batch.images, level, keys[own]).clamp(0, 1)
                right[row, own] = read(model(changed)).argmax(-1).cpu() == truth[own]
                advance(len(own))
    return right


@dataclass(frozen=True)
class Corrupted:
    """One model on corrupted images. correct: (kinds, severities, n), kinds as in CORRUPTIONS;
    groups: (n,).
    """

    alias: str
    correct: Bool[Tensor, "kinds severities batch"]
    groups: Tensor | None = None

    def accuracy(self, kind: str, severity: int) -> Estimate:
        """Return the accuracy under one corruption at a severity from 1 to 5."""
        row = self.correct[list(CORRUPTIONS).index(kind), severity - 1]
        return accuracy(row, groups=self.groups)

    def mean_error(self, *, seed: int = 0) -> Estimate:
        """Return the mean of the errors of all kinds and severities, a fraction, with its bootstrap
        interval over images.
        """
        errors = 1 - self.correct.double().mean((0, 1))
        return bootstrap_mean(errors, groups=self.groups, seed=seed, least=0.0, most=1.0)

    def lost(self, clean: Bool[Tensor, " batch"], *, seed: int = 0) -> Estimate:
        """Clean accuracy minus the mean accuracy of all kinds and severities, points, with its
        interval paired over images; clean: which clean images are classified correctly.
        """
        lost = 100.0 * (clean.double() - self.correct.double().mean((0, 1)))
        return bootstrap_mean(
            lost, groups=self.groups, seed=seed, unit="points", least=-100.0, most=100.0
        )

    def relative_error(self, baseline: "Corrupted", *, seed: int = 0) -> Estimate | None:
        """Mean corruption error: for each kind the errors summed over severities, divided by the
        baseline's, averaged over kinds (Hendrycks & Dietterich 2019); a fraction, 1 for the
        baseline itself. The interval is a paired bootstrap over images (or groups), which fewer
        than 6 do not have. None where the baseline makes no error under one of the kinds.
        """
        own, other = ((~each.correct).double().mean(1) for each in (self, baseline))  # (kinds, n)
        if bool((other.sum(1) == 0).any()):
            return None
        means = resampled_means(torch.cat((own, other)), groups=self.groups, seed=seed)
        ratios = (means[:, : len(own)] / means[:, len(own) :]).mean(1).numpy()
        ratios = ratios[
            np.isfinite(ratios)
        ]  # the ratio is undefined in draws where the baseline makes no error
        value = float((own.mean(1) / other.mean(1)).mean())
        counts = sizes_of_groups(own.shape[1], self.groups)
        if not enough_to_draw(counts):
            return Estimate(value, n=own.shape[1])
        low, high = drawn_interval(ratios, counts)
        return Estimate(value, min(float(low), value), max(float(high), value), own.shape[1])
