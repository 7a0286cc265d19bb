"""The record of `--auto`: the method chosen for each model, and what it was chosen by. Empty without --auto.

Intervals of the scores are in the metrics, by the names below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.names import Substrate
from vitlens.records import Contents, MetricName, TableOf
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ChoiceRow:
    """The method chosen for one model. reason: why it is the default and not chosen by evidence, else empty; checks:
    what decided; left_out: checks that judged nothing, with the reason; localised: where localisation was scored,
    "objects" or a kind of composites; certainty: share of the bootstrap draws of the selection half in which it wins;
    alike: candidates with the same maps; confirmation: what the report half says of it and the runner-up; selection,
    report: images in each half; seed: of the halves; substrate: what replaced removed patches."""

    model: str
    method: str
    reason: str
    candidates: tuple[str, ...]
    checks: tuple[str, ...]
    left_out: Mapping[str, str]
    localised: str
    certainty: float | None
    draws: int
    runner_up: str | None
    alike: tuple[str, ...]
    confirmation: Literal["confirmed", "not confirmed", "contradicted"] | None
    selection: int
    report: int
    seed: int
    substrate: Substrate = SUBSTRATE


@dataclass(frozen=True)
class ChoiceScoreRow:
    """One candidate, or baseline: its mean in each check and its score by half; wins: share of the bootstrap draws of
    the selection half in which no candidate scores higher, None for a baseline."""

    model: str
    method: str
    baseline: bool
    selection: Mapping[str, float]
    report: Mapping[str, float]
    wins: float | None


@dataclass(frozen=True)
class ChoiceMarginRow:
    """The chosen method minus another one on the report half: the mean paired difference in a check, or of the score,
    with its interval."""

    model: str
    against: str
    check: str
    difference: Estimate


CHOICE = TableOf("chosen_methods", ChoiceRow, optional=True)
CHOICE_SCORES = TableOf("choice_scores", ChoiceScoreRow, optional=True)
CHOICE_MARGINS = TableOf("choice_margins", ChoiceMarginRow, optional=True)

CERTAINTY = MetricName("choice/{model}/certainty")  # share of draws; n: images of the selection half
# half: selection, report; check: also "score"
CHOICE_SCORE = MetricName("choice/{model}/{half}/{check}/{method}")

CHOICES: Final = Contents(metrics=(CERTAINTY, CHOICE_SCORE), tables=(CHOICE, CHOICE_SCORES, CHOICE_MARGINS), arrays=())
