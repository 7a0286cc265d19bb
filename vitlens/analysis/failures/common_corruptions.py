"""Everyday damage to images in five severities, and how much accuracy it costs (after Hendrycks & Dietterich 2019).

Each is one operation of torchvision (JPEG: of Pillow) with five strengths, set for images of any size: lengths are
shares of the shorter side. What is random is decided by an image's own key, not by its place in a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from PIL import Image
from torch import Tensor

from vitlens.analysis.answers.classes import reading
from vitlens.analysis.answers.evaluate import accuracy, fitting_batch_size, require_labels
from vitlens.analysis.answers.paired import resampled_means
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.startup import import_without_compiler
from vitlens.uncertainty import Estimate

transforms = import_without_compiler("torchvision.transforms.v2.functional")

SEVERITIES: Final = (1, 2, 3, 4, 5)

Keys = Int[Tensor, " batch"]


@dataclass(frozen=True)
class Corruption:
    """One kind of damage. says: what the strengths are; strengths: of severities 1 to 5; apply: (images, strength,
    keys) -> images in [0, 1], before they are clamped."""

    title: str
    says: str
    strengths: tuple[float, float, float, float, float]
    apply: Callable[[Images, float, Keys], Tensor]


def _noise(images: Images, strength: float, keys: Keys) -> Tensor:
    count = images[0].numel()
    one, two = (uniform(keys.to(images.device), count, stream=stream).double() for stream in (3, 4))
    normal = (-2 * (1 - one).log()).sqrt() * (2 * torch.pi * two).cos()  # Box and Muller: a draw of each image's own
    return images + strength * normal.view_as(images).to(images.dtype)


def _blur(images: Images, strength: float, _keys: Keys) -> Tensor:
    side = min(images.shape[-2:])
    sigma = max(strength * side, 1e-3)
    most = 2 * ((side - 1) // 2) + 1  # the padding must be smaller than the image
    size = min(2 * round(3 * sigma) + 1, most)
    blurred: Tensor = transforms.gaussian_blur(images, [size, size], [sigma, sigma])
    return blurred


def _brightness(images: Images, strength: float, _keys: Keys) -> Tensor:
    brighter: Tensor = transforms.adjust_brightness(images, 1 + strength)
    return brighter


def _contrast(images: Images, strength: float, _keys: Keys) -> Tensor:
    flatter: Tensor = transforms.adjust_contrast(images, strength)
    return flatter


def _jpeg(images: Images, strength: float, _keys: Keys) -> Tensor:
    read = []
    for pixels in (images.cpu() * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy():
        file = BytesIO()
        Image.fromarray(pixels).save(file, format="JPEG", quality=int(strength))
        read.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(read).permute(0, 3, 1, 2).to(images.device, images.dtype) / 255


def _pixelate(images: Images, strength: float, _keys: Keys) -> Tensor:
    height, width = images.shape[-2:]
    small = [max(1, round(side * strength)) for side in (height, width)]
    coarse = transforms.resize(images, small, interpolation=transforms.InterpolationMode.BILINEAR, antialias=True)
    large: Tensor = transforms.resize(coarse, [height, width], interpolation=transforms.InterpolationMode.NEAREST_EXACT)
    return large


def _occlusion(images: Images, strength: float, keys: Keys) -> Tensor:
    height, width = images.shape[-2:]
    side = max(1, round(strength * min(height, width)))
    places = uniform(keys.to(images.device), 2, stream=5).cpu()
    erased = []
    for image, (down, across) in zip(images, places.tolist()):
        top, left = int(down * (height - side + 1)), int(across * (width - side + 1))
        erased.append(transforms.erase(image, top, left, side, side, image.mean((1, 2), keepdim=True)))
    return torch.stack(erased)


CORRUPTIONS: Final[Mapping[str, Corruption]] = MappingProxyType(
    {
        "noise": Corruption(
            "noise", "Gaussian noise of this standard deviation", (0.04, 0.06, 0.08, 0.12, 0.18), _noise
        ),
        "blur": Corruption(
            "blur", "a Gaussian blur of this share of the shorter side", (0.01, 0.015, 0.02, 0.03, 0.045), _blur
        ),
        "brightness": Corruption(
            "brightness", "pixels multiplied by 1 plus this, and clipped", (0.2, 0.4, 0.6, 0.8, 1.0), _brightness
        ),
        "contrast": Corruption(
            "contrast", "this share of the contrast is left", (0.6, 0.45, 0.3, 0.2, 0.1), _contrast
        ),
        "jpeg": Corruption("JPEG", "JPEG of this quality", (60.0, 40.0, 25.0, 15.0, 8.0), _jpeg),
        "pixelate": Corruption(
            "pixelate", "shown in this share of the pixels of a side", (0.75, 0.6, 0.4, 0.3, 0.25), _pixelate
        ),
        "occlusion": Corruption(
            "occlusion", "a square of this share of the shorter side filled with the mean colour",
            (0.15, 0.25, 0.35, 0.45, 0.55), _occlusion,
        ),
    }
)  # fmt: skip


def corrupted(images: Images, kind: str, severity: int, keys: Keys) -> Images:
    """Images with one kind of damage at a severity from 1 to 5, in [0, 1].

    Raises UnknownNameError for another kind, InputError for another severity.
    """
    if kind not in CORRUPTIONS:
        raise UnknownNameError("corruption", kind, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise InputError(f"expected a severity from 1 to 5, found {severity}")
    known = CORRUPTIONS[kind]
    return known.apply(images, known.strengths[severity - 1], keys).clamp(0, 1)


@dataclass(frozen=True)
class Corrupted:
    """One model on damaged images. correct: (kinds, severities, n), kinds in the order of CORRUPTIONS; groups: (n,)."""

    alias: str
    correct: Bool[Tensor, "kinds severities batch"]
    groups: Tensor | None = None

    def accuracy(self, kind: str, severity: int, *, seed: int = 0) -> Estimate:
        """The accuracy under one kind of damage at a severity from 1 to 5."""
        row = self.correct[list(CORRUPTIONS).index(kind), severity - 1]
        return accuracy(row, groups=self.groups, seed=seed)

    def mean_error(self, *, seed: int = 0) -> Estimate:
        """The mean of the errors of all kinds and severities, a fraction, with its bootstrap interval over images."""
        errors = 1 - self.correct.double().mean((0, 1))
        means = resampled_means(errors[None], groups=self.groups, seed=seed)[:, 0].numpy()
        low, high = np.quantile(means, [0.025, 0.975])
        return Estimate(float(errors.mean()), float(low), float(high), errors.numel())

    def relative_error(self, baseline: "Corrupted", *, seed: int = 0) -> Estimate | None:
        """Mean corruption error: for each kind the errors summed over severities, divided by the baseline's, averaged
        over kinds (Hendrycks & Dietterich 2019); a fraction, 1 for the baseline itself.

        The interval is a paired bootstrap over images. None where the baseline makes no error of a kind.
        """
        mine, other = ((~one.correct).double().mean(1) for one in (self, baseline))  # (kinds, n)
        if bool((other.sum(1) == 0).any()):
            return None
        kinds = len(mine)
        means = resampled_means(torch.cat((mine, other)), groups=self.groups, seed=seed)
        ratios = (means[:, :kinds] / means[:, kinds:]).mean(1).numpy()
        ratios = ratios[np.isfinite(ratios)]  # a draw without an error of the baseline has no ratio
        low, high = np.quantile(ratios, [0.025, 0.975])
        value = float((mine.mean(1) / other.mean(1)).mean())
        return Estimate(value, min(float(low), value), max(float(high), value), mine.shape[1])


def on_corrupted(
    model: Model,
    split: Split,
    *,
    keys: Keys,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Bool[Tensor, "batch kinds severities"]:
    """Who is right on every kind of damage at every severity.

    keys: (n,), one number an image, from which all that is random is drawn: two models see the same pixels, and so
    do several processes. Images are damaged at the split's own size. advance: told the passes over an image just done.
    Raises DataError without labels, InputError when the classes do not match.
    """
    truth = require_labels(split).cpu()
    read = reading(model.classes, split.classes).read
    size = batch_size or fitting_batch_size(model)
    right = torch.zeros(len(split), len(CORRUPTIONS), len(SEVERITIES), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(size, device=model.device):
            for row, kind in enumerate(CORRUPTIONS):
                for severity in SEVERITIES:
                    changed = corrupted(batch.images, kind, severity, keys[batch.indices])
                    answers = read(model(changed)).argmax(-1).cpu()
                    right[batch.indices, row, severity - 1] = answers == truth[batch.indices]
                advance(len(batch.images) * len(SEVERITIES))
    return right
