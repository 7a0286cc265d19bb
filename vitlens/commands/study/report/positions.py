"""The section on position embeddings: their similarity, and how well it follows the distance of the patches."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.shared.position_order import DEFINITION, PAIRS, RANK_CORRELATION
from vitlens.commands.study.record import POINTS, POSITION_MAPS, POSITION_ORDER, DesignRow, PositionRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate, Side, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHOD: Final = (
    f"{DEFINITION} Learned embeddings: the mean over seeds with Student's 95 % interval over seeds; fixed ones are "
    "those of every seed. Pairs of patches are not independent, so a single model has no interval."
)
_CAPTION: Final = (
    "For each patch, at its place in the grid, the cosine similarity of its position embedding with those of all "
    "patches, after the training with the first seed. Each panel has its own colours, up to the greatest similarity of "
    "two different patches, as its bar says: compare patterns, not colours."
)


def position_section(record: Record, design: DesignRow) -> Iterator[Section]:
    """The similarity of position embeddings, where it was measured."""
    rows = record.rows(POSITION_ORDER)
    if rows:
        points = list({row.label: row for row in rows}.values())
        yield Section(
            "Similarity of position embeddings",
            (*(_sentence(record, row, rows) for row in points), *sentences(_METHOD, says="method")),
            (_table(record, points, rows),),
            (FigureSpec("position_similarity", _CAPTION, partial(_draw, record, design)),),
            "Do near patches have similar embeddings?",
            leading=True,
        )


def _sentence(record: Record, row: PositionRow, rows: Sequence[PositionRow]) -> Sentence:
    """What the number says of one point."""
    found = record.metric(RANK_CORRELATION(model=row.label, pairs="all"))
    before = _before(row, rows)
    if found.low is None:
        fixed = before is not None and abs(before - found.value) < 1e-9
        why = "fixed before training" if fixed else f"one seed; {_said(before)} before training"
        return Sentence(
            f"`{row.words}`: rank correlation {found.value:.2f} over all pairs ({why}).", (found, *_of(row, rows))
        )
    meaning = {
        Side.ABOVE: "nearer patches have more similar embeddings",
        Side.BELOW: "nearer patches have less similar embeddings",
        Side.UNDECIDED: "no order by distance is shown",
    }[beyond(found, 0.0)]
    return Sentence(
        f"`{row.words}`: {meaning}: rank correlation {in_words(found)} over all pairs, {_said(before)} before "
        "training.",
        (found, *_of(row, rows), Estimate(before or 0.0, unit="")),
    )


def _table(record: Record, points: Sequence[PositionRow], rows: Sequence[PositionRow]) -> Table:
    columns = {words: partial(_cell, record, pairs) for pairs, words in PAIRS.items()}
    return Table.of(
        "Rank correlation of similarity and nearness, by position embedding",
        points,
        {
            "position embeddings": lambda row: row.words,
            **columns,
            "all pairs, before training": lambda row: _before(row, rows),
            "seeds": lambda row: len(_of(row, rows)),
        },
    )


def _cell(record: Record, pairs: str, row: PositionRow) -> Estimate | None:
    return record.metrics.get(RANK_CORRELATION(model=row.label, pairs=pairs))


def _of(row: PositionRow, rows: Sequence[PositionRow]) -> list[PositionRow]:
    """The rows of one point, one a seed."""
    return [each for each in rows if each.label == row.label]


def _before(row: PositionRow, rows: Sequence[PositionRow]) -> float | None:
    """The rank correlation of all pairs before training, the mean over seeds."""
    known = [each.before for each in _of(row, rows) if each.before is not None]
    return sum(known) / len(known) if known else None


def _said(value: float | None) -> str:
    return "not defined" if value is None else number(value, 2)


def _draw(record: Record, design: DesignRow) -> "Figure":
    from vitlens.figures.positions import position_panels

    points, similarity = record.rows(POINTS), record.arrays(POSITION_MAPS).similarity
    grid = next(row.grid for index, row in enumerate(points) if index in similarity and row.grid is not None)
    return position_panels(
        similarities={points[index].words: values for index, values in similarity.items()},
        grid=grid,
        title=f"Similarity of each patch's position embedding with all others ({design.budget})",
    )
