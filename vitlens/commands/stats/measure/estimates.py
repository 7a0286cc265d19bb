"""Means over images as estimates, and as the cells of a table."""

import numpy as np
from torch import Tensor

from vitlens.analysis.answers.moments import Key, Moments
from vitlens.uncertainty import Estimate


def estimate_of(moments: Moments, key: Key, head: int, unit: str) -> Estimate:
    """The mean over images with its 95 % interval; without one for a single image."""
    value, half = float(moments.mean(key)[head]), float(moments.half_width(key)[head])
    if not np.isfinite(half):
        return Estimate(value, n=moments.count, unit=unit)
    return Estimate(value, value - half, value + half, moments.count, unit)


def finite(value: float | Tensor) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    number = float(value)
    return number if np.isfinite(number) else None
