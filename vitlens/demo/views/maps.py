"""Maps over a picture, drawn as the figures of the reports draw them."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.demo.pictures import Picture
from vitlens.figures.explain import OPACITY, overlaid
from vitlens.models.model import Model

Floats = NDArray[np.floating]


def picture_array(picture: Picture, model: Model) -> Floats:
    """The picture as the model sees it, (3, height, width) in [0, 1]."""
    return picture.pixels[model.alias][0].numpy() / np.float64(255)


def map_array(maps: Tensor) -> Floats:
    """The first of a batch of maps, (rows, columns)."""
    values: Floats = maps[0].detach().float().cpu().numpy()
    return values


def drawn_over(
    picture: Picture, model: Model, values: Floats, *, signed: bool, opacity: float = OPACITY
) -> tuple[Floats, str]:
    """Pixels (height, width, 3) of a map over the picture in grey, and "" or why there is nothing to see in it."""
    return overlaid(picture_array(picture, model), values, signed=signed, opacity=opacity)
