"""What `vitlens ablate` draws, from its folder alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitlens.figures.ablate import importance_map, importance_ranking, replacement_agreement
from vitlens.figures.removal import Curve, removal_curves
from vitlens.figures.teamwork import redundancy_matrix, synergy_matrix
from vitlens.files import RunRecord
from vitlens.runs.ablate_draw_inside import draw_contributions, draw_lens, draw_patching
from vitlens.runs.ablate_rows import (
    LEVEL,
    Ranking,
    Row,
    agreeing,
    floats,
    has_table,
    label,
    main_replacement,
    main_rows,
    numbers,
    one_float,
    ranked_rows,
    ranking_of,
    rows_of,
    table_of,
    unit_label,
)
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics

REPLACED = {
    "mean": "its mean over the data",
    "zero": "zero",
    "resample": "another image's",
}
ORDERS = {
    "least first": "least important first",
    "most first": "most important first",
    "first-order": "first-order order",
    "greedy": "greedy, ranked again",
}
RISE = "rise of loss (nats)"
# the least that the full colour stands for: differences far below it are rounding, or too small to matter
FAINTEST = {"delta_loss": 0.01, "delta_accuracy": 1.0}  # nats, points


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Importance, its ranking, agreement, removal curves, redundancy, pairs, patching, lens and contributions."""
    if has_table(record, "adaptive"):
        if any(row["top"] and row["settled"] for row in record.table("adaptive")):
            yield _adaptive(record)
        return
    rows = main_rows(record)
    yield from _importance(record, rows)
    yield from _agreement(record)
    if has_table(record, "curves"):
        yield _curves(record)
    if record.has_arrays("redundancy"):
        yield _redundancy(record)
    if has_table(record, "pairs"):
        yield _pairs(record)
    if record.has_arrays("patching"):
        yield draw_patching(record)
    if record.has_arrays("lens"):
        yield draw_lens(record)
    if record.has_arrays("contributions"):
        yield draw_contributions(record)


def _importance(record: RunRecord, rows: Sequence[Row]) -> Iterator[Drawn]:
    by = REPLACED[main_replacement(record)]
    for name, column, p, unit in (
        ("importance", "delta_loss", "p_holm", RISE),
        ("importance_accuracy", "delta_accuracy", "accuracy_p_holm", "accuracy lost (points)"),
    ):
        heads = table_of(rows, "head", column)
        if heads is None:
            continue
        tested = ranking_of([row for row in rows if row["kind"] == "head"]) is not Ranking.UNTESTED
        marked = np.nan_to_num(numbers(table_of(rows, "head", p)), nan=1.0) <= LEVEL
        mlps, blocks = (table_of(rows, kind, column) for kind in ("mlp", "block"))
        figure = importance_map(
            heads=heads,
            marked=marked if tested else None,
            faintest=FAINTEST[column],
            unit=unit,
            title=f"What the model loses without each head (replaced by {by})",
            mlps=None if mlps is None else mlps[:, 0],
            blocks=None if blocks is None else blocks[:, 0],
        )
        caption = (
            f"Exact change when one head's output is replaced by {by}; red: the head helps. {_DOTS if tested else ''}"
            "Heads that stand in for each other can each look unimportant."
        )
        yield Drawn(name, figure, caption)
    rows = ranked_rows(rows)
    if not rows:
        return
    figure = importance_ranking(
        names=[label(row) for row in rows],
        values=[row["delta_loss"] for row in rows],
        low=floats(rows, "delta_loss_low"),
        high=floats(rows, "delta_loss_high"),
        matters=[row["matters"] for row in rows],
        first_order=floats(rows, "first_order") if any(row["first_order"] is not None for row in rows) else None,
        unit=RISE,
        title="What matters most (layer.head, counted from 1)",
    )
    caption = (
        "Exact rise of the mean cross-entropy with its paired 95 % bootstrap interval over images; hollow: the "
        "first-order estimate, one backward pass for all heads. Coloured: an effect after Holm's correction."
    )
    yield Drawn("ranking", figure, caption)


