"""How a cost grows with the number of tokens: the exponent of a power law, by regression of logarithms."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from vitlens.errors import InputError
from vitlens.uncertainty import Estimate


def exponent(tokens: ArrayLike, costs: ArrayLike) -> Estimate:
    """k of cost = c · tokensᵏ, least squares on logarithms, with Student's 95 % interval; n is the number of points.

    Two points have no interval. For exact costs (FLOPs) the interval says how far the points are from one straight
    line, not how uncertain they are. Raises InputError for fewer than two numbers of tokens, or a number not above 0.
    """
    x, y = np.asarray(tokens, dtype=np.float64), np.asarray(costs, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(set(x.tolist())) < 2:
        raise InputError(f"expected costs at two or more numbers of tokens, found {x.tolist()}; try more --sizes")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and min(x.min(), y.min()) > 0):
        raise InputError(f"expected tokens and costs above 0, found {x.tolist()} and {y.tolist()}")
    across, up = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    slope = float(across @ up / (across @ across))
    if len(x) == 2:
        return Estimate(slope, n=2, unit="")
    left = up - slope * across
    error = np.sqrt(left @ left / (len(x) - 2) / (across @ across))
    half = float(stats.t.ppf(0.975, len(x) - 2) * error)
    return Estimate(slope, slope - half, slope + half, len(x), "")
