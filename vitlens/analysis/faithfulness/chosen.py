"""The scores behind the choice of a method, as rows; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.record import col
from vitlens.uncertainty import Estimate


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """One candidate, or baseline: its mean in each check and its score by half; wins: share of the bootstrap draws of
    the selection half in which no candidate scores higher, None for a baseline."""

    model: str = col("model", default="")
    method: str = col("method")
    baseline: bool = col("baseline")
    selection: Mapping[str, Estimate] = col("selection half", metric="choice/{model}/selection/{key}/{method}")
    report: Mapping[str, Estimate] = col("other half", metric="choice/{model}/report/{key}/{method}")
    wins: float | None = col("wins", unit="fraction", default=None)


@dataclass(frozen=True, kw_only=True)
class ChoiceMargin:
    """The chosen method minus another one on the report half: the mean paired difference in a check or of the score."""

    model: str = col("model", default="")
    against: str = col("method")
    check: str = col("check")
    difference: Estimate = col("chosen minus this")
