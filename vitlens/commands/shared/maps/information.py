"""How much maps tell: their information and how much of it fixed places explain, as rows."""

from dataclasses import dataclass
from typing import Final

from vitlens.record import col
from vitlens.uncertainty import Estimate

UNIFORM: Final = 0.5  # bits, below which a map is uniform; as the label of heads
FIXED: Final = 0.75  # of a map's information: beyond it, what the image itself decides is a small rest


@dataclass(frozen=True)
class InformationRow:
    """The maps of one method or layer, means over images. information: of a map relative to a uniform one; by_place:
    the share of it that the mean of the other images' maps explains, None for few images."""

    maps: str = col("maps")
    information: Estimate = col("information", term="how far a map is from a uniform one, in bits")
    by_place: Estimate | None = col("the same in other images", default=None)
