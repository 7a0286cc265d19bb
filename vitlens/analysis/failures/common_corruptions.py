"""Accuracy under common corruptions (after Hendrycks & Dietterich 2019), and their operations on images.

Each is one operation of torchvision (JPEG: of Pillow) at five severities, whose strengths are set for images of any
size: lengths are shares of the shorter side. Random numbers depend on an image's own key, not on its index in a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.answers.paired import estimates, resampled_means
from vitlens.analysis.failures.disturbed import Change, Keys, correct_after
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.startup import import_without_compiler
from vitlens.uncertainty import Estimate, bootstrap_mean

transforms = import_without_compiler("torchvision.transforms.v2.functional")


def gaussian_noise(images: Images, strength: float, keys: Keys) -> Tensor:
    """Gaussian noise of this standard deviation, drawn by each image's key."""
    count = images[0].numel()
    first, second = (uniform(keys.to(images.device), count, stream=stream).double() for stream in (3, 4))
    normal = (-2 * (1 - first).log()).sqrt() * (2 * torch.pi * second).cos()  # Box and Muller
    return images + strength * normal.view_as(images).to(images.dtype)


def gaussian_blur(images: Images, strength: float, _keys: Keys) -> Tensor:
    """A Gaussian blur whose standard deviation is this share of the shorter side."""
    side = min(images.shape[-2:])
    sigma = max(strength * side, 1e-3)
    most = 2 * ((side - 1) // 2) + 1  # the padding must be smaller than the image
    size = min(2 * round(3 * sigma) + 1, most)
    blurred: Tensor = transforms.gaussian_blur(images, [size, size], [sigma, sigma])
    return blurred


def brightness(images: Images, strength: float, _keys: Keys) -> Tensor:
    """Pixels multiplied by 1 + strength."""
    brighter: Tensor = transforms.adjust_brightness(images, 1 + strength)
    return brighter


def contrast(images: Images, strength: float, _keys: Keys) -> Tensor:
    """The contrast multiplied by this share."""
    flatter: Tensor = transforms.adjust_contrast(images, strength)
    return flatter


def jpeg(images: Images, strength: float, _keys: Keys) -> Tensor:
    """Compressed as JPEG of this quality."""
    read = []
    for pixels in (images.cpu() * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy():
        file = BytesIO()
        Image.fromarray(pixels).save(file, format="JPEG", quality=int(strength))
        read.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(read).permute(0, 3, 1, 2).to(images.device, images.dtype) / 255


def pixelate(images: Images, strength: float, _keys: Keys) -> Tensor:
    """Downsampled to this share of each side and enlarged again."""
    height, width = images.shape[-2:]
    small = [max(1, round(side * strength)) for side in (height, width)]
    coarse = transforms.resize(images, small, interpolation=transforms.InterpolationMode.BILINEAR, antialias=True)
    large: Tensor = transforms.resize(coarse, [height, width], interpolation=transforms.InterpolationMode.NEAREST_EXACT)
    return large


def occlusion(images: Images, strength: float, keys: Keys) -> Tensor:
    """A square of this share of the shorter side filled with the mean colour, at a random place by each image's key."""
    height, width = images.shape[-2:]
    side = max(1, round(strength * min(height, width)))
    places = uniform(keys.to(images.device), 2, stream=5).cpu()
    erased = []
    for image, (down, across) in zip(images, places.tolist()):
        top, left = int(down * (height - side + 1)), int(across * (width - side + 1))
        erased.append(transforms.erase(image, top, left, side, side, image.mean((1, 2), keepdim=True)))
    return torch.stack(erased)


@dataclass(frozen=True)
class CommonCorruption:
    """One corruption. description: of the operation and its strength; strengths: of severities 1 to 5; function: gives
    images before they are clamped to [0, 1]."""

    title: str
    description: str
    strengths: tuple[float, float, float, float, float]
    function: Change


SEVERITIES: Final = (1, 2, 3, 4, 5)
CORRUPTIONS: Final[Mapping[str, CommonCorruption]] = MappingProxyType(
    {
        "noise": CommonCorruption(
            "noise", "Gaussian noise of this standard deviation", (0.04, 0.06, 0.08, 0.12, 0.18), gaussian_noise
        ),
        "blur": CommonCorruption(
            "blur", "a Gaussian blur of this share of the shorter side", (0.01, 0.015, 0.02, 0.03, 0.045), gaussian_blur
        ),
        "brightness": CommonCorruption(
            "brightness", "pixels multiplied by 1 plus this, and clipped", (0.2, 0.4, 0.6, 0.8, 1.0), brightness
        ),
        "contrast": CommonCorruption(
            "contrast", "this share of the contrast is left", (0.6, 0.45, 0.3, 0.2, 0.1), contrast
        ),
        "jpeg": CommonCorruption("JPEG", "JPEG of this quality", (60.0, 40.0, 25.0, 15.0, 8.0), jpeg),
        "pixelate": CommonCorruption(
            "pixelate", "shown in this share of the pixels of a side", (0.75, 0.6, 0.4, 0.3, 0.25), pixelate
        ),
        "occlusion": CommonCorruption(
            "occlusion", "a square of this share of the shorter side filled with the mean colour",
            (0.15, 0.25, 0.35, 0.45, 0.55), occlusion,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Corrupted:
    """One model on corrupted images. correct: (kinds, severities, n), kinds as in CORRUPTIONS; groups: (n,)."""

    alias: str
    correct: Bool[Tensor, "kinds severities batch"]
    groups: Tensor | None = None

    def accuracy(self, kind: str, severity: int, *, seed: int = 0) -> Estimate:
        """The accuracy under one corruption at a severity from 1 to 5."""
        row = self.correct[list(CORRUPTIONS).index(kind), severity - 1]
        return accuracy(row, groups=self.groups, seed=seed)

    def mean_error(self, *, seed: int = 0) -> Estimate:
        """The mean of the errors of all kinds and severities, a fraction, with its bootstrap interval over images."""
        errors = 1 - self.correct.double().mean((0, 1))
        return estimates(errors[None], groups=self.groups, seed=seed)[0]

    def lost(self, clean: Bool[Tensor, " batch"], *, seed: int = 0) -> Estimate:
        """Clean accuracy minus the mean accuracy of all kinds and severities, points, with its interval paired over
        images; clean: which clean images are classified correctly."""
        losses = 100.0 * (clean.double() - self.correct.double().mean((0, 1)))
        groups = None if self.groups is None else self.groups.numpy()
        return bootstrap_mean(losses.numpy(), seed=seed, unit="points", groups=groups)

    def relative_error(self, baseline: "Corrupted", *, seed: int = 0) -> Estimate | None:
        """Mean corruption error: for each kind the errors summed over severities, divided by the baseline's, averaged
        over kinds (Hendrycks & Dietterich 2019); a fraction, 1 for the baseline itself.

        The interval is a paired bootstrap over images. None where the baseline makes no error under one of the kinds.
        """
        own, other = ((~each.correct).double().mean(1) for each in (self, baseline))  # (kinds, n)
        if bool((other.sum(1) == 0).any()):
            return None
        kinds = len(own)
        means = resampled_means(torch.cat((own, other)), groups=self.groups, seed=seed)
        ratios = (means[:, :kinds] / means[:, kinds:]).mean(1).numpy()
        ratios = ratios[np.isfinite(ratios)]  # the ratio is undefined in draws where the baseline makes no error
        low, high = np.quantile(ratios, [0.025, 0.975])
        value = float((own.mean(1) / other.mean(1)).mean())
        return Estimate(value, min(float(low), value), max(float(high), value), own.shape[1])


def on_corrupted(model: Model, split: Split, *, keys: Keys, **passes: Any) -> Bool[Tensor, "batch kinds severities"]:
    """Which images are classified correctly under each corruption at each severity; passes: as `correct_after`."""
    changes = [(known.function, level) for known in CORRUPTIONS.values() for level in known.strengths]
    right = correct_after(model, split, changes, keys=keys, **passes)
    return right.view(len(CORRUPTIONS), len(SEVERITIES), len(split)).permute(2, 0, 1).contiguous()
