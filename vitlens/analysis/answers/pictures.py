"""Pictures as tensors: files, PIL images and 8-bit arrays, resized and cropped as on the command line."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlens.data.catalogue import load_images
from vitlens.data.decode import UnreadableError, decode_image, quiet_pillow
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.preprocessing import Preprocessing
from vitlens.shapes import Images, Pixels

Picture: TypeAlias = str | Path | Image.Image | NDArray[Any] | Tensor

_SHAPES: Final = "(height, width), (height, width, 3 or 4) or (n, height, width, 3 or 4)"


def images(pictures: Picture | Sequence[Picture], model: Model) -> Images:
    """Pictures as input of a model: (n, 3, height, width) in [0, 1], on the model's device.

    pictures: one or a list of files, folders (all images below, sorted), PIL images, uint8 arrays (height, width),
    (height, width, 3 or 4) or (n, height, width, 3 or 4), and uint8 tensors (3, height, width) or (n, 3, height,
    width). They are resized and cropped as by `vitlens predict`: EXIF rotation applied, transparency blended with
    white, greyscale converted to RGB, 16 bits scaled to 8. Raises DataError for pictures that cannot be read, for
    floating-point pixels, and for no pictures.

    >>> import numpy, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> vitlens.images(numpy.zeros((48, 64, 3), dtype="uint8"), vit).shape
    torch.Size([1, 3, 32, 32])
    """
    inputs = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    if not inputs:
        raise DataError("expected at least one picture, found none; give files, folders, PIL images or uint8 arrays")
    parts: list[Pixels] = []
    with quiet_pillow():
        for are_files, group in groupby(inputs, lambda picture: isinstance(picture, str | Path)):
            read = _of_files if are_files else _of_others
            parts.append(read(list(group), model.preprocessing))
    return torch.cat(parts).to(model.device).float().div_(255)


def _of_files(paths: Sequence[Any], preprocessing: Preprocessing) -> Pixels:
    """Pixels of all files, in order. Raises DataError for the first that cannot be read."""
    if not all(map(str, paths)):
        raise DataError("expected the path of an image or a folder of images, found ''")
    split = load_images(paths, preprocessing=preprocessing)
    for skipped in split.skipped:
        raise DataError(f"cannot read {skipped.file}: {skipped.reason}; mend it or leave it out")
    return split.source.read(torch.arange(len(split)))


def _of_others(pictures: Sequence[Any], preprocessing: Preprocessing) -> Pixels:
    """Pixels of PIL images, arrays and tensors, in order."""
    pixels = []
    for image in chain.from_iterable(map(_opened, pictures)):
        try:
            pixels.append(decode_image(image, preprocessing))
        except UnreadableError as reason:
            name = getattr(image, "filename", "") or f"a picture of {image.width}x{image.height} px"
            raise DataError(f"cannot read {name}: {reason}") from reason
    return torch.stack(pixels)


def _opened(picture: object) -> Iterator[Image.Image]:
    """The PIL images of one argument."""
    if isinstance(picture, Image.Image):
        yield picture
        return
    if not isinstance(picture, np.ndarray | Tensor):
        raise DataError(
            f"expected files, folders, PIL images or uint8 arrays, found {type(picture).__name__}; e.g. "
            "vitlens.images('cat.jpg', model)"
        )
    array = _channels_last(picture) if isinstance(picture, Tensor) else picture
    if array.dtype != np.uint8:
        raise DataError(
            f"expected 8-bit pixels (uint8, 0 to 255), found {array.dtype}; (255 * pixels).round() as uint8 makes them "
            "of pixels in [0, 1], and a float tensor (n, 3, height, width) in [0, 1] can be used as it is"
        )
    coloured = array.ndim > 2 and array.shape[-1] in (3, 4)
    if array.ndim not in ((3, 4) if coloured else (2,)) or 0 in array.shape:
        raise DataError(f"expected an array {_SHAPES}, found {array.shape}")
    for pixels in array if array.ndim == 4 else (array,):
        yield Image.fromarray(pixels)


def _channels_last(tensor: Tensor) -> NDArray[Any]:
    """A tensor (..., 3, height, width) as an array, its channels last, as PIL and numpy have them."""
    if tensor.ndim not in (3, 4) or tensor.shape[-3] not in (3, 4):
        raise DataError(
            f"expected a uint8 tensor (3, height, width) or (n, 3, height, width), found {tuple(tensor.shape)}"
        )
    return np.ascontiguousarray(tensor.detach().cpu().movedim(-3, -1).numpy())
