"""Effects measured on few images: how much each unit changes the loss over all of them, and how surely they differ.

Paired differences over the images that two units share; Student's t, its degrees of freedom fewer where tails are heavy
(Satterthwaite, by the kurtosis of all units together); the correction for a finite number of images, so that nothing is
uncertain once all are seen; Bonferroni over all pairs and all looks. Where a cheap estimate of each effect is known for
all images, what an effect has in common with it is taken from all of them (regression estimator, Cochran 1977).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from vitlens.analysis.ablation.effects import PerUnit, UnitsByImage

LOOKS = 3  # at the numbers, all of them to be right at once
FEWEST = 12  # images before a slope is fitted, or a unit is left out

Square = Float[Tensor, "units others"]


@dataclass(frozen=True)
class Compared:
    """mean, error, freedom (units,): changes of the loss over all images, standard errors, degrees of freedom; apart,
    apart_error, apart_freedom (units, units): how much more a row's unit changes it than a column's, in pairs."""

    mean: PerUnit
    error: PerUnit
    freedom: PerUnit
    apart: Square
    apart_error: Square
    apart_freedom: Square

    def above(self, confidence: float) -> Bool[Tensor, "units others"]:
        """Which units (rows) surely change the loss more than which others: all of it true at once at `confidence`."""
        count = len(self.mean)
        level = (1 - confidence) / (max(1, count * (count - 1) // 2) * LOOKS)
        return self.apart > _quantile(level, self.apart_freedom) * self.apart_error

    def half_width(self, confidence: float) -> PerUnit:
        """Of the intervals of all means at once."""
        return _quantile((1 - confidence) / (2 * len(self.mean) * LOOKS), self.freedom) * self.error


class Race:
    """What has been measured: values (units, n) in the order of drawing, and of how many images for each unit."""

    def __init__(self, units: int, n: int, estimate: UnitsByImage | None) -> None:
        self.n, self.estimate = n, estimate
        self.values = torch.full((units, n), torch.nan, dtype=torch.float64)
        self.images = torch.zeros(units, dtype=torch.long)

    def compare(self) -> Compared:
        """Every unit's change of the loss, and every two units' difference over the images that both have."""
        count = len(self.images)
        single = torch.zeros(3, count, dtype=torch.float64)
        double = torch.zeros(3, count, count, dtype=torch.float64)
        parts = {images: self._adjusted(images) for images in self.images.unique().tolist()}
        tails = self._kurtosis({images: left for images, (_, left) in parts.items()})
        for images, (mean, left) in parts.items():
            have = (self.images >= images).nonzero().flatten()
            degrees = max(1.0, images - 1.0 - (2 if self._adjusts(images) else 0))
            # a variance is less certain where tails are heavy (Satterthwaite)
            freedom = torch.full_like(mean, max(1.0, min(degrees, 2 * images / max(tails - 1, 1.0))))
            scale = (1 - images / self.n) / images / degrees
            square = left.square().sum(1)
            between = (square[:, None] + square - 2 * left @ left.T).clamp_min(0)
            own = self.images[have] == images
            single[:, have[own]] = torch.stack([mean, (square * scale).sqrt(), freedom])[:, own]
            pair = own[:, None] | own
            rows, columns = (have[axis] for axis in pair.nonzero().unbind(1))
            found = torch.stack([mean[:, None] - mean, (between * scale).sqrt(), freedom.expand(len(have), -1)])
            double[:, rows, columns] = found[:, pair]
        return Compared(*single, *double)

    def _kurtosis(self, parts: Mapping[int, Tensor]) -> float:
        """Of all units together, each over its own images and scaled to its own variance; 3 for normal tails."""
        found = []
        for images, left in parts.items():
            own = left[self.images[self.images >= images] == images]
            square = own.square().mean(1)
            found.append((own.pow(4).mean(1) / square.square())[square > 0])
        every = torch.cat(found)
        return float(every.mean()) if len(every) else 3.0

    def _adjusts(self, images: int) -> bool:
        return self.estimate is not None and images >= FEWEST

    def _adjusted(self, images: int) -> tuple[Tensor, Tensor]:
        """Of the units that have so many: means over all n images as estimated from these, what is left unexplained.

        The latter (units, images) as if each image were left out of the regression: few images with heavy tails would
        be fitted too well.
        """
        have = self.images >= images
        own = self.values[have, :images]
        mean = own.mean(1, keepdim=True)
        if self.estimate is None or not self._adjusts(images):
            return mean[:, 0], own - mean
        known = self.estimate[have]
        centre = known[:, :images].mean(1, keepdim=True)
        away = known[:, :images] - centre
        scale = away.square().sum(1, keepdim=True).clamp_min(1e-300)
        slope = (away * own).sum(1, keepdim=True) / scale
        left = (own - mean - slope * away) / (1 - 1 / images - away.square() / scale).clamp_min(1e-3)
        return (mean - slope * (centre - known.mean(1, keepdim=True)))[:, 0], left


def _quantile(level: float, freedom: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(stats.t.isf(level, freedom.numpy())))
