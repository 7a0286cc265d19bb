"""The record of `vitlens audit`: its chapters, how the attack was chosen, and what was not tested."""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from vitlens.commands.run.chapters.record import CHAPTERS, METRICS
from vitlens.records import Contents, TableOf

Part: TypeAlias = Literal["evaluate", "explain", "attack", "corruptions", "stats"]
CandidateState: TypeAlias = Literal["chosen", "weaker", "too long", "undefined"]
CORRUPTIONS_PART: Final = "corruptions"  # of the two attack chapters, the one of corruptions and FGSM on all images


@dataclass(frozen=True)
class CandidateRow:
    """One way to attack the model, the strongest first.

    attacks: names of the registry; epsilons: in 1/255; images: attacked; minutes: that it may take here at most, None
    where an attack is not defined for the model; state: the chosen one, one that is weaker than it, one that takes
    longer than what is left, or one that is not defined for a model of so few classes.
    """

    attacks: tuple[str, ...]
    restarts: int
    epsilons: tuple[float, ...]
    images: int
    minutes: float | None
    state: CandidateState


@dataclass(frozen=True)
class BudgetRow:
    """The minutes of --budget, those that the other chapters took when they were made, and those left for the attack
    (a share of the budget is kept for it); pass_seconds: of one forward pass of one image, read from FGSM on all."""

    minutes: float
    others: float
    left: float
    pass_seconds: float


@dataclass(frozen=True)
class UntestedRow:
    """A chapter that was not run, and why."""

    part: Part
    reason: str


CANDIDATES = TableOf("attacks_considered", CandidateRow)
BUDGET = TableOf("budget", BudgetRow)
UNTESTED = TableOf("untested", UntestedRow)

TABLES: Final[tuple[TableOf[Any], ...]] = (
    CHAPTERS, CANDIDATES, BUDGET, UNTESTED,
)  # fmt: skip
RECORD = Contents(metrics=METRICS, tables=TABLES)
