"""Models compared in pairs on the same images, as rows and as a report's table; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.record import col
from vitlens.records import TableOf
from vitlens.report.document import Table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class PairRow:
    """Two models on the same images: how many both, one alone, or none predicts correctly.

    p: McNemar's exact test of equal accuracy; p_holm: corrected for the number of pairs; difference: of their accuracy,
    None where a command records it elsewhere.
    """

    first: str = col("first")
    second: str = col("second")
    both_right: int = col("both correct")
    only_first_right: int = col("only the first correct")
    only_second_right: int = col("only the second correct")
    both_wrong: int = col("both wrong")
    p: float = col("p")
    p_holm: float = col("p (Holm)")
    difference: Estimate | None = col("first minus second", metric="accuracy_difference/{first}/{second}", default=None)


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
