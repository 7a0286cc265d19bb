"""`vitlens.images`: pictures as a tensor, resized and cropped as on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlens.data.catalogue import read_pictures
from vitlens.data.split import Split
from vitlens.models.given import require_model
from vitlens.models.model import Model
from vitlens.shapes import Images

Picture: TypeAlias = str | Path | Image.Image | NDArray[Any] | Tensor | Split


def images(pictures: Picture | Sequence[Picture], model: Model) -> Images:
    """Pictures as input of a model: (n, 3, height, width) in [0, 1], on the model's device.

    pictures: one or a list of files, folders (all images below, sorted), patterns of paths, PIL images, uint8 arrays
    (height, width), (height, width, 3 or 4) or (n, height, width, 3 or 4), and uint8 tensors (3, height, width) or (n,
    3, height, width); or a Split, as it is. They are resized and cropped as by `vitlens predict`: EXIF rotation
    applied, transparency blended with white, greyscale converted to RGB, 16 bits scaled to 8. Every function that takes
    images takes these as well. Raises DataError for pictures that cannot be read, for floating-point pixels, and for no
    pictures.

    >>> import numpy, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> vitlens.images(numpy.zeros((48, 64, 3), dtype="uint8"), vit).shape
    torch.Size([1, 3, 32, 32])
    """
    require_model(model, pictures)
    if isinstance(pictures, Split):
        return images_of(pictures).to(model.device)
    return read_pictures(pictures, model.preprocessing).to(model.device).float().div_(255)


def images_of(split: Split) -> Images:
    """All images of a split as one tensor, (n, 3, height, width) in [0, 1], on the CPU."""
    return torch.cat([batch.images for batch in split.batches(max(1, len(split)))])