_DOTS = "A dot: an effect after Holm's correction over all heads (sign flips). "


def _agreement(record: RunRecord) -> Iterator[Drawn]:
    pairs = agreeing(record)
    if not pairs:
        return
    values: dict[str, Any] = {}
    for name in dict.fromkeys(str(row[side]) for row in pairs for side in ("first", "second")):
        rows = main_rows(record) if name == "first-order" else rows_of(record, name)
        column = "first_order" if name == "first-order" else "delta_loss"
        values[name] = floats([row for row in rows if row["kind"] == "head"], column)
    rho = {(str(row["first"]), str(row["second"])): one_float(row["rank_correlation"]) for row in pairs}
    figure = replacement_agreement(values=values, rho=rho, unit="nats")
    caption = (
        "A dot a head. Replacements that put a head out of the data (zero) can hurt in ways that its loss does not."
    )
    yield Drawn("agreement", figure, caption)


def _curves(record: RunRecord) -> Drawn:
    rows = record.table("curves")
    found: dict[str, Curve] = {}
    for name in dict.fromkeys(str(row["order"]) for row in rows):
        own = [row for row in rows if row["order"] == name]
        found[name] = Curve(*(floats(own, column) for column in ("share", "accuracy", "low", "high")))
    removable = metrics(record).get("removable_share")
    figure = removal_curves(
        curves={ORDERS[name]: curve for name, curve in found.items() if name in ORDERS},
        random=[curve for name, curve in found.items() if name not in ORDERS],
        removable=None if removable is None else removable.value,
        title="Accuracy as heads are removed one after another",
    )
    caption = (
        "Orders were chosen on one half of the images and are measured on the other. Bands: Wilson's 95 % intervals. A "
        "curve says what this order costs, not that no better order exists."
    )
    return Drawn("curves", figure, caption)


def _redundancy(record: RunRecord) -> Drawn:
    found: Any = record.arrays("redundancy")
    figure = redundancy_matrix(
        similarity=np.clip(found["similarity"], 0.0, 1.0),
        layers_of_heads=found["layers"].tolist(),
        title="How alike the outputs of any two heads are",
        measure="linear CKA",
    )
    caption = (
        "Linear CKA (unbiased, values below 0 drawn as 0) of heads' outputs over tokens and images; layers from 1."
    )
    return Drawn("redundancy", figure, caption)


def _pairs(record: RunRecord) -> Drawn:
    rows = record.table("pairs")
    names = list(dict.fromkeys(str(row[side]) for row in rows for side in ("first", "second")))
    values = np.full((len(names), len(names)), np.nan)
    significant = np.zeros(values.shape, dtype=bool)
    for row in rows:
        one, two = names.index(str(row["first"])), names.index(str(row["second"]))
        values[one, two] = values[two, one] = one_float(row["synergy"])
        apart = one_float(row["low"]) > 0 or one_float(row["high"]) < 0
        significant[one, two] = significant[two, one] = apart
    figure = synergy_matrix(
        synergy=values, names=[unit_label(name) for name in names], significant=significant, unit="nats"
    )
    caption = (
        "Rise of loss without both heads minus the sum of the rises without each. Red: they stand in for each other "
        "(both are missed more than one by one); blue: they need each other. Dots: the interval excludes 0; p-values "
        "after Holm's correction are in the table."
    )
    return Drawn("pairs", figure, caption)


def _adaptive(record: RunRecord) -> Drawn:
    rows = record.table("adaptive")
    figure = importance_ranking(
        names=[unit_label(str(row["unit"])) for row in rows],
        values=floats(rows, "delta_loss"),
        low=floats(rows, "low"),
        high=floats(rows, "high"),
        matters=[bool(row["top"]) for row in rows],
        unit=RISE,
        title="The most important heads, found by elimination (layer.head, counted from 1)",
    )
    caption = (
        "Coloured: the heads asked for. Intervals hold for all heads and rounds at once; wide ones belong to heads "
        "that were left out early, on few images."
    )
    return Drawn("ranking", figure, caption)
