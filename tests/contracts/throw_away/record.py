"""The record of `vitlens brightness`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Form
from vitlens.record import Record, arrays, col, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class BrightnessRow:
    """One image and its mean pixel."""

    image: str = col("image")
    brightness: float = col("brightness", term="the mean of all pixels and channels")


@dataclass(frozen=True)
class MeanRow:
    """The brightness of all images of a model."""

    model: str = col("model")
    brightness: Estimate = col("mean brightness", metric="brightness/{model}")


@dataclass(frozen=True)
class BrightnessArrays:
    """rows: (images, height), the mean pixel of each row of pixels."""

    rows: Annotated[NDArray[np.floating], Form("f", (None, None))]


@dataclass(frozen=True, kw_only=True)
class BrightnessRecord(Record):
    """The brightness of images."""

    images_shown: tuple[BrightnessRow, ...] = table()
    means: tuple[MeanRow, ...] = table()
    rows: Mapping[str, BrightnessArrays] = arrays("brightness-{model}")
