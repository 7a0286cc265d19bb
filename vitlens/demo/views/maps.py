"""Maps over a picture, drawn as the figures of the reports draw them."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.charts.overlay import OPACITY, overlaid
from vitlens.demo.pictures import Picture
from vitlens.models.model import Model

Floats = NDArray[np.float64]


def picture_array(picture: Picture, model: Model) -> Floats:
    """The picture as the model sees it, (3, height, width) in [0, 1]."""
    return np.asarray(picture.pixels[model.alias][0].numpy() / 255, dtype=np.float64)


def map_array(maps: Tensor) -> Floats:
    """The first of a batch of maps, (rows, columns)."""
    return np.asarray(maps[0].detach().double().cpu().numpy())


def drawn_over(
    picture: Picture, model: Model, values: Floats, *, signed: bool, opacity: float = OPACITY
) -> tuple[Floats, str]:
    """Pixels (height, width, 3) of a map over the picture in grey, and "" or why there is nothing to see in it."""
    pixels, flaw = overlaid(picture_array(picture, model), values, signed=signed, opacity=opacity)
    return np.asarray(pixels, dtype=np.float64), flaw
