"""The effective receptive field of each layer, as rows and arrays; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.record import col
from vitlens.records import ArraysOf, TableOf
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class FieldRow:
    """What the middle patch of one layer depends on, means over images with Student's 95 % interval.

    model: its alias, words: its name in tables and figures; uniform: the distance for equal weights.
    """

    model: str = col("model")
    words: str = col("model in words")
    layer: int = col("layer")
    title: str = col("after")
    distance: Estimate = col(
        "distance", term="mean distance from the patch to a pixel, weighted by the norm of the gradient"
    )
    uniform: float = col("distance if uniform", unit="px")
    half: Estimate = col("pixels with half of the gradient", term="the least share of the pixels that holds half of it")
    seen: float = col("pixels with any", unit="fraction")


@dataclass(frozen=True)
class FieldArrays:
    """field: by row of the table, the norm of the gradient at each pixel (height, width), mean over images."""

    field: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]


FIELDS = TableOf("receptive_fields", FieldRow, optional=True)
FIELD_MAPS = ArraysOf("receptive_fields", FieldArrays)
