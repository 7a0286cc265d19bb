"""The section of one head's N x N scores and weights."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from vitlens.commands.attention.record import MATRIX, MATRIX_ARRAYS, MatrixArrays, MatrixRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def matrix_section(record: Record) -> Iterator[Section]:
    """Scores and weights of the head that was asked for, if one was."""
    for row in record.rows(MATRIX):
        yield _section(record, row)


def _section(record: Record, row: MatrixRow) -> Section:
    text = (
        f"In {row.name} a token attends to itself with {percent(row.itself, 1)} on average; token {row.most} receives "
        f"most attention, {percent(row.received, 1)} of each row on average. The scores of all "
        f"{row.tokens}×{row.tokens} pairs have a standard deviation of {number(row.deviation)}."
    )
    figure = FigureSpec(
        "matrix",
        f"All scores and weights of {row.name} on the first image: one row a query, one column a key. A bright column "
        "is a token to which all attend, a bright diagonal tokens that attend to themselves, stripes beside it "
        "neighbours.",
        partial(_draw, row, record.arrays(MATRIX_ARRAYS)),
    )
    return Section(f"All pairs of tokens in {row.name}", (Sentence(text, (row,)),), (), (figure,), leading=True)


def _draw(row: MatrixRow, arrays: MatrixArrays) -> "Figure":
    from vitlens.figures.walkthrough.matrices import head_matrices

    title = f"{row.name}: scores and weights of all {row.tokens}×{row.tokens} pairs of tokens"
    return head_matrices(scores=arrays.scores, weights=arrays.weights, prefix=row.prefix, title=title)
