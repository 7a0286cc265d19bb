"""Which of two lines of points wins at each share of the data, by the paired tests of points at one place."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.study.record import DIFFERENCE, DIFFERENCES, POINTS, ComparisonRow
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL

MOST: Final = 100.0  # points: the largest difference of two accuracies


def share_sentences(record: Record) -> Iterator[Sentence]:
    """One sentence a share: which of the two to take, or that no difference is seen; for more than one seed."""
    yield from (_sentence(record, row) for row in record.rows(DIFFERENCES) if _at_one_place(record, row))


def _at_one_place(record: Record, row: ComparisonRow) -> bool:
    """Whether a comparison is of two lines at one place of the axis."""
    places = {point.label: point.place for point in record.rows(POINTS)}
    return places[row.label] is not None and places[row.label] == places[row.against]


def _sentence(record: Record, row: ComparisonRow) -> Sentence:
    points = {point.label: point for point in record.rows(POINTS)}
    own, other = points[row.label], points[row.against]
    gap = record.metric(DIFFERENCE(model=row.label, against=row.against))
    said = f"{own.words} minus {other.words} {in_words(gap, with_n=False)}"
    where = f"With {own.train_images:,} training images"
    if row.p_holm <= LEVEL:
        better = own if gap.value > 0 else other
        return Sentence(f"{where} take `{better.words}`: {said}.", (row, gap, own, other))
    cheaper = min((own, other), key=lambda point: (point.flops, point.parameters))
    seen = "" if row.detectable is None else f", which would have seen one of {in_points(row.detectable)} points"
    return Sentence(
        f"{where} no difference is seen by this study{seen}: {said}; the cheaper is `{cheaper.words}`.",
        (row, gap, own, other, MOST),
    )


def in_points(detectable: float) -> str:
    """The smallest difference that would have been seen; few seeds that differ would not see the largest there is."""
    return number(detectable, 1) if detectable < MOST else f"over {MOST:g}"
