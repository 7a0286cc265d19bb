"""What `vitlens brightness` writes."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, Contents, MetricName, TableOf, UntrustedName


@dataclass(frozen=True)
class BrightnessRow:
    """One image and its mean pixel."""

    image: UntrustedName
    brightness: float


@dataclass(frozen=True)
class BrightnessArrays:
    """rows: (images, height), the mean pixel of each row of pixels."""

    rows: Annotated[NDArray[np.floating], Form("f", (None, None))]


BRIGHTNESS = MetricName("brightness/{model}")
IMAGES = TableOf("images", BrightnessRow)
ROWS = ArraysOf("brightness-{model}", BrightnessArrays)

RECORD = Contents(metrics=(BRIGHTNESS,), tables=(IMAGES,), arrays=(ROWS,))
