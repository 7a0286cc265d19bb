"""What is wrong with a map before anyone reads it: a value that is no number, or the same value everywhere."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.shapes import Maps

_EVEN = 1e-6  # spread beside the largest value, below which a map counts as constant


@dataclass(frozen=True)
class MapFaults:
    """Which images' maps say nothing: not_finite, constant (batch,)."""

    not_finite: Bool[Tensor, " batch"]
    constant: Bool[Tensor, " batch"]

    @property
    def sound(self) -> Bool[Tensor, " batch"]:
        """The maps that can be ranked."""
        return ~(self.not_finite | self.constant)

    @property
    def words(self) -> str:
        """ "2 of 56 maps are not finite, 1 is constant"; empty where nothing is wrong."""
        total, broken, even = len(self.constant), int(self.not_finite.sum()), int(self.constant.sum())
        said = [f"{count} of {total} {kind}" for count, kind in ((broken, "not finite"), (even, "constant")) if count]
        return ", ".join(said)


def map_faults(maps: Maps) -> MapFaults:
    """Which maps are not finite, and which are constant: their values differ by less than a millionth of the largest.

    An all-zero map is constant. A map that is not finite is not called constant.
    """
    flat = maps.flatten(1).double()
    broken = ~flat.isfinite().all(1)
    known = torch.where(broken[:, None], 0.0, flat)
    even = known.amax(1) - known.amin(1) <= _EVEN * known.abs().amax(1)
    return MapFaults(broken, even & ~broken)
