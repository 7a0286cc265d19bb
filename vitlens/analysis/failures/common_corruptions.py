"""Accuracy under common corruptions (after Hendrycks & Dietterich 2019), and their operations on images.

Each is one operation of torchvision (JPEG: of Pillow); corruptions.py lists them with their strengths. Random numbers
depend on an image's own key, not on its index in a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from jaxtyping import Bool, Int
from PIL import Image
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.answers.paired import resampled_means
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.analysis.failures.disturbed import correct_after
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.references import resolved
from vitlens.shapes import Images
from vitlens.startup import import_without_compiler
from vitlens.uncertainty import Estimate, bootstrap_mean

transforms = import_without_compiler("torchvision.transforms.v2.functional")

Keys = Int[Tensor, " batch"]


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


def corrupted(images: Images, kind: str, severity: int, keys: Keys) -> Images:
    """Images with one corruption at a severity from 1 to 5, in [0, 1].

    Raises UnknownNameError for another kind, InputError for another severity.
    """
    if kind not in CORRUPTIONS:
        raise UnknownNameError("corruption", kind, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise InputError(f"expected a severity from 1 to 5, found {severity}")
    known = CORRUPTIONS[kind]
    changed: Tensor = resolved(known.function)(images, known.strengths[severity - 1], keys)
    return changed.clamp(0, 1)


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
        means = resampled_means(errors[None], groups=self.groups, seed=seed)[:, 0].numpy()
        low, high = np.quantile(means, [0.025, 0.975])
        return Estimate(float(errors.mean()), float(low), float(high), errors.numel())

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


def on_corrupted(
    model: Model,
    split: Split,
    *,
    keys: Keys,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Bool[Tensor, "batch kinds severities"]:
    """Which images are classified correctly under each corruption at each severity; as `correct_after`."""
    changes = [(resolved(known.function), level) for known in CORRUPTIONS.values() for level in known.strengths]
    right = correct_after(
        model, split, changes, keys=keys, batch_size=batch_size, precision=precision, advance=advance
    )  # fmt: skip
    return right.view(len(CORRUPTIONS), len(SEVERITIES), len(split)).permute(2, 0, 1).contiguous()
