"""Models compared in pairs on the same images, as rows and as a report's table; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.records import TableOf
from vitlens.report.document import Table


@dataclass(frozen=True)
class PairRow:
    """Two models on the same images: how many both, one alone, or none predicts correctly.

    p: McNemar's exact test of equal accuracy; p_holm: corrected for the number of pairs.
    """

    first: str
    second: str
    both_right: int
    only_first_right: int
    only_second_right: int
    both_wrong: int
    p: float
    p_holm: float


PAIRS: Final = TableOf("pairs", PairRow)


def pair_table(rows: Sequence[PairRow]) -> Table:
    """Every pair of models."""
    return Table.of(
        "Images by which model is correct",
        rows,
        {
            "first": lambda row: row.first,
            "second": lambda row: row.second,
            "both right": lambda row: row.both_right,
            "only first right": lambda row: row.only_first_right,
            "only second right": lambda row: row.only_second_right,
            "both wrong": lambda row: row.both_wrong,
            "p": lambda row: row.p,
            "p_holm": lambda row: row.p_holm,
        },
    )
