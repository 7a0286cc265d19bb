"""p-values of one row by sign flips and by the bootstrap-t: oracles for tests of many rows."""

import numpy as np
from numpy.typing import ArrayLike

from vitlens.resampling import DRAWS

# numbers drawn at once, which fixes where the generator's draws begin a new batch
AT_ONCE = 4_000_000


def bootstrap_t_test(
    differences: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0, draws: int = DRAWS
) -> float:
    """Return the two-sided p-value of a mean of 0 by the bootstrap-t, with the tails apart.

    groups (n,): differences of one group are drawn together.
    """
    values = np.asarray(differences, dtype=np.float64)
    members = (
        np.arange(len(values))
        if groups is None
        else np.unique(np.asarray(groups), return_inverse=True)[1].ravel()
    )
    sums = np.bincount(members, weights=values)
    counts = np.bincount(members).astype(float)
    size = len(sums)
    mean = sums.sum() / counts.sum()
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    observed = mean / np.sqrt((size - 1) / size * ((left_out - left_out.mean()) ** 2).sum())
    above = below = 0
    for row in np.random.default_rng(seed).integers(0, size, size=(draws, size)):
        drawn = sums[row].sum() / counts[row].sum()
        error = (
            np.sqrt(size / (size - 1) * ((sums[row] - drawn * counts[row]) ** 2).sum())
            / counts[row].sum()
        )
        student = (drawn - mean) / error if error > 1e-12 else 1e300 * np.sign(drawn - mean)
        above += student >= observed - 1e-9 * abs(observed)
        below += student <= observed + 1e-9 * abs(observed)
    return min(1.0, 2 * (min(above, below) + 1) / (draws + 1))


def sign_flip_test(
    differences: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0, draws: int = DRAWS
) -> float:
    """Return the two-sided p-value of the hypothesis that paired differences (n,) centre on zero.

    groups (n,): differences of one group flip together. The smallest p-value is 1 / (draws + 1).
    """
    sums = np.asarray(differences, dtype=np.float64)
    if groups is not None:
        sums = np.bincount(
            np.unique(np.asarray(groups), return_inverse=True)[1].ravel(), weights=sums
        )
    observed = abs(sums.sum()) * (1 - 1e-12)  # tolerance for rounding in another order of summation
    generator = np.random.default_rng(seed)
    reached = 0
    step = max(1, AT_ONCE // len(sums))
    for start in range(0, draws, step):
        signs = (
            generator.integers(0, 2, size=(min(step, draws - start), len(sums)), dtype=np.int8) * 2
            - 1
        )
        reached += int((np.abs(signs @ sums) >= observed).sum())
    return (reached + 1) / (draws + 1)
