"""The report of `vitlens ablate`, from its record."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitlens.commands.ablate.conclusions import findings, verdicts
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.ranking import REPLACED, main_replacement
from vitlens.commands.ablate.record import ELIMINATION, FORWARDS
from vitlens.commands.ablate.record.rows import EliminationRow
from vitlens.commands.ablate.report.inside import inside, pruned
from vitlens.commands.ablate.report.limits import limits
from vitlens.commands.ablate.report.removal import pairs, removal
from vitlens.commands.ablate.report.summary import input_sentences, notes, summary
from vitlens.commands.ablate.report.units import RISE, all_units
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table
from vitlens.report.findings import ranked
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]


def report(record: Record) -> Document:
    """Summary, all units, heads removed in order and in pairs, patching and contributions, pruning."""
    if record.options(AblateOptions).top is not None:
        return Document(
            record.config.title,
            (_top_heads(record),),
            limits=tuple(limits(record)),
            verdicts=tuple(verdicts(record)),
            preface=tuple(input_sentences(record)),
        )
    sections = (
        summary(record),
        all_units(record),
        *removal(record),
        *pairs(record),
        *inside(record),
        *pruned(record),
    )
    return Document(
        record.config.title,
        sections,
        limits=tuple(limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=tuple(input_sentences(record)),
    )


def _top_heads(record: Record) -> Section:
    """The heads that are shown to be among the most important ones, and the cost of finding them."""
    rows = record.rows(ELIMINATION)
    top = [row for row in rows if row.top]
    settled = [row.label for row in top if row.settled]
    undecided = [row.label for row in rows if not row.settled]
    cost, exact = (
        record.metric(FORWARDS(model=record.aliases[0], what=method)).value for method in ("adaptive", "exact")
    )
    lines = [
        Sentence(
            f"Shown to be among the {len(top)} most important heads (output replaced by "
            f"{REPLACED[main_replacement(record)]}): "
            f"{', '.join(settled) if settled else 'none; heads are not ranked'}.",
            tuple(top),
        ),
        Sentence(
            f"This took {cost:.1f} forward passes per image, {100 * cost / exact:.0f} % of the {exact:.1f} of "
            "measuring every head on every image.",
            (Estimate(cost), Estimate(exact), Estimate(cost / exact)),
        ),
    ]
    if undecided:
        lines.append(Sentence(f"Undecided, as their intervals overlap the boundary: {', '.join(undecided)}.", rows))
    figure = FigureSpec(
        "ranking",
        "Coloured: the top heads. Intervals hold for all heads and rounds simultaneously; they are wide for heads that "
        "were eliminated early, on few images.",
        partial(_draw_top, rows),
    )
    return Section(
        "Summary",
        (*lines, *notes(record)),
        (_top_table(rows, ranked=bool(settled)),),
        (figure,) if settled else (),
        leading=True,
    )


def _top_table(rows: Sequence[EliminationRow], *, ranked: bool) -> Table:
    """By rank; by layer and head, without ranks, where no head is shown to be among the top."""
    ordered = rows if ranked else sorted(rows, key=lambda row: (row.layer, row.head or 0))
    cells: list[tuple[Cell, ...]] = [
        (*((row.rank,) if ranked else ()), row.label, row.loss, "yes" if row.settled else "no") for row in ordered
    ]
    columns = (*(("rank",) if ranked else ()), "head", RISE, "settled")
    return Table("All heads, as far as they were measured", columns, tuple(cells))


def _draw_top(rows: Sequence[EliminationRow]) -> "Figure":
    from vitlens.figures.ablate.importance import importance_ranking

    return importance_ranking(
        names=[row.label for row in rows],
        values=[row.delta_loss for row in rows],
        low=np.array([row.low for row in rows], dtype=np.float64),
        high=np.array([row.high for row in rows], dtype=np.float64),
        matters=[row.top for row in rows],
        unit=RISE,
        title="The most important heads, found by elimination (layers and heads from 0)",
    )
