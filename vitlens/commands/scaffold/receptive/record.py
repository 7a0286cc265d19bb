"""The effective receptive field of each layer, as rows and arrays; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, TableOf
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class FieldRow:
    """What the middle patch of one layer depends on, mean over n images with Student's 95 % interval.

    model: its alias, words: its name in tables and figures; distance: from the patch to a pixel in px, weighted by the
    gradient; uniform: the same for equal weights; half: the least share of the pixels with half of the gradient; seen:
    the share of the pixels with any.
    """

    model: str
    words: str
    layer: int
    title: str
    distance: float
    distance_low: float | None
    distance_high: float | None
    uniform: float
    half: float
    half_low: float | None
    half_high: float | None
    seen: float
    n: int

    @property
    def mean_distance(self) -> Estimate:
        """The distance with its interval, in px."""
        return Estimate(self.distance, self.distance_low, self.distance_high, self.n, "px")

    @property
    def half_share(self) -> Estimate:
        """The share of the pixels with half of the gradient, with its interval."""
        return Estimate(self.half, self.half_low, self.half_high, self.n)


@dataclass(frozen=True)
class FieldArrays:
    """field: by row of the table, the norm of the gradient at each pixel (height, width), mean over images."""

    field: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]


FIELDS = TableOf("receptive_fields", FieldRow, optional=True)
FIELD_MAPS = ArraysOf("receptive_fields", FieldArrays)
