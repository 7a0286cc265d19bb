"""Running sums: means and intervals over images, in memory that does not grow with their number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.uncertainty import Estimate

Key = tuple[str, int]  # statistic, layer
_MEMBERS: Final[Key] = ("", 0)


@dataclass
class Moments:
    """Sums and sums of squares over images, float64, of named numbers per layer.

    count: the number of images; sums, squares: by (name, layer), each (heads,); clusters: how many groups the images
    are of, 0 where each stands for itself; cluster_sums: the sums of each (clusters, heads), and under _MEMBERS its
    number of images. Images of one group are not independent, so intervals are of the means of groups.
    Moments of different images are joined by adding all numbers.
    """

    count: int = 0
    sums: dict[Key, Tensor] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)
    clusters: int = 0
    cluster_sums: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[Key, Tensor], images: int, *, groups: Tensor | None = None) -> None:
        """Add a batch: values (images, heads) by name and layer; groups (images,): of each, from 0 to clusters - 1."""
        if self.clusters:
            assert groups is not None  # as whoever counted the clusters knows them
            self._grow(_MEMBERS, torch.ones(images, 1, dtype=torch.float64), groups)
        for key, value in values.items():
            exact = value.detach().double().cpu()
            total, square = exact.sum(0), exact.square().sum(0)
            self.sums[key] = self.sums[key] + total if key in self.sums else total
            self.squares[key] = self.squares[key] + square if key in self.squares else square
            if self.clusters:
                assert groups is not None
                self._grow(key, exact, groups)
        self.count += images

    def mean(self, key: Key) -> Tensor:
        """The mean over images, (heads,)."""
        return self.sums[key] / self.count

    def variance(self, key: Key) -> Tensor:
        """The variance between images, (heads,), unbiased; NaN for one image."""
        if self.count < 2:
            return torch.full_like(self.sums[key], torch.nan)
        spread: Tensor = self.squares[key] - self.sums[key].square() / self.count
        return spread.clamp_min(0) / (self.count - 1)

    def half_width(self, key: Key) -> Tensor:
        """Half the width of Student's 95 % interval of the mean, (heads,); NaN for one image or one group."""
        from scipy import stats  # half a second, which not every command needs

        factor = float(stats.t.ppf(0.975, self.independent - 1)) if self.independent > 1 else float("nan")
        return factor * self._error(key)

    def estimate(self, key: Key, index: int, unit: str) -> Estimate:
        """The mean over images of one number with its 95 % interval; without one for a single image."""
        value, half = float(self.mean(key)[index]), float(self.half_width(key)[index])
        if not np.isfinite(half):
            return Estimate(value, n=self.count, unit=unit)
        return Estimate(value, value - half, value + half, self.count, unit)

    @property
    def independent(self) -> int:
        """The number of independent observations: of groups with an image, or of images."""
        return int((self._members > 0).sum()) if self.clusters else self.count

    @property
    def _members(self) -> Tensor:
        """The number of images of each group, (clusters,)."""
        return self.cluster_sums.get(_MEMBERS, torch.zeros(self.clusters, 1, dtype=torch.float64))[:, 0]

    def _error(self, key: Key) -> Tensor:
        """The standard error of the mean, (heads,); NaN for one observation."""
        if not self.clusters:
            return (self.variance(key) / self.count).sqrt()
        members = self._members
        own = members > 0
        means = self.cluster_sums[key][own] / members[own][:, None]
        return means.std(0) / len(means) ** 0.5 if len(means) > 1 else torch.full_like(self.sums[key], torch.nan)

    def _grow(self, key: Key, values: Tensor, groups: Tensor) -> None:
        """Add values (images, heads) to the sums of their groups."""
        known = self.cluster_sums.get(key)
        known = torch.zeros(self.clusters, values.shape[1], dtype=torch.float64) if known is None else known
        self.cluster_sums[key] = known.index_add(0, groups.cpu(), values)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up the moments of all processes; total: sums a tensor over them."""
        self.count = round(float(total(torch.tensor([self.count], dtype=torch.float64))))
        for part in (self.sums, self.squares, self.cluster_sums):
            for key in sorted(part):
                part[key] = total(part[key])
