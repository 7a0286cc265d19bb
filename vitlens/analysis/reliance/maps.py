"""Find the attribution methods that show if a cue decides a prediction.

A cue is changed in a region of each image. Maps of such a method have more evidence in this region
if the change decides the prediction of the image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.failures.separation import separation
from vitlens.analysis.faithfulness.maps import enlarge_maps
from vitlens.analysis.reliance.measure import ChangedImages
from vitlens.analysis.reliance.rows import CueMapRow
from vitlens.shapes import Maps, Masks
from vitlens.uncertainty import Estimate, bootstrap_mean, holm

FEWEST_DECIDED = 10  # a method needs so many decided images, and as many others


def judge_cue_maps(
    maps: Mapping[str, Maps],
    data: ChangedImages,
    is_decided: Bool[Tensor, " images"],
    *,
    seed: int = 0,
) -> tuple[CueMapRow, ...]:
    """Compare the evidence in a cue's region on images that the cue decides and on the others.

    Maps without positive evidence are left out, and so are methods with fewer than 10 images of
    either kind.

    maps: the maps (n, rows, columns) of each method by name.
    is_decided (n,): True if the intervention changes the prediction and its control does not.
    """
    rows = list[CueMapRow]()
    p_values = list[float]()
    for method, method_maps in maps.items():
        shares = _EvidenceShares.of(method_maps, data, is_decided, seed)
        if shares.smaller_kind < FEWEST_DECIDED:
            continue
        area, p = shares.area_under_roc()
        p_values.append(1.0 if p is None else p)
        rows.append(
            CueMapRow(
                model=data.model,
                cue=data.cue,
                intervention=data.intervention,
                method=method,
                decided=shares.mean(shares.is_decided),
                others=shares.mean(~shares.is_decided),
                area=area,
            )
        )
    corrected = holm(p_values)
    return tuple(replace(row, p_holm=p) for row, p in zip(rows, corrected, strict=True))


@dataclass(frozen=True)
class _EvidenceShares:
    """The share of evidence in the region of a cue, on the images (n,) with any evidence.

    shares: the share of each map's evidence in the region.
    region_sizes: the share of the image in the region, as a uniform map would have there.
    is_decided: True for images that the cue decides.
    groups: the group of each image, None if images are independent.
    seed: the seed of intervals and tests.
    """

    shares: NDArray[np.float64]
    region_sizes: NDArray[np.float64]
    is_decided: NDArray[np.bool_]
    groups: Tensor | None
    seed: int

    @classmethod
    def of(
        cls, maps: Maps, data: ChangedImages, is_decided: Bool[Tensor, " images"], seed: int
    ) -> "_EvidenceShares":
        """Return the shares of the maps of one method."""
        shares = share_in_regions(maps, data.region)
        has_evidence = shares.isfinite()
        region_sizes = data.region.float().mean((1, 2)).cpu()
        return cls(
            shares=shares[has_evidence].double().numpy(),
            region_sizes=region_sizes[has_evidence].double().numpy(),
            is_decided=is_decided.cpu()[has_evidence].numpy(),
            groups=None if data.groups is None else data.groups.cpu()[has_evidence],
            seed=seed,
        )

    @property
    def smaller_kind(self) -> int:
        """Return the number of decided images or of the others, whichever is smaller."""
        return int(min(self.is_decided.sum(), (~self.is_decided).sum()))

    def area_under_roc(self) -> tuple[Estimate, float | None]:
        """Return the AUC of the shares for decided images, and its p-value.

        The share of a uniform map is subtracted. If the object is small, every map has more
        evidence around it, and the cue decides more often.
        """
        return separation(
            self.shares - self.region_sizes, self.is_decided, groups=self.groups, seed=self.seed
        )

    def mean(self, chosen: NDArray[np.bool_]) -> Estimate:
        """Return the mean share on some images."""
        groups = None if self.groups is None else self.groups.numpy()[chosen]
        return bootstrap_mean(
            self.shares[chosen], groups=groups, seed=self.seed, least=0.0, most=1.0
        )


def share_in_regions(maps: Maps, regions: Masks) -> Float[Tensor, " images"]:
    """Return the share of each map's positive evidence in its region; NaN for a map without any."""
    height, width = regions.shape[-2:]
    evidence = enlarge_maps(maps.float().cpu(), (height, width)).clamp_min(0)
    inside = (evidence * regions.cpu()).flatten(1).sum(1)
    total = evidence.flatten(1).sum(1)
    return (inside / total).where(total > 0, float("nan"))
