"""One image file -> uint8 RGB pixels; EXIF rotation, transparency, bit depth and colour space are converted."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vitlens.errors import DataError
from vitlens.preprocessing import Interpolation, Preprocessing

PIXEL_LIMIT = 64_000_000  # most pixels of a file, and of a resized image; a small file can claim any number
# Pillow supports more formats, one of them (EPS) by running a program
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})

_RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
_DEEP_GREY = ("I", "I;16", "I;16B", "I;16L", "I;16N")


class UnreadableError(DataError):
    """An image that cannot be used; the message is the reason, without the file's name."""


class Header(NamedTuple):
    """The header of a readable file: its size as stored (height, width), and a note for the report, or None."""

    size: tuple[int, int]
    note: str | None


class Decoded(NamedTuple):
    """pixels (3, height, width) uint8, preprocessed for a model, and the file's header."""

    pixels: UInt8[Tensor, "3 height width"]
    header: Header


def decode_file(path: Path, preprocessing: Preprocessing) -> Decoded:
    """Pixels of one image file, resized and cropped for a model; call it inside `quiet_pillow`.

    Raises UnreadableError with the reason: missing, no image, truncated, too large.
    """
    with open_image(path) as image:
        return Decoded(fit(flatten(image), preprocessing), header_of(image))


def decode_image(image: Image.Image, preprocessing: Preprocessing) -> UInt8[Tensor, "3 height width"]:
    """Pixels of an open image, as `decode_file` returns them; call it inside `quiet_pillow`.

    Raises UnreadableError with the reason.
    """
    with _reasons():
        _check_size(*image.size)
        return fit(flatten(image), preprocessing)


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Inside, Pillow's warnings are not printed, as errors and notes replace them. Enter it outside threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """An open image of acceptable size; every failure inside is an UnreadableError."""
    with _reasons(), Image.open(path, formats=FORMATS) as image:
        _check_size(*image.size)
        yield image


@contextmanager
def _reasons() -> Iterator[None]:
    """Inside, every failure is an UnreadableError whose message is the reason."""
    try:
        yield
    except UnreadableError:
        raise
    except FileNotFoundError as error:
        raise UnreadableError("expected an image file, found nothing there") from error
    except UnidentifiedImageError as error:
        raise UnreadableError(f"expected an image ({', '.join(FORMATS)}), found something else") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UnreadableError(f"expected at most {PIXEL_LIMIT // 1_000_000} megapixels, found more") from error
    except Exception as error:  # a damaged file makes Pillow's decoders raise nearly anything
        raise UnreadableError(_first_line(error)) from error


def flatten(image: Image.Image) -> Image.Image:
    """The first frame as RGB: rotated by its EXIF orientation, transparency on white, 16 bit scaled to 8."""
    image.load()
    with suppress(Exception):  # a broken EXIF block does not affect the pixels
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _DEEP_GREY:
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnreadableError("expected integer pixels, found floating point, whose range is unknown; save it as PNG")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, "white")
        return Image.alpha_composite(white, clear).convert("RGB")
    return image.convert("RGB")


def fit(image: Image.Image, preprocessing: Preprocessing) -> UInt8[Tensor, "3 height width"]:
    """An RGB image resized (short side, then centre crop; or as a whole) to a model's input size."""
    height, width = preprocessing.size
    method = _RESAMPLING[preprocessing.interpolation]
    if preprocessing.resize is None:
        resized = image if image.size == (width, height) else image.resize((width, height), method)
        return to_pixels(resized)
    resized = image.resize(_cover(image.size, preprocessing.resize, (width, height)), method)
    # rounded as in torchvision's CenterCrop, to reproduce published accuracies
    left, top = round((resized.width - width) / 2), round((resized.height - height) / 2)
    return to_pixels(resized.crop((left, top, left + width, top + height)))


def to_pixels(image: Image.Image) -> UInt8[Tensor, "3 height width"]:
    """An RGB image as a tensor (a copy)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def header_of(image: Image.Image) -> Header:
    """An open image's header, with a note where it has more than one frame."""
    # a camera's MPO holds a preview beside the photograph
    animated = image.format != "MPO" and getattr(image, "is_animated", False)
    return Header((image.height, image.width), "more than one frame, of which the first is used" if animated else None)


def _cover(size: tuple[int, int], short_side: int, crop: tuple[int, int]) -> tuple[int, int]:
    """(width, height) with this short side, in proportion, and never smaller than the crop."""
    short, long = min(size), max(size)
    scaled = int(short_side * long / short)  # truncated, as in torchvision's Resize
    width, height = (short_side, scaled) if size[0] <= size[1] else (scaled, short_side)
    if width < crop[0] or height < crop[1]:
        scale = max(crop[0] / size[0], crop[1] / size[1])
        width, height = max(crop[0], round(size[0] * scale)), max(crop[1], round(size[1] * scale))
    if width * height > PIXEL_LIMIT:
        raise UnreadableError(f"expected an image that is not a thin strip, found {size[0]}x{size[1]}")
    return width, height


def _check_size(width: int, height: int) -> None:
    if width * height > PIXEL_LIMIT:
        raise UnreadableError(
            f"expected at most {PIXEL_LIMIT // 1_000_000} megapixels, found {width}x{height}; make it smaller first"
        )


def _first_line(error: Exception) -> str:
    """The first line of a decoder's error message."""
    return (str(error) or type(error).__name__).splitlines()[0]
