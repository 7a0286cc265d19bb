"""Which small changes of an image a map must follow, and the rule by which it jumps; free of torch.

A shift by less than a pixel or by one leaves the evidence where it is, so the map of the shifted image must be the
shifted map. A flip is a change that many models, and most photographs, are indifferent to: it is shown, not judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from vitlens.analysis.faithfulness.cascade import ENOUGH, SIMILAR
from vitlens.uncertainty import Estimate

FAR: Final = 1 / 8  # of a side: a top point that moves further has jumped
JUMPY: Final = 0.25  # share of the images whose top point jumps, above which a method's maps jump
STEADY_IMAGES: Final = 16  # images of the check, which needs a map of each for every change

SteadyState = Literal["steady", "jumps", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One change of an image: title: in reports; shift: px, right and down, by bilinear interpolation; flip: whether
    left and right are exchanged; judged: whether a map that does not follow it is flagged."""

    name: str
    title: str
    shift: float = 0.0
    flip: bool = False
    judged: bool = True


_ENTRIES: Final = (
    Disturbance(name="shift-quarter", title="shift by 1/4 px", shift=0.25),
    Disturbance(name="shift-half", title="shift by 1/2 px", shift=0.5),
    Disturbance(name="shift-one", title="shift by 1 px", shift=1.0),
    Disturbance(name="flip", title="flip", flip=True, judged=False),
)

DISTURBANCES: Final[Mapping[str, Disturbance]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def judged_steadiness(correlation: Estimate | None, jumped: Estimate | None) -> SteadyState:
    """Whether a method's maps jump, by the mean rank correlation of its maps with the moved ones over the shifts and by
    the share of images whose top point jumps (None: no image has a usable map).

    They jump where the interval of the share lies above JUMPY, or that of the correlation below SIMILAR; they are
    steady where neither can be, and it is inconclusive between the two or with fewer than ENOUGH images.
    """
    if correlation is None or jumped is None or (jumped.n or 0) < ENOUGH:
        return "inconclusive"
    ends = (correlation.low, correlation.high, jumped.low, jumped.high)
    low, high, fewest, most = (0.0 if end is None else end for end in ends)
    if None in ends:
        return "inconclusive"
    if fewest > JUMPY or high < SIMILAR:
        return "jumps"
    return "steady" if most <= JUMPY and low >= SIMILAR else "inconclusive"
