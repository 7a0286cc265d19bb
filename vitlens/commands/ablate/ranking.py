"""Which units may be ranked by importance, and which are the most important ones."""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import AGREEMENT, FIRST_ORDER, UNITS
from vitlens.commands.ablate.record.rows import ReplacementAgreementRow, UnitRow
from vitlens.names import Replacement, UnitKind
from vitlens.records import Record

REPLACED: Final[dict[Replacement, str]] = {
    "mean": "its mean over the data",
    "zero": "zero",
    "resample": "its output on another image",
}


class Ranking(Enum):
    """Whether units may be ranked by importance.

    SHOWN: at least one has a significant effect after Holm's correction; NO_EFFECT: none has; UNTESTED: no test is
    defined, as there are fewer than two images (or groups of them).
    """

    SHOWN = "shown"
    NO_EFFECT = "no effect"
    UNTESTED = "untested"


def main_replacement(record: Record) -> Replacement:
    """The replacement of figures and metrics: the first."""
    return record.options(AblateOptions).replace[0]


def main_rows(record: Record) -> tuple[UnitRow, ...]:
    """The units with the main replacement."""
    return rows_of(record, main_replacement(record))


def rows_of(record: Record, replacement: str) -> tuple[UnitRow, ...]:
    """The units with one replacement."""
    return tuple(row for row in record.rows(UNITS) if row.replace == replacement)


def heads_of(rows: Iterable[UnitRow]) -> list[UnitRow]:
    """The units that are heads."""
    return [row for row in rows if row.kind == "head"]


def ranking_of(rows: Sequence[UnitRow]) -> Ranking:
    """Whether these units (of one kind, with one replacement) may be ranked; NO_EFFECT for no units at all."""
    if any(row.p_holm is None for row in rows):
        return Ranking.UNTESTED
    return Ranking.SHOWN if any(row.matters for row in rows) else Ranking.NO_EFFECT


def ranked_rows(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """The units of the kinds (head, MLP, block) that may be ranked."""
    kinds = dict.fromkeys(row.kind for row in rows)
    shown = [kind for kind in kinds if ranking_of([row for row in rows if row.kind == kind]) is Ranking.SHOWN]
    return [row for row in rows if row.kind in shown]


def most_harmful_to_remove(rows: Sequence[UnitRow], kind: UnitKind) -> list[UnitRow]:
    """The units of a kind whose removal significantly raises the loss, the greatest rise first."""
    harmful = [row for row in rows if row.kind == kind and row.matters and row.delta_loss > 0]
    return sorted(harmful, key=lambda row: -row.delta_loss)


def agreement_of_shown_rankings(record: Record) -> list[ReplacementAgreementRow]:
    """The agreement of the rankings that are shown; the first-order ranking is shown where the exact one is."""
    heads = heads_of(record.rows(UNITS))
    names = dict.fromkeys(row.replace for row in heads)
    shown: set[str] = {
        name for name in names if ranking_of([row for row in heads if row.replace == name]) is Ranking.SHOWN
    }
    if main_replacement(record) in shown:
        shown.add(FIRST_ORDER)
    return [row for row in record.rows(AGREEMENT) if {row.first, row.second} <= shown]
