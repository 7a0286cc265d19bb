"""Rows of an ablation's folder, as figures and words read them."""

from collections.abc import Mapping, Sequence
from enum import Enum
from math import ceil, log2
from typing import Any

import numpy as np

from vitlens.files import RunRecord

Row = Mapping[str, Any]

LEVEL = 0.05  # of the tests, after Holm's correction


class Ranking(Enum):
    """Whether units may be put in an order of importance.

    SHOWN: at least one has an effect after Holm's correction; NO_EFFECT: none has; UNTESTED: no test is defined, as
    there are fewer than two images (or groups of them).
    """

    SHOWN = "shown"
    NO_EFFECT = "no effect"
    UNTESTED = "untested"


def ranking_of(rows: Sequence[Row]) -> Ranking:
    """Whether these units (rows of the table of one replacement) may be ranked; NO_EFFECT for no units at all."""
    if any(row["p_holm"] is None for row in rows):
        return Ranking.UNTESTED
    return Ranking.SHOWN if any(row["matters"] for row in rows) else Ranking.NO_EFFECT


def ranked_rows(rows: Sequence[Row]) -> list[Row]:
    """The units of the kinds (head, MLP, block) that may be ranked."""
    kinds = dict.fromkeys(str(row["kind"]) for row in rows)
    shown = [kind for kind in kinds if ranking_of([row for row in rows if row["kind"] == kind]) is Ranking.SHOWN]
    return [row for row in rows if row["kind"] in shown]


def missed(rows: Sequence[Row], kind: str) -> list[Row]:
    """The units of a kind without which the loss rises, after Holm's correction, the greatest rise first."""
    own = [row for row in rows if row["kind"] == kind and row["matters"] and row["delta_loss"] > 0]
    return sorted(own, key=lambda row: -row["delta_loss"])


def fewest_images(units: int) -> int:
    """Images (or groups) from which on an effect of one of so many units can pass the test at all.

    Of n differences the smallest two-sided p by sign flips is 2 / 2^n; Holm's correction multiplies it by the units.
    """
    return 1 + ceil(log2(units / LEVEL))


def has_table(record: RunRecord, name: str) -> bool:
    """Whether the run wrote a table of this name that has rows."""
    tables: Any = record.results["tables"]
    return bool(tables.get(name))


def all_rows(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """A table's rows; their cells are of any type."""
    return record.table(name)


def main_replacement(record: RunRecord) -> str:
    """The replacement that figures and metrics show: the first asked for."""
    options: Any = record.config["options"]
    return str(options["replace"][0])


def rows_of(record: RunRecord, replacement: str) -> list[dict[str, Any]]:
    """The units with one replacement."""
    return [row for row in record.table("units") if row["replace"] == replacement]


def main_rows(record: RunRecord) -> list[dict[str, Any]]:
    """The units with the main replacement."""
    return rows_of(record, main_replacement(record))


def label(row: Row) -> str:
    """A unit as it is read: "4.2" for layer 4, head 2; "MLP 4", "block 4"; from 1."""
    return unit_label(str(row["unit"]))


def unit_label(name: str) -> str:
    """A unit's name ("head/3/1") as it is read, from 1."""
    kind, *places = name.split("/")
    numbers = ".".join(str(int(place) + 1) for place in places)
    return numbers if kind == "head" else f"{'MLP' if kind == 'mlp' else kind} {numbers}"


def table_of(rows: Sequence[Row], kind: str, column: str) -> Any:
    """(layers, heads) of one kind of unit, NaN where there is none; None where none was measured."""
    own = [row for row in rows if row["kind"] == kind]
    if not own:
        return None
    depth = 1 + max(int(row["layer"]) for row in rows)
    wide = 1 + max(int(row["head"] or 0) for row in own)
    table = np.full((depth, wide), np.nan)
    for row in own:
        table[int(row["layer"]), int(row["head"] or 0)] = one_float(row[column])
    return table


def numbers(values: Any) -> Any:
    """An array in float64."""
    return np.asarray(values, dtype=np.float64)


def agreeing(record: RunRecord) -> list[dict[str, Any]]:
    """The table of agreement, of rankings that are shown alone; the first-order one stands with the exact one."""
    heads = [row for row in record.table("units") if row["kind"] == "head"]
    names = dict.fromkeys(str(row["replace"]) for row in heads)
    shown = {name for name in names if ranking_of([row for row in heads if row["replace"] == name]) is Ranking.SHOWN}
    if main_replacement(record) in shown:
        shown.add("first-order")
    return [row for row in all_rows(record, "agreement") if {str(row["first"]), str(row["second"])} <= shown]


def floats(rows: Sequence[Row], column: str) -> Any:
    """A column as an array, NaN where a row has none."""
    return np.array([one_float(row[column]) for row in rows])


def one_float(value: Any) -> float:
    """A value that may be missing; NaN then."""
    return float("nan") if value is None else float(value)
