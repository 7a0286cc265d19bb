"""Bootstrap intervals and sign-flip tests of many means: all rows share the draws of the images.

The draws are those of `uncertainty` with the same seed, so a row has the same interval as alone.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.errors import InputError
from vitlens.uncertainty import DRAWS, Estimate

_AT_ONCE = 4_000_000  # numbers drawn at once, as in uncertainty: it determines the draws

ByRow = Float[Tensor, "cases batch"]
Rows = Float[Tensor, " cases"]


def resampled_means(
    values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS
) -> Float[Tensor, "draws cases"]:
    """The means of values (cases, n) over bootstrap samples of the images, or of whole groups (n,)."""
    sums, counts = _by_group(values, groups)
    generator = np.random.default_rng(seed)
    means = np.empty((draws, sums.shape[1]))
    size = len(sums)
    for start, count in _steps(draws, size):
        drawn = generator.integers(0, size, size=(count, size))
        times = np.bincount((drawn + size * np.arange(count)[:, None]).ravel(), minlength=count * size)
        times = times.reshape(count, size).astype(np.float64)  # how often each group was drawn
        means[start : start + count] = (times @ sums) / (times @ counts)[:, None]
    return torch.from_numpy(means)


def intervals(values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS) -> tuple[Rows, Rows]:
    """Low and high of each row's 95 % percentile bootstrap interval; NaN for fewer than 2 images (or groups)."""
    if (values.shape[1] if groups is None else len(groups.unique())) < 2:
        undefined = torch.full((len(values),), torch.nan, dtype=torch.float64)
        return undefined, undefined
    means = resampled_means(values, groups=groups, seed=seed, draws=draws)
    low, high = np.quantile(means.numpy(), [0.025, 0.975], axis=0)
    return torch.from_numpy(low), torch.from_numpy(high)


def estimates(values: ByRow, *, groups: Tensor | None = None, seed: int = 0, unit: str = "fraction") -> list[Estimate]:
    """The mean of each row (cases, n) with its interval; no interval where it is not defined."""
    low, high = intervals(values, groups=groups, seed=seed)
    n, means = values.shape[1], values.double().mean(1).tolist()
    if low.isnan().any():
        return [Estimate(mean, n=n, unit=unit) for mean in means]
    return [Estimate(mean, down, up, n, unit) for mean, down, up in zip(means, low.tolist(), high.tolist())]


def sign_flips(values: ByRow, *, groups: Tensor | None = None, seed: int = 0, draws: int = DRAWS) -> Rows:
    """Two-sided p-values that each row (cases, n) is centred on zero; a group's values flip together."""
    sums, _ = _by_group(values, groups)
    observed = np.abs(sums.sum(0)) * (1 - 1e-12)  # so that rounding of the same sum in another order does not matter
    generator = np.random.default_rng(seed)
    reached = np.zeros(sums.shape[1])
    for _, count in _steps(draws, len(sums)):
        signs = generator.integers(0, 2, size=(count, len(sums)), dtype=np.int8) * 2 - 1
        reached += (np.abs(signs @ sums) >= observed).sum(0)
    return torch.from_numpy((reached + 1) / (draws + 1))


def spearman(first: ByRow, second: ByRow) -> Rows:
    """Spearman's correlation of each row (cases, n) with its other, ties at their mean rank; NaN where it is undefined:
    one of them is constant or has a NaN, or there are fewer than two values."""
    if first.shape[1] < 2:
        return torch.full((len(first),), torch.nan, dtype=torch.float64)
    from scipy import stats  # half a second to import, which not every command needs

    ranks = [stats.rankdata(values.detach().cpu().double().numpy(), axis=1) for values in (first, second)]
    centred = [rank - rank.mean(1, keepdims=True) for rank in ranks]
    norms = [np.sqrt((rank**2).sum(1)) for rank in centred]
    product, covariance = norms[0] * norms[1], (centred[0] * centred[1]).sum(1)
    found = np.divide(covariance, product, out=np.full(len(product), np.nan), where=product > 0)
    return torch.from_numpy(found)


def _steps(draws: int, size: int) -> Iterator[tuple[int, int]]:
    step = max(1, _AT_ONCE // size)
    for start in range(0, draws, step):
        yield start, min(step, draws - start)


def _by_group(values: ByRow, groups: Tensor | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums (groups, cases) and numbers of images (groups,); without groups each image is its own group."""
    columns = values.detach().cpu().double().numpy().T
    if not len(columns) or not np.isfinite(columns).all():
        raise InputError("expected finite values of at least one image, found NaN, infinity or none")
    if groups is None:
        return columns, np.ones(len(columns))
    if groups.shape != (len(columns),):
        raise InputError(f"expected one group an image ({len(columns)}), found groups of shape {tuple(groups.shape)}")
    member = np.unique(groups.cpu().numpy(), return_inverse=True)[1].astype(np.intp).ravel()
    counts = np.bincount(member).astype(np.float64)
    sums = np.zeros((len(counts), columns.shape[1]))
    np.add.at(sums, member, columns)
    return sums, counts
