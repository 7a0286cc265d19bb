"""Running sums: means and intervals over images, in memory that does not grow with their number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Key = tuple[str, int]  # statistic, layer


@dataclass
class Moments:
    """Sums and sums of squares over images, float64, of named numbers per layer.

    count: the number of images; sums, squares: by (name, layer), each (heads,). Moments of different images are joined
    by adding all numbers.
    """

    count: int = 0
    sums: dict[Key, Tensor] = field(default_factory=dict)
    squares: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[Key, Tensor], images: int) -> None:
        """Add a batch: values (images, heads) by name and layer."""
        for key, value in values.items():
            exact = value.detach().double().cpu()
            total, square = exact.sum(0), exact.square().sum(0)
            self.sums[key] = self.sums[key] + total if key in self.sums else total
            self.squares[key] = self.squares[key] + square if key in self.squares else square
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
        """Half the width of Student's 95 % interval of the mean, (heads,); NaN for one image."""
        from scipy import stats  # half a second, which not every command needs

        factor = float(stats.t.ppf(0.975, self.count - 1)) if self.count > 1 else float("nan")
        return factor * (self.variance(key) / self.count).sqrt()

    def p_values(self, key: Key) -> NDArray[np.float64]:
        """Two-sided p-values that the mean is 0, (heads,): Student's t; 1 where all values are 0, NaN for one image."""
        mean, error = self.mean(key).numpy(), (self.variance(key) / self.count).sqrt().numpy()
        ratio = np.divide(np.abs(mean), error, out=np.where(mean == 0, 0.0, np.inf), where=error > 0)
        from scipy import stats

        p: NDArray[np.float64] = 2 * stats.t.sf(ratio, max(self.count - 1, 1))
        return p if self.count > 1 else np.full_like(p, np.nan)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up the moments of all processes; total: sums a tensor over them."""
        self.count = round(float(total(torch.tensor([self.count], dtype=torch.float64))))
        for part in (self.sums, self.squares):
            for key in sorted(part):
                part[key] = total(part[key])
