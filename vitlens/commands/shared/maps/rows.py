"""The results of the checks of one method's maps, as rows; free of torch."""

from dataclasses import dataclass
from typing import Final

from vitlens.analysis.faithfulness.cascade import Cascade
from vitlens.uncertainty import Estimate

INSERTION, ROAD = "insertion − deletion", "ROAD score"  # scores by which methods are judged
BASELINES: Final = ("random", "centre")  # model-free maps, as analysis/faithfulness/league.py names them (tested)


@dataclass(frozen=True)
class Margin:
    """The score that judges a method minus that of another map, over the same images: the mean of the paired
    differences with its 95 % interval (None: too few images)."""

    against: str
    difference: float
    low: float | None = None
    high: float | None = None
    n: int = 0

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high, self.n, "")


@dataclass(frozen=True)
class MapCheck:
    """The checks of one method on one model.

    images: their number; unusable: those whose map is uniform or not finite; gap, low, high: mean insertion minus
    deletion with its interval; road: mean LeRF minus MoRF of ROAD (None: not run); margins: in the score that judges,
    against each baseline and the leader, the best method among those that pass the randomisation check (or of all,
    where none does); cascade: the randomisation check (None: not run, as maps are not finite); judged_by: ROAD where it
    was run, as no method chooses by it (`best` chooses by insertion on a blurred image).
    """

    model: str
    method: str
    images: int
    unusable: int
    gap: float
    low: float | None = None
    high: float | None = None
    road: float | None = None
    margins: tuple[Margin, ...] = ()
    cascade: Cascade | None = None
    road_low: float | None = None
    road_high: float | None = None
    judged_by: str = INSERTION

    @property
    def estimate(self) -> Estimate:
        """The score that judges, with its interval."""
        if self.judged_by == ROAD and self.road is not None:
            return Estimate(self.road, self.road_low, self.road_high, self.images, "")
        return Estimate(self.gap, self.low, self.high, self.images, "")

    def margin(self, against: str) -> Margin | None:
        """The difference from another map; None where it was not taken."""
        return next((margin for margin in self.margins if margin.against == against), None)
