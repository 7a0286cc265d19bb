"""All units: maps of importance, ranking, agreement of replacements, and tables."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.ablate.conclusions import smallest_in
from vitlens.commands.ablate.judgement import LOSS, POINTS, of_judgement
from vitlens.commands.ablate.ranking import (
    REPLACED,
    Ranking,
    agreement_of_shown_rankings,
    heads_of,
    main_replacement,
    main_rows,
    ranked_rows,
    ranking_of,
    rows_of,
)
from vitlens.commands.ablate.record import CLASS_HEADS, FIRST_ORDER
from vitlens.commands.ablate.record.rows import ReplacementAgreementRow, UnitRow, unit_label
from vitlens.names import UnitKind
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RISE: Final = "rise of loss (nats)"
_Column = Literal["delta_loss", "delta_loss_low", "delta_loss_high", "delta_accuracy", "first_order"]
_P = Literal["p_holm", "accuracy_p_holm"]
# the smallest value of the full colour: differences far below it are rounding errors or negligible
_FAINTEST: Final[dict[_Column, float]] = {"delta_loss": 0.01, "delta_accuracy": 1.0}  # nats, points
_CLASSES: Final = 40  # of the data, above which the report has no table of them
_DOTS: Final = "Dots: significant after Holm's correction over all heads (sign-flip test). "


def unit_figures(record: Record) -> Iterator[FigureSpec]:
    """Maps of importance, ranking with intervals, agreement of the replacements."""
    rows, by = main_rows(record), REPLACED[main_replacement(record)]
    heads = heads_of(rows)
    if heads:
        tested = ranking_of(heads) is not Ranking.UNTESTED
        caption = (
            f"Exact change when the output of one head is replaced by {by}; red: the model is worse without the head. "
            f"{_DOTS if tested else ''}Of two heads with the same function, each can appear unimportant."
        )
        losses = partial(_map, rows, "delta_loss", "p_holm", RISE, by)
        yield FigureSpec("importance", caption, losses)
    ranked = ranked_rows(rows)
    if ranked:
        yield FigureSpec(
            "ranking",
            "Exact rise of the mean cross-entropy with its paired 95 % bootstrap interval over images; hollow: the "
            "first-order estimate, from one backward pass. Coloured: significant after Holm's correction.",
            partial(_ranking, ranked),
        )
    if heads:
        points = partial(_map, rows, "delta_accuracy", "accuracy_p_holm", "accuracy lost (points)", by)
        yield FigureSpec("importance_accuracy", caption.replace("Exact change", "Points of accuracy lost", 1), points)
    agreement = agreement_of_shown_rankings(record)
    if agreement:
        yield FigureSpec(
            "agreement",
            "One dot for each head. A replacement that no image produces, such as zero, can raise the loss by more "
            "than the loss of the head's information does.",
            partial(_agreement, record, agreement),
        )


def _map(rows: Sequence[UnitRow], column: _Column, p: _P, unit: str, by: str) -> "Figure":
    from vitlens.figures.ablate.importance import importance_map

    heads, mlps, blocks = (_by_layer(rows, kind, column) for kind in ("head", "mlp", "block"))
    tested = ranking_of(heads_of(rows)) is not Ranking.UNTESTED
    return importance_map(
        heads=heads,
        marked=np.nan_to_num(_by_layer(rows, "head", p), nan=1.0) <= LEVEL if tested else None,
        faintest=_FAINTEST[column],
        unit=unit,
        title=f"Effect of removing each head (replaced by {by})",
        mlps=None if mlps is None else mlps[:, 0],
        blocks=None if blocks is None else blocks[:, 0],
    )


def _by_layer(rows: Sequence[UnitRow], kind: UnitKind, column: _Column | _P) -> Any:
    """(layers, heads) of one kind of unit, NaN where there is none; None where none was measured."""
    own = [row for row in rows if row.kind == kind]
    if not own:
        return None
    table = np.full((1 + max(row.layer for row in rows), 1 + max(row.head or 0 for row in own)), np.nan)
    for row, value in zip(own, _column(own, column)):
        table[row.layer, row.head or 0] = value
    return table


def _column(rows: Sequence[UnitRow], column: _Column | _P) -> NDArray[np.float64]:
    """A column as an array, NaN where a row has none."""
    return np.array([getattr(row, column) for row in rows], dtype=np.float64)


def _ranking(rows: Sequence[UnitRow]) -> "Figure":
    from vitlens.figures.ablate.importance import importance_ranking

    return importance_ranking(
        names=[row.label for row in rows],
        values=_column(rows, "delta_loss"),
        low=_column(rows, "delta_loss_low"),
        high=_column(rows, "delta_loss_high"),
        matters=[row.matters for row in rows],
        first_order=_column(rows, "first_order") if any(row.first_order is not None for row in rows) else None,
        unit=RISE,
        title="Importance of the units (layers and heads from 0)",
    )


def _agreement(record: Record, pairs: Sequence[ReplacementAgreementRow]) -> "Figure":
    from vitlens.figures.ablate.importance import replacement_agreement

    values: dict[str, NDArray[np.float64]] = {}
    for name in dict.fromkeys(name for row in pairs for name in (row.first, row.second)):
        if name == FIRST_ORDER:
            values[name] = _column(heads_of(main_rows(record)), "first_order")
        else:
            values[name] = _column(heads_of(rows_of(record, name)), "delta_loss")
    rho = {(row.first, row.second): np.nan if row.rank_correlation is None else row.rank_correlation for row in pairs}
    return replacement_agreement(values=values, rho=rho, unit="nats")


def all_units(record: Record) -> Section:
    """The results of all units, and for each class of the data the head whose removal raises its loss most."""
    heads, smallest = heads_of(main_rows(record)), smallest_in(record)
    lines = [
        Sentence(
            f"An effect is worth reporting from {in_words(smallest)} on, the larger of {LOSS} nats (the probability of "
            f"the label falls by 1 %) and 1 % of the clean loss, or from {POINTS} points of accuracy. A head has no "
            "effect where its interval, widened for the number of heads, lies within that on both sides.",
            says="method",
        )
    ]
    if heads and ranking_of(heads) is not Ranking.UNTESTED:
        counts = {which: len(of_judgement(heads, smallest, which)) for which in ("effect", "no effect", "undecided")}
        lines.insert(
            0,
            Sentence(
                f"Of {len(heads)} heads, {counts['effect']} change the loss by more than {in_words(smallest)}, "
                f"{counts['no effect']} by less; the intervals of {counts['undecided']} decide neither.",
                (*heads, smallest),
            ),
        )
    rows = sorted(main_rows(record), key=lambda row: (row.kind != "head", row.layer, row.head or 0))
    tables = [
        Table.of(
            "All units; L3.H7 is head 7 of layer 3, counted from 0",
            rows,
            {
                "unit": lambda row: row.label,
                RISE: lambda row: row.loss,
                "p (Holm)": lambda row: row.p_holm,
                "accuracy lost (points)": lambda row: row.accuracy,
                "first-order (nats)": lambda row: row.first_order,
            },
        )
    ]
    classes = record.rows(CLASS_HEADS)
    if 0 < len(classes) <= _CLASSES:
        tables.append(
            Table.of(
                "For each class, the head whose removal raises its loss most (few images per class, not tested)",
                classes,
                {
                    "class": lambda row: row.class_name,
                    "images": lambda row: row.images,
                    "head": lambda row: unit_label(row.head),
                    RISE: lambda row: row.delta_loss,
                    "accuracy lost (points)": lambda row: row.delta_accuracy,
                },
            )
        )
    return Section("All units", tuple(lines), tuple(tables), leading=True)
