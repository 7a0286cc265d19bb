"""Preprocessing of a photograph for a model: resize, crop, and its training's normalisation."""

from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, TypeAlias

from vitlens.errors import InputError
from vitlens.typed import between

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LONGEST_SIDE: Final = 4096  # most pixels of a side: with patches of 16 px, a ViT has 65,536 tokens

# Pillow's filters
Interpolation = Literal["bilinear", "bicubic", "nearest", "lanczos", "box", "hamming"]
CropMode = Literal["center", "border", "squash"]  # timm's names
CropOffset = Literal["round", "floor"]
# bounds for values from files
Side: TypeAlias = Annotated[int, between(1, LONGEST_SIDE)]
_Mean: TypeAlias = Annotated[float, between(-1000, 1000)]
_Spread: TypeAlias = Annotated[float, between(1e-6, 1000)]
_NEUTRAL: Final = (1.0, 1.0, 1.0)  # in place of a mean and a standard deviation
_Level: TypeAlias = Annotated[int, between(0, 255)]


@dataclass(frozen=True)
class Preprocessing:
    """The preparation of images for a model: resizing, a crop or padding, and normalisation.

    An image is resized by `resize` or by `box`, and then cropped at its centre. Without both, the
    whole image is resized to `size`.

    size: the (height, width) of the input in pixels.
    resize: the length of the short side in pixels after resizing.
    interpolation: one of Pillow's filters, antialiased.
    mean, std: the mean and standard deviation per channel, for pixels in [0, 1].
    box: a (height, width) in pixels for resizing by `crop_mode`.
    crop_mode: "center" scales the image in proportion until it covers the box, "border" until it
        fits into the box. "squash" resizes the whole image to the box.
    crop_offset: how an odd number of cropped pixels is halved: "round" (to even, as torchvision and
        timm do) or "floor" (as transformers does).
    fill: the 8-bit RGB colour around an image that is smaller than the crop. With None, the image
        is enlarged in proportion until it covers the crop.

    Raises InputError for a resize with a box, and for a crop_mode without one.
    """

    size: tuple[Side, Side]
    resize: Side | None = None
    interpolation: Interpolation = "bilinear"
    mean: tuple[_Mean, _Mean, _Mean] = (0.5, 0.5, 0.5)
    std: tuple[_Spread, _Spread, _Spread] = (0.5, 0.5, 0.5)
    box: tuple[Side, Side] | None = None
    crop_mode: CropMode = "center"
    crop_offset: CropOffset = "round"
    fill: tuple[_Level, _Level, _Level] | None = None

    def __post_init__(self) -> None:
        if self.resize is not None and self.box is not None:
            raise InputError(
                f"expected resize or box, found {self.resize} and {self.box}; leave one out"
            )
        if self.crop_mode != "center" and self.box is None:
            raise InputError(
                f"expected a box (height, width) for crop_mode {self.crop_mode!r}, found none; "
                "give box="
            )

    @property
    def is_cropped(self) -> bool:
        """Return True if an image is cropped or padded after it is resized."""
        return self.resize is not None or self.box is not None

    @property
    def geometry(self) -> "Preprocessing":
        """Return the settings of a model's 8-bit pixels, equal for models that share them.

        The normalisation is left out.
        """
        return replace(self, mean=_NEUTRAL, std=_NEUTRAL)

    @property
    def rule(self) -> str:
        """Return a description of the steps from an image to the model's input."""
        height, width = self.size
        if self.box is not None:
            verbs = {
                "center": "scaled to cover",
                "border": "scaled to fit into",
                "squash": "whole image resized to",
            }
            resized = "{} {} x {} px".format(verbs[self.crop_mode], *self.box)
        elif self.resize is not None:
            resized = f"short side resized to {self.resize} px"
        else:
            return f"whole image resized to {height} x {width} px ({self.interpolation})"
        crop = f"centre of {height} x {width} px"
        if self.crop_offset == "floor":
            crop += ", offset rounded down"
        if self.fill is not None:
            crop += ", border of colour {}, {}, {}".format(*self.fill)
        return f"{resized} ({self.interpolation}), {crop}"

    def at_size(self, size: tuple[int, int]) -> "Preprocessing":
        """Return the same normalisation and filter for whole images resized to (height, width)."""
        return Preprocessing(size, interpolation=self.interpolation, mean=self.mean, std=self.std)

    def without_crop(self) -> "Preprocessing":
        """Return the same normalisation, filter and size for whole images."""
        return self.at_size(self.size)


def require_side_lengths(size: tuple[int, int] | None) -> None:
    """Raise InputError for an input (height, width) too large for memory; None is accepted."""
    if size is not None and max(size) > LONGEST_SIDE:
        height, width = size
        raise InputError(
            f"expected an image size of at most {LONGEST_SIDE} px a side, found {height}x{width}; "
            "try 224"
        )
