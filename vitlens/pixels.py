"""Images and target classes as public functions take them, and the check that pixels lie in [0, 1].

`Model.forward` is not checked, as integrated gradients, SmoothGrad and attacks leave the range
intentionally.
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

TOLERANCE: Final = 1e-4  # accepted distance outside [0, 1], by rounding; such pixels are clamped
MOST_BYTES: Final = 2**32  # of the images of a Split at once: 7,133 of 224x224 px

_LOADER: Final = "make them with vitlens.images(FILES, model)"
_WHITE: Final = 255  # of 8-bit pixels
_DARK: Final = 2  # 8-bit images have a larger maximum


@dataclass(frozen=True)
class Streamed:
    """The images of a Split, read part by part as of a tensor: `images[start:stop]`,
    `images[indices]` and `images.split(size)`, each as `require_images` gives it.
    """

    given: "Split"
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(images, 3, height, width)."""
        return len(self), 3, *self.given.size

    @property
    def device(self) -> torch.device:
        """Of the parts."""
        return torch.device("cpu")

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, part: slice | Tensor) -> Images:
        pixels = self.given.source.read(torch.arange(len(self))[part])
        return require_images(
            pixels if pixels.is_floating_point() else pixels.float().div_(255), dtype=self.dtype
        )

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
    each = parts.dtype.itemsize * prod(parts.shape[1:])
    if len(parts) * each > MOST_BYTES:
        most = MOST_BYTES // each
        raise DataError(
            f"expected at most {most} images of {parts.shape[2]}x{parts.shape[3]} px at once, "
            f"found {len(parts)}; give a part of them, such as split.limit({most})"
        )
    return parts[:]


def as_parts(images: object) -> Parts:
    """Return the images within a function that `takes_images` decorates, of which parts are taken
    by slices or `split`.
    """
    assert isinstance(images, Tensor | Streamed)
    return images


def groups_of(images: Parts) -> Tensor | None:
    """Return the group of each image (n,), where they come from a Split that has groups: intervals
    are clustered by them.
    """
    return images.given.groups if isinstance(images, Streamed) else None


def as_targets(targets: Targets) -> Labels | None:
    """Return the targets within a function that `takes_images` decorates: class indices, or
    None."""
    assert targets is None or isinstance(targets, Tensor)
    return targets


def require_images(images: object, *, dtype: torch.dtype = torch.float32) -> Images:
    """Images (batch, 3, height, width) in [0, 1] of this dtype; values up to TOLERANCE outside are
    clamped.
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
        found = str(images.dtype).removeprefix("torch.")
        raise DataError(
            f"expected floating-point images in [0, 1], found {found}; divide by 255, or {_LOADER}"
        )
    low, high = (bound.item() for bound in images.detach().aminmax())
    if not (abs(low) < torch.inf and abs(high) < torch.inf):
        raise DataError(f"expected images in [0, 1], found NaN or infinity; {_LOADER}")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        advice = "leave out the normalisation, which the model does itself, or " if low < 0 else ""
        if low >= 0 and high <= _WHITE:
            advice = (
                "clamp them with images.clamp(0, 1), or " if high <= _DARK else "divide by 255, or "
            )
        raise DataError(
            f"expected images in [0, 1], found {low:.4g} to {high:.4g}; {advice}{_LOADER}"
        )
    images = (
        images.clone() if images.is_inference() else images
    )  # such tensors cannot be part of a graph
    return (images if low >= 0 and high <= 1 else images.clamp(0, 1)).to(dtype)
