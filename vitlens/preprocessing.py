"""Preprocessing of a photograph for a model: resize, crop, and the normalisation of its training."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from vitlens.errors import InputError
from vitlens.typed import between

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LONGEST_SIDE: Final = 4096  # pixels of an input; a ViT of patches of 16 px has 65,536 tokens then

Interpolation = Literal["bilinear", "bicubic"]
# bounds for values from files
Side: TypeAlias = Annotated[int, between(1, LONGEST_SIDE)]
_Mean: TypeAlias = Annotated[float, between(-1000, 1000)]
_Spread: TypeAlias = Annotated[float, between(1e-6, 1000)]


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared for a model.

    size: input (height, width) in pixels; resize: the short side in pixels before the centre crop (None: the
    whole image is resized to size); mean, std: per channel, in pixel units of [0, 1].
    """

    size: tuple[Side, Side]
    resize: Side | None = None
    interpolation: Interpolation = "bilinear"
    mean: tuple[_Mean, _Mean, _Mean] = (0.5, 0.5, 0.5)
    std: tuple[_Spread, _Spread, _Spread] = (0.5, 0.5, 0.5)


def require_side_lengths(size: tuple[int, int] | None) -> None:
    """Raise InputError for an input (height, width) that is too large for memory; None is a model's own size."""
    if size is not None and max(size) > LONGEST_SIDE:
        height, width = size
        raise InputError(f"expected an image size of at most {LONGEST_SIDE} px a side, found {height}x{width}; try 224")
