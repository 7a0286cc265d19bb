"""How far neighbours on a plane are neighbours in the features they stand for (Venna and Kaski 2001)."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.errors import InputError

_NUMBERS = 1 << 23  # distances held at once


def trustworthiness(
    values: Float[Tensor, "images dim"], points: Float[Tensor, "images plane"], *, neighbours: int
) -> float:
    """1 less what intruders cost: a neighbour on the plane that is none in the features costs its rank beyond k.

    In [0, 1]; 1 where all neighbours on the plane are among the k nearest of the features, about 0.5 for points thrown
    at random. As scikit-learn's, but in chunks: memory does not grow with the square of the images. Raises InputError
    unless k is from 1 to less than half of the images, beyond which it is not defined.
    """
    n, k = len(values), neighbours
    if not 1 <= k < n / 2:
        raise InputError(f"expected neighbours from 1 to less than half of {n} images, found {k}")
    penalty = 0
    for rows in torch.arange(n).split(max(1, _NUMBERS // n)):
        near = _distances(points, rows).topk(k, largest=False).indices  # (rows, k)
        far = _distances(values, rows)
        for column in range(k):
            closer = (far < far.gather(1, near[:, column : column + 1])).sum(1)
            penalty += int((closer + 1 - k).clamp_min(0).sum())  # its rank is one more than those that are closer
    return 1 - 2 / (n * k * (2 * n - 3 * k - 1)) * penalty


def _distances(values: Tensor, rows: Tensor) -> Tensor:
    """Squared distances of some to all, (rows, images); to themselves infinite."""
    exact = values.double() - values.double().mean(0)  # so that a common offset cancels no digits
    squares = exact.square().sum(1)
    found = squares[rows, None] + squares - 2 * exact[rows] @ exact.T
    found[torch.arange(len(rows)), rows] = torch.inf
    return found
