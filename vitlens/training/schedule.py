"""The learning rate of each step: linear warm-up, then half a cosine down to a minimum."""

import math

from vitlens.errors import InputError


def learning_rate(step: int, *, total: int, warmup: int, peak: float, minimum: float) -> float:
    """The rate for one step, counted from 0: peak/warmup at the first, peak after the warm-up, minimum at the last.

    total, warmup: steps. The cosine is Loshchilov & Hutter 2017, eq. 5, without restarts. Raises InputError when the
    step or the warm-up lies outside the total.
    """
    if not 0 <= step < total or not 0 <= warmup <= total:
        raise InputError(f"expected 0 <= step < {total} and 0 <= warm-up <= {total}, found {step} and {warmup}")
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(total - warmup - 1, 1)
    return minimum + 0.5 * (peak - minimum) * (1 + math.cos(math.pi * (step - warmup) / span))
