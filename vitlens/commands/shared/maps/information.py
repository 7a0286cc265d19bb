"""What maps tell, as rows of commands: their information, fixed places and the pointing game; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from vitlens.record import col
from vitlens.report.claims import above
from vitlens.report.prose import say
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


@dataclass(frozen=True, kw_only=True)
class MapRow:
    """The maps of one method or layer, means over images, which a command's row adds to. maps: their name in metrics;
    pointing: how often a map's highest point lies on the object; of_baseline: the same of the best map that ignores
    the image; difference: paired over images. None where there are no masks, or too few images."""

    model: str = col("model")
    maps: str = col("name in metrics")
    information: Estimate = col(
        "information", term="log2 of the number of patches minus the entropy of the map: 0 bits are a uniform map"
    )
    by_place: Estimate | None = col(
        "the same in other images",
        term="the share of a map's information that the mean map of the other images explains",
        default=None,
    )
    pointing: Estimate | None = col(
        "highest point on the object", better="higher", metric="localisation/{model}/pointing/{maps}", default=None
    )
    baseline: str | None = col("best map that ignores the image", default=None)
    of_baseline: Estimate | None = col("of a map that ignores the image", default=None)
    difference: Estimate | None = col("difference", better="higher", default=None)


Row = TypeVar("Row", bound=MapRow)


def fixed_maps(rows: Sequence[Row]) -> list[Row]:
    """The rows whose maps hold information and are nearly the same for every image."""
    return [r for r in rows if above(r.by_place, FIXED, len(rows)) and (r.information.low or 0.0) >= UNIFORM]


@dataclass(frozen=True)
class MixedHeadsRow:
    """One attention module that mixes the weights over heads after the softmax (talking heads, CaiT)."""

    module: str


def mixed_heads_words(rows: Sequence[MixedHeadsRow]) -> str:
    """That the weights are those before the mixing."""
    return say(
        "In {{ n }} layer{{ n|s }} (talking heads) the attention weights are those before a linear map mixes them over "
        "heads: these are not the weights that multiply the values.",
        n=len(rows),
    )
