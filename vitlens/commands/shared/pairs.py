"""The old names of `shared/comparison.py`, for `train` and `study` until they are moved; free of torch."""

from collections.abc import Sequence
from typing import Final

from vitlens.commands.shared.comparison import PairRow
from vitlens.records import TableOf
from vitlens.report.document import Table

__all__ = ["PAIRS", "PairRow", "pair_table"]

PAIRS: Final = TableOf("pairs", PairRow)


def pair_table(rows: Sequence[PairRow]) -> Table:
    """Every pair of models."""
    shown = ("first", "second", "both_right", "only_first_right", "only_second_right", "both_wrong", "p", "p_holm")
    cells = tuple(tuple(getattr(row, name) for name in shown) for row in rows)
    titles = tuple(name if name.startswith("p") else name.replace("_", " ") for name in shown)
    return Table("Images by which model is correct", titles, cells)
