"""What the record of a transfer study says, by name: the one place where its report reads differences and states."""

from dataclasses import dataclass
from typing import Literal

from vitlens.commands.study.record import ACCURACY, DIFFERENCE, DIFFERENCES, ComparisonRow
from vitlens.commands.study.transfer.record import (
    REGIME_ROWS,
    SHARE_GAPS,
    SHARE_ROWS,
    TRANSFER,
    RegimeRow,
    ShareGapRow,
    ShareRow,
    TransferRow,
)
from vitlens.commands.study.transfer.regimes import MARGIN, WORDS, Regime
from vitlens.records import Record
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

CatchUp = Literal["caught up", "behind", "not decided"]


@dataclass(frozen=True)
class Gap:
    """A paired difference of accuracy, first minus second, points; its row holds the corrected p."""

    first: str
    second: str
    estimate: Estimate
    row: ComparisonRow

    @property
    def side(self) -> Side:
        """Whether it is significantly above or below 0 after Holm's correction."""
        return beyond_zero(self.estimate, self.row.p_holm)

    @property
    def rows(self) -> tuple[object, ...]:
        """What backs a sentence about it."""
        return (self.estimate, self.row)


@dataclass(frozen=True)
class TransferFacts:
    """The record, with its design."""

    record: Record
    design: TransferRow

    @classmethod
    def of(cls, record: Record) -> "TransferFacts":
        """Of a finished record."""
        (design,) = record.rows(TRANSFER)
        return cls(record, design)

    def gap(self, first: Regime, second: Regime) -> Gap:
        """The difference of two regimes that was tested."""
        name = (first.label, second.label)
        row = next(row for row in self.record.rows(DIFFERENCES) if (row.label, row.against) == name)
        return Gap(*name, self.record.metric(DIFFERENCE(model=name[0], against=name[1])), row)

    def accuracy(self, label: str) -> Estimate:
        """A regime's accuracy over seeds and test images."""
        return self.record.metric(ACCURACY(model=label))

    def regime(self, regime: Regime) -> RegimeRow:
        """A regime's row."""
        return next(row for row in self.record.rows(REGIME_ROWS) if row.label == regime.label)

    def shares(self, regime: Regime) -> list[ShareRow]:
        """A regime's accuracies by share, from the fewest images."""
        return [row for row in self.record.rows(SHARE_ROWS) if row.label == regime.label]

    def share_gaps(self, regime: Regime) -> list[ShareGapRow]:
        """How much better a regime is than training from scratch, from the fewest images."""
        return [row for row in self.record.rows(SHARE_GAPS) if row.label == regime.label]


def beyond_zero(estimate: Estimate, p_holm: float) -> Side:
    """The side of 0 on which a difference lies significantly."""
    if p_holm > LEVEL or not estimate.value:
        return Side.UNDECIDED
    return Side.ABOVE if estimate.value > 0 else Side.BELOW


def share_estimate(row: ShareGapRow) -> Estimate:
    """The gap of a share with its interval, points."""
    return Estimate(row.gap, row.low, row.high, unit="points")


def state_of(row: ShareGapRow) -> CatchUp:
    """Whether training from scratch has caught up at a share: at most MARGIN points behind, by the interval's end."""
    if row.high is not None and row.high <= MARGIN:
        return "caught up"
    return "behind" if beyond(share_estimate(row), 0.0) is Side.ABOVE else "not decided"


def caught_up_at(rows: list[ShareGapRow]) -> ShareGapRow | None:
    """The smallest share from which on training from scratch has caught up at every share; None: not reached."""
    found = None
    for row in reversed(rows):
        if state_of(row) != "caught up":
            break
        found = row
    return found


def words(label: str) -> str:
    """A regime's name in sentences."""
    return WORDS.get(label, label)
