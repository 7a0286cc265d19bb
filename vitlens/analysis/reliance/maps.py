"""Which attribution maps show a cue: do they lie more on the changed region where the change
decides the prediction?
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.failures.separation import separation
from vitlens.analysis.faithfulness.maps import enlarged
from vitlens.errors import InputError
from vitlens.shapes import Maps, Masks
from vitlens.uncertainty import Estimate, bootstrap_mean

FEWEST_DECIDED = 10  # images of either kind, below which nothing is said


@dataclass(frozen=True)
class CueMap:
    """Whether the maps of one method show where the evidence of a cue lies.

    decided, others: the mean share of a map's positive evidence in the region, on the images in
    which the cue decides the prediction and on the others; area: the probability that the share,
    minus that of a uniform map, is larger on an image in which it decides (0.5: the maps do not
    show it); p: that it is 0.5, None for too few images of either kind.
    """

    method: str
    decided: Estimate
    others: Estimate
    area: Estimate
    p: float | None


def judge_cue_maps(
    method: str,
    maps: Maps,
    regions: Masks,
    is_decided: Bool[Tensor, " images"],
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> CueMap:
    """Compare the share of evidence in a region between images in which a cue decides the
    prediction and the others.

    maps: (n, rows, columns); regions: (n, height, width), the pixels that the cue's intervention
    changes; is_decided (n,): whether the intervention changes the prediction and its control does
    not. Maps without positive evidence are left out. Raises InputError for fewer than 10 images of
    either kind.
    """
    shares = share_in_regions(maps, regions)
    has_evidence = shares.isfinite()
    kept_shares = shares[has_evidence].double().numpy()
    kept_decided = is_decided.cpu()[has_evidence].numpy()
    kept_groups = None if groups is None else groups.cpu()[has_evidence]
    smaller = int(min(kept_decided.sum(), (~kept_decided).sum()))
    if smaller < FEWEST_DECIDED:
        raise InputError(
            f"expected at least {FEWEST_DECIDED} images in which the cue decides the prediction "
            "and as many in which "
            f"it does not, found {smaller} of one kind; give more images"
        )
    # where the object is small, every map has more evidence around it, and the cue decides more
    # often
    sizes = regions.float().mean((1, 2)).cpu()[has_evidence].double().numpy()
    area, p = separation(kept_shares - sizes, kept_decided, groups=kept_groups, seed=seed)
    return CueMap(
        method,
        _mean_share(kept_shares, kept_decided, kept_groups, seed),
        _mean_share(kept_shares, ~kept_decided, kept_groups, seed),
        area,
        p,
    )


def share_in_regions(maps: Maps, regions: Masks) -> Float[Tensor, " images"]:
    """Return the share of each map's positive evidence in its region; NaN for a map without any."""
    height, width = regions.shape[-2:]
    evidence = enlarged(maps.float().cpu(), (height, width)).clamp_min(0)
    inside = (evidence * regions.cpu()).flatten(1).sum(1)
    total = evidence.flatten(1).sum(1)
    return (inside / total).where(total > 0, float("nan"))


def _mean_share(
    shares: NDArray[np.float64], chosen: NDArray[np.bool_], groups: Tensor | None, seed: int
) -> Estimate:
    chosen_groups = None if groups is None else groups.numpy()[chosen]
    return bootstrap_mean(shares[chosen], groups=chosen_groups, seed=seed)
