"""The rows of `vitlens features` on single patches."""

from dataclasses import dataclass
from typing import Literal

from vitlens.records import UntrustedName
from vitlens.uncertainty import Estimate

PatchesShare = Literal["position", "class", "object"]  # what nearest patches share: see PatchNeighboursRow


@dataclass(frozen=True)
class PatchNeighboursRow:
    """What the nearest patches of other images share with a patch of one layer (None: the embedding), for a sample.

    share: "position" is the share of neighbours at the same place of their image (within an eighth of its side),
    "class" of those whose image is of the same class, "object" the intersection over union of the patches on the object
    with those for which neighbours vote; chance: the same for patches drawn at random ("object": for all patches);
    neighbours: of each patch; grid: rows and columns.
    """

    model: str
    layer: int | None
    title: str
    share: PatchesShare
    value: float
    low: float | None
    high: float | None
    chance: float
    patches: int
    images: int
    neighbours: int
    grid: tuple[int, int]

    @property
    def estimate(self) -> Estimate:
        """The share with its interval; n: patches."""
        return Estimate(self.value, self.low, self.high, self.patches)


@dataclass(frozen=True)
class PatchColoursRow:
    """The colours of one model's patches. grid: rows and columns; explained: shares of the variance of the three
    principal components."""

    model: str
    grid: tuple[int, int]
    explained: tuple[float, ...]


@dataclass(frozen=True)
class MatchesRow:
    """Two images whose patches were matched. matches: the number of pairs of patches that are each other's best
    match."""

    model: str
    first: UntrustedName
    second: UntrustedName
    grid: tuple[int, int]
    matches: int
