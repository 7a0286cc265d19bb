"""Agreement of two maps of each image: rank correlation, overlap of the top places, intersection over union."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.faithfulness.resampled import AnyMaps, on_grid
from vitlens.errors import InputError

TOP = 0.1  # share of the places that are the top
PerImage = Float[Tensor, " batch"]


def spearman(first: AnyMaps, second: AnyMaps) -> PerImage:
    """The rank correlation of two maps of each image, -1 to 1; NaN where one of them is constant.

    Maps of different resolutions are compared at the coarser one along each axis. Ties have their mean rank.
    """
    from scipy import stats  # takes half a second to import

    resampled = _on_one_grid(first, second)
    ranks = [stats.rankdata(maps.flatten(1).double().cpu().numpy(), axis=1) for maps in resampled]
    centred = [rank - rank.mean(1, keepdims=True) for rank in ranks]
    norms = [np.sqrt((rank**2).sum(1)) for rank in centred]
    product = norms[0] * norms[1]
    covariance = (centred[0] * centred[1]).sum(1)
    return torch.from_numpy(
        np.divide(covariance, product, out=np.full(len(product), np.nan), where=product > 0)
    ).float()


def top_overlap(first: AnyMaps, second: AnyMaps, *, share: float = TOP) -> PerImage:
    """The share of the top places of one map that are among those of the other; chance is `share`.

    Of equal values at the threshold, the first in reading order are taken.
    """
    if not 0 < share <= 1:
        raise InputError(f"expected a share above 0 and at most 1, found {share}")
    flat = [maps.flatten(1) for maps in _on_one_grid(first, second)]
    count = max(1, round(share * flat[0].shape[1]))
    marked = [_top(maps, count) for maps in flat]
    return (marked[0] & marked[1]).sum(1).float() / count


def map_iou(first: AnyMaps, second: AnyMaps) -> PerImage:
    """Intersection over union of the places above each map's own mean; NaN where there are none in either."""
    above, other = (maps.flatten(1) > maps.flatten(1).mean(1, keepdim=True) for maps in _on_one_grid(first, second))
    return (above & other).sum(1).float() / (above | other).sum(1).float()


def _top(maps: Float[Tensor, "batch places"], count: int) -> Tensor:
    order = maps.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(maps, dtype=torch.bool).scatter_(1, order, torch.ones_like(order, dtype=torch.bool))


def _on_one_grid(first: AnyMaps, second: AnyMaps) -> tuple[AnyMaps, AnyMaps]:
    if len(first) != len(second):
        raise InputError(f"expected maps of the same images, found {len(first)} and {len(second)}")
    grid = min(first.shape[1], second.shape[1]), min(first.shape[2], second.shape[2])
    return on_grid(first.float(), grid), on_grid(second.float(), grid)
