"""Checks the images that public functions take, and reads them as a whole or in parts.

`Model.forward` is not checked, as integrated gradients, SmoothGrad and attacks leave the range
[0, 1] intentionally.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from vitlens.errors import DataError
from vitlens.shapes import Images, Labels

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from PIL.Image import Image

    from vitlens.data.split import Split

    _Picture: TypeAlias = "str | Path | Image | NDArray[Any] | Tensor"
    AnyImages: TypeAlias = "_Picture | Split | Streamed | Sequence[_Picture]"
    Targets: TypeAlias = "str | int | Tensor | NDArray[Any] | Sequence[int | str] | None"
else:
    AnyImages: TypeAlias = object
    Targets: TypeAlias = object

TOLERANCE: Final = 1e-4  # pixels so far outside [0, 1] are taken for rounding, and clamped
MOST_BYTES: Final = 2**32  # of images in memory at a time: 7,133 images of 224x224 px

_LOADER: Final = "make them with vitlens.images(FILES, model)"
_WHITE: Final = 255  # the largest 8-bit pixel
# images with a larger maximum are taken for 8-bit images that were not divided by 255
_LARGEST_SCALED: Final = 2


@dataclass(frozen=True)
class Streamed:
    """The images of a Split, read part by part with the methods of a tensor.

    The methods are `images[start:stop]`, `images[indices]` and `images.split(size)`. Parts are
    checked by `require_images`.

    data: the Split.
    dtype: the type of the parts.
    """

    data: "Split"
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (images, 3, height, width)."""
        return len(self), 3, *self.data.size

    @property
    def device(self) -> torch.device:
        """Return the device of the parts."""
        return torch.device("cpu")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice | Tensor) -> Images:
        pixels = self.data.source.read(torch.arange(len(self))[part])
        if not pixels.is_floating_point():
            pixels = pixels.float().div_(_WHITE)
        return require_images(pixels, dtype=self.dtype)

    def split(self, size: int) -> Iterator[Images]:
        """Return all images in order, `size` at a time."""
        return (self[start : start + size] for start in range(0, len(self), size))


Parts: TypeAlias = Images | Streamed


def as_images(images: AnyImages) -> Images:
    """Return the images within a function that `takes_images` decorates, as one tensor.

    Raises DataError, before it reads any, for more than MOST_BYTES.
    """
    parts = as_parts(images)
    if isinstance(parts, Tensor):
        return parts
    bytes_per_image = parts.dtype.itemsize * prod(parts.shape[1:])
    if len(parts) * bytes_per_image > MOST_BYTES:
        most = MOST_BYTES // bytes_per_image
        raise DataError(
            f"expected at most {most} images of {parts.shape[2]}x{parts.shape[3]} px at once, "
            f"found {len(parts)}; give a part of them, such as split.limit({most})"
        )
    return parts[:]


def as_parts(images: object) -> Parts:
    """Return the images within a function that `takes_images` decorates, to be read in parts."""
    assert isinstance(images, Tensor | Streamed)
    return images


def groups_of(images: Parts) -> Tensor | None:
    """Return the group of each image (n,) of a Split with groups, None for other images.

    Images of one group are not independent: intervals are over groups.
    """
    return images.data.groups if isinstance(images, Streamed) else None


def as_targets(targets: Targets) -> Labels | None:
    """Return the class indices, or None, in a function that `takes_images` decorates."""
    assert targets is None or isinstance(targets, Tensor)
    return targets


def require_images(images: object, *, dtype: torch.dtype = torch.float32) -> Images:
    """Return images (batch, 3, height, width) in [0, 1] of this dtype.

    Values up to TOLERANCE outside are clamped. Raises DataError for anything else.
    """
    if not isinstance(images, Tensor):
        raise DataError(
            f"expected a tensor of images in [0, 1], found {type(images).__name__}; {_LOADER}"
        )
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] != 3 or 0 in shape:
        advice = _LOADER
        if len(shape) == 3 and shape[0] == 3:
            advice = "add the batch with images[None]"
        elif len(shape) == 4 and shape[3] == 3 and 0 not in shape:
            advice = "put the channels first with images.permute(0, 3, 1, 2)"
        elif len(shape) == 3 and shape[2] == 3:
            advice = "put the channels first and add the batch with images.permute(2, 0, 1)[None]"
        raise DataError(
            f"expected images (batch, 3, height, width) with batch > 0, found {shape}; {advice}"
        )
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise DataError(
            f"expected floating-point images in [0, 1], found {kind}; divide by 255, or {_LOADER}"
        )
    smallest, largest = images.detach().aminmax()
    low = smallest.item()
    high = largest.item()
    if not (abs(low) < torch.inf and abs(high) < torch.inf):
        raise DataError(f"expected images in [0, 1], found NaN or infinity; {_LOADER}")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise DataError(
            f"expected images in [0, 1], found {low:.4g} to {high:.4g}; "
            f"{_range_advice(low, high)}{_LOADER}"
        )
    if images.is_inference():  # a tensor of inference mode cannot have a gradient
        images = images.clone()
    if low < 0 or high > 1:
        images = images.clamp(0, 1)
    return images.to(dtype)


def _range_advice(low: float, high: float) -> str:
    """Return advice for images from `low` to `high`, as the beginning of a sentence."""
    if low < 0:
        return "leave out the normalisation, which the model does itself, or "
    if high <= _LARGEST_SCALED:
        return "clamp them with images.clamp(0, 1), or "
    if high <= _WHITE:
        return "divide by 255, or "
    return ""
