"""The p-value of one row by random sign flips, written for a single row: the tests' oracle of `sign_flips`."""

import numpy as np
from numpy.typing import ArrayLike

from vitlens.uncertainty import DRAWS

AT_ONCE = 4_000_000  # numbers drawn at once, which fixes where the generator's draws begin a new batch


def sign_flip_test(
    differences: ArrayLike, *, groups: ArrayLike | None = None, seed: int = 0, draws: int = DRAWS
) -> float:
    """Two-sided p-value of the hypothesis that paired differences (n,) are centred on zero.

    groups (n,): differences of one group flip together. The smallest p-value is 1 / (draws + 1).
    """
    sums = np.asarray(differences, dtype=np.float64)
    if groups is not None:
        sums = np.bincount(np.unique(np.asarray(groups), return_inverse=True)[1].ravel(), weights=sums)
    observed = abs(sums.sum()) * (1 - 1e-12)  # tolerance for rounding in another order of summation
    generator = np.random.default_rng(seed)
    reached = 0
    step = max(1, AT_ONCE // len(sums))
    for start in range(0, draws, step):
        signs = generator.integers(0, 2, size=(min(step, draws - start), len(sums)), dtype=np.int8) * 2 - 1
        reached += int((np.abs(signs @ sums) >= observed).sum())
    return (reached + 1) / (draws + 1)
