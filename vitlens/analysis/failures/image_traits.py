"""Traits of an image computed without a model: contrast, blur, mean frequency, and the size of its object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.failures.spectrum import power, radius
from vitlens.analysis.faithfulness.localisation import mask_areas
from vitlens.data.split import Split
from vitlens.shapes import Images

Plane = Float[Tensor, "batch height width"]
Trait = Float[Tensor, " batch"]

_LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue (Rec. 709)
_WINDOW = 9  # px: width of the mean filter that blurs an image again (Crete 2007)
_BATCH = 256


@dataclass(frozen=True)
class Measure:
    """title: in figures; description: its definition; of: computes it for each plane of luminance in [0, 1]."""

    title: str
    description: str
    of: Callable[[Plane], Trait]


def luminance(images: Images) -> Plane:
    """Luminance (batch, height, width) in [0, 1] of images in [0, 1], without gamma correction."""
    weights = torch.tensor(_LUMINANCE, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)


def contrast(planes: Plane) -> Trait:
    """Contrast as the standard deviation of the luminance: 0 for a constant image, at most 0.5."""
    return planes.flatten(1).std(1, correction=0)


def blur(planes: Plane) -> Trait:
    """How blurred an image is, 0 (sharp) to 1, by how little it changes when it is blurred again (Crete 2007).

    Along each axis: the share of the differences between neighbouring pixels that remains after a mean over 9 pixels;
    the larger of the two axes. An image that is constant along an axis counts as blurred along it.
    """
    return torch.maximum(_blur_along(planes), _blur_along(planes.transpose(1, 2)))


def _blur_along(planes: Plane) -> Trait:
    width = planes.shape[-1]
    window = min(_WINDOW, 2 * ((width - 1) // 2) + 1)
    padded = torch.nn.functional.pad(planes[:, None], (window // 2, window // 2, 0, 0), mode="replicate")
    again = torch.nn.functional.avg_pool2d(padded, (1, window), stride=1)[:, 0]
    before, after = planes.diff(dim=-1).abs(), again.diff(dim=-1).abs()
    whole = before.sum((1, 2))
    lost = (before - after).clamp_min(0).sum((1, 2))
    return torch.where(whole > 1e-6 * before[0].numel(), 1 - lost / whole.clamp_min(1e-12), torch.ones_like(whole))


def fineness(planes: Plane) -> Trait:
    """The energy-weighted mean frequency of the image, a share of Nyquist's frequency; 0 for a constant image."""
    energy = power(planes).flatten(1)
    fine = radius((planes.shape[-2], planes.shape[-1]), device=planes.device).flatten().to(energy.dtype)
    whole = energy.sum(1)
    plain = whole <= 1e-10 * planes[0].numel() ** 2
    return torch.where(plain, torch.zeros_like(whole), energy @ fine / whole.clamp_min(1e-30)).to(planes.dtype)


MEASURES: Final[Mapping[str, Measure]] = MappingProxyType(
    {
        "contrast": Measure("contrast", "standard deviation of the luminance in [0, 1]", contrast),
        "blur": Measure("blur", "0 (sharp) to 1, by how little another blur changes (Crete 2007)", blur),
        "frequency": Measure("mean frequency", "energy-weighted, a share of Nyquist's frequency", fineness),
    }
)
OBJECT_SIZE: Final = "object_size"


def image_traits(split: Split) -> dict[str, Trait]:
    """Every number of MEASURES for each image of a split (n,), and the object's size where masks are known.

    The size is NaN, not known, where the mask is empty.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    for batch in split.batches(_BATCH):
        planes = luminance(batch.images)
        for name, measure in MEASURES.items():
            parts[name].append(measure.of(planes))
    traits = {name: torch.cat(values) for name, values in parts.items()}
    if split.masks is not None:
        areas = mask_areas(split.masks)
        traits[OBJECT_SIZE] = torch.where(areas > 0, areas, torch.nan)
    return traits
