"""The report of --top K: the most important heads, found by sequential elimination."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitlens.commands.ablate.record import ELIMINATION, FORWARDS
from vitlens.commands.ablate.record.rows import EliminationRow
from vitlens.commands.ablate.report.ranking import REPLACED, main_replacement
from vitlens.commands.ablate.report.summary import notes, what_was_done
from vitlens.commands.ablate.report.units import RISE
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def top_heads(record: Record) -> Section:
    """Which heads are certain to be among the most important ones, and what finding them took."""
    rows = record.rows(ELIMINATION)
    top = [row for row in rows if row.top]
    certain = [row.label for row in top if row.settled]
    undecided = [row.label for row in rows if not row.settled]
    spent, exact = (record.metric(FORWARDS(model=record.aliases[0], what=what)).value for what in ("adaptive", "exact"))
    said = [
        *what_was_done(record),
        Sentence(
            f"Certain to be among the {len(top)} most important heads (output replaced by "
            f"{REPLACED[main_replacement(record)]}): "
            f"{', '.join(certain) if certain else 'none; heads are not ranked'}.",
            tuple(top),
        ),
        Sentence(
            f"It took {spent:.1f} forward passes an image, {100 * spent / exact:.0f} % of the {exact:.1f} that "
            "measuring every head on every image would have taken."
        ),
    ]
    if undecided:
        said.append(Sentence(f"Not told apart at the boundary, with overlapping intervals: {', '.join(undecided)}."))
    figure = FigureSpec(
        "ranking",
        "Coloured: the heads asked for. Intervals hold for all heads and rounds at once; wide ones belong to heads "
        "that were left out early, on few images.",
        partial(_ranking, rows),
    )
    return Section(
        "What was found",
        (*said, *notes(record)),
        (_table(rows, ranked=bool(certain)),),
        (figure,) if certain else (),
        leading=True,
    )


def _table(rows: Sequence[EliminationRow], *, ranked: bool) -> Table:
    """By rank; by layer and head, without ranks, where no head is certain to be among the top."""
    ordered = rows if ranked else sorted(rows, key=lambda row: (row.layer, row.head or 0))
    cells: list[tuple[Cell, ...]] = [
        (*((row.rank,) if ranked else ()), row.label, row.loss, "yes" if row.settled else "no") for row in ordered
    ]
    columns = (*(("rank",) if ranked else ()), "head", RISE, "settled")
    return Table("Every head, as far as it was measured", columns, tuple(cells))


def _ranking(rows: Sequence[EliminationRow]) -> "Figure":
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
