"""Heads removed one after another, similarity of heads' outputs, and pairs of heads."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.ablate.record import CURVES, PAIRS, REDUNDANCY, REDUNDANCY_ARRAYS, REMOVABLE
from vitlens.commands.ablate.record.arrays import RedundancyArrays
from vitlens.commands.ablate.record.rows import HeadPairRow, RemovalRow, unit_label
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ORDERS: Final = {
    "least first": "least important first",
    "most first": "most important first",
    "first-order": "first-order order",
    "greedy": "greedy, ranked again",
}


def removal(record: Record) -> Iterator[Section]:
    """Accuracy after each removal, in each order; nothing where no heads were removed."""
    rows = record.rows(CURVES)
    if not rows:
        return
    removable = record.metrics.get(REMOVABLE(model=record.aliases[0]))
    if removable is not None:
        rows_behind: tuple[object, ...] = (removable,)
        share = (
            f"{in_words(removable)} of the heads can be removed, least important first, before accuracy falls by more "
            "than 1 point (among the measured shares)."
        )
    else:
        rows_behind = rows
        share = (
            "Accuracy without any head is not shown to be lower by more than 1 point, so these images do not determine "
            "which share of the heads can be removed."
        )
    tested = f"Measured on {rows[0].n} images; where there are enough images, the orders were chosen on other images."
    figure = FigureSpec(
        "curves",
        "Orders are chosen on one half of the images and measured on the other. Bands: Wilson's 95 % intervals. A "
        "curve shows the cost of its order; a better order may exist.",
        partial(_curves, rows, removable),
    )
    lines = (Sentence(share, rows_behind), Sentence(tested, says="setting"))
    yield Section("Removing heads one after another", lines, (_table(rows),), (figure,), leading=True)


def _table(rows: Sequence[RemovalRow]) -> Table:
    orders = dict.fromkeys(row.order for row in rows)
    accuracy = {(row.share, row.order): f"{100 * row.accuracy:.1f} %" for row in rows}
    cells: list[tuple[Cell, ...]] = [
        (round(100 * share, 1), *(accuracy.get((share, order)) for order in orders))
        for share in dict.fromkeys(row.share for row in rows)
    ]
    return Table("Accuracy", ("heads removed (%)", *(_ORDERS.get(order, order) for order in orders)), tuple(cells))


def _curves(rows: Sequence[RemovalRow], removable: Estimate | None) -> "Figure":
    from vitlens.figures.ablate.removal import AccuracyCurve, removal_curves

    curves: dict[str, AccuracyCurve] = {}
    for name in dict.fromkeys(row.order for row in rows):
        of_order = [row for row in rows if row.order == name]
        curves[name] = AccuracyCurve(
            share=[row.share for row in of_order],
            accuracy=[row.accuracy for row in of_order],
            low=np.array([row.low for row in of_order], dtype=np.float64),
            high=np.array([row.high for row in of_order], dtype=np.float64),
        )
    return removal_curves(
        curves={_ORDERS[name]: curve for name, curve in curves.items() if name in _ORDERS},
        random=[curve for name, curve in curves.items() if name not in _ORDERS],
        removable=None if removable is None else removable.value,
        title="Accuracy as heads are removed one after another",
    )


def pairs(record: Record) -> Iterator[Section]:
    """Similarity of heads' outputs, and the most important heads in pairs; nothing where not measured."""
    if not record.rows(REDUNDANCY):
        return
    figures = [
        FigureSpec(
            "redundancy",
            "Linear CKA (unbiased, values below 0 drawn as 0) of heads' outputs over tokens and images.",
            partial(_redundancy, record.arrays(REDUNDANCY_ARRAYS)),
        )
    ]
    rows = record.rows(PAIRS)
    if not rows:
        yield Section("Heads with similar outputs", (_most_similar(record),), figures=tuple(figures), leading=True)
        return
    figures.insert(
        0,
        FigureSpec(
            "pairs",
            "Rise of the loss without both heads minus the sum of the rises without each. Red: each can compensate for "
            "the other (the loss without both rises by more than the sum); blue: each depends on the other. Dots: the "
            "interval excludes 0; p-values after Holm's correction are in the table.",
            partial(_synergy, rows),
        ),
    )
    table = Table.of(
        "Heads removed in pairs, the largest excess over the sum first",
        sorted(rows, key=lambda row: -abs(row.synergy)),
        {
            "pair": lambda row: row.label,
            "chosen by": lambda row: row.chosen,
            "similarity (CKA)": lambda row: row.similarity,
            "larger rise of one alone (nats)": lambda row: _larger(row),
            "without both (nats)": lambda row: row.both,
            "beyond the sum (nats)": lambda row: row.estimate,
            "p (Holm)": lambda row: row.p_holm,
        },
    )
    lines = (_pair_sentence(rows), _most_similar(record))
    yield Section("Pairs of heads, and heads with similar outputs", lines, (table,), tuple(figures), leading=True)


def _larger(row: HeadPairRow) -> float | None:
    """The larger of the two rises without each."""
    return None if row.first_alone is None or row.second_alone is None else max(row.first_alone, row.second_alone)


def _pair_sentence(rows: Sequence[HeadPairRow]) -> Sentence:
    """How many pairs cost more, or less, than the sum, after Holm's correction."""
    shown = [row for row in rows if row.p_holm is not None and row.p_holm <= LEVEL]
    more = sum(row.synergy > 0 for row in shown)
    return Sentence(
        f"Of {len(rows)} pairs of heads that were removed together, {more} cost more than the sum of both heads alone "
        f"and {len(shown) - more} less, after Holm's correction.",
        tuple(rows),
    )


def _most_similar(record: Record) -> Sentence:
    """The two heads with the most similar outputs."""
    arrays = record.arrays(REDUNDANCY_ARRAYS)
    above = np.nan_to_num(np.triu(arrays.similarity, 1), nan=-1.0)
    one, two = divmod(int(above.argmax()), len(above))
    names = [unit_label(str(name)) for name in arrays.units[[one, two]]]
    alike = Estimate(float(above[one, two]), unit="")
    return Sentence(
        f"The most similar outputs are those of {names[0]} and {names[1]}: linear CKA {alike.value:.2f}.",
        (alike, *record.rows(REDUNDANCY)),
    )


def _redundancy(arrays: RedundancyArrays) -> "Figure":
    from vitlens.figures.ablate.pairs import redundancy_matrix

    return redundancy_matrix(
        similarity=np.clip(arrays.similarity, 0.0, 1.0),
        layers_of_heads=arrays.layers.tolist(),
        title="Similarity of the outputs of any two heads",
        measure="linear CKA",
    )


def _synergy(rows: Sequence[HeadPairRow]) -> "Figure":
    from vitlens.figures.ablate.pairs import synergy_matrix

    names = list(dict.fromkeys(name for row in rows for name in (row.first, row.second)))
    values = np.full((len(names), len(names)), np.nan)
    significant = np.zeros(values.shape, dtype=bool)
    for row in rows:
        first, second = names.index(row.first), names.index(row.second)
        values[first, second] = values[second, first] = row.synergy
        significant[first, second] = significant[second, first] = row.excludes_zero
    labels = [unit_label(name) for name in names]
    return synergy_matrix(synergy=values, names=labels, significant=significant, unit="nats")
