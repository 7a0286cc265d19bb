"""What `vitlens ablate` draws, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlens.figures.ablate import importance_map, importance_ranking, replacement_agreement
from vitlens.figures.patching import contribution_bars, logit_lens, patching_maps
from vitlens.figures.removal import Curve, removal_curves
from vitlens.figures.teamwork import redundancy_matrix, synergy_matrix
from vitlens.files import RunRecord
from vitlens.report import metrics
from vitlens.runs.report import Drawn

Row = Mapping[str, Any]

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


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Importance, its ranking, agreement, removal curves, redundancy, pairs, patching, lens and contributions."""
    if has_table(record, "adaptive"):
        yield _adaptive(record)
        return
    rows = main_rows(record)
    yield from _importance(record, rows)
    yield from _agreement(record)
    if has_table(record, "curves"):
        yield _curves(record)
    if record.has_arrays("redundancy"):
        yield from _teamwork(record)
    if record.has_arrays("patching"):
        yield _patching(record)
    if record.has_arrays("lens"):
        yield _lens(record)
    if record.has_arrays("contributions"):
        yield _contributions(record)


def _importance(record: RunRecord, rows: Sequence[Row]) -> Iterator[Drawn]:
    by = REPLACED[main_replacement(record)]
    for name, column, p, unit in (
        ("importance", "delta_loss", "p_holm", RISE),
        ("importance_accuracy", "delta_accuracy", "accuracy_p_holm", "accuracy lost (points)"),
    ):
        heads = _table(rows, "head", column)
        if heads is None:
            continue
        marked = np.nan_to_num(_numbers(_table(rows, "head", p)), nan=1.0) <= 0.05
        mlps, blocks = (_table(rows, kind, column) for kind in ("mlp", "block"))
        figure = importance_map(
            heads=heads,
            marked=marked,
            unit=unit,
            title=f"What the model loses without each head (replaced by {by})",
            mlps=None if mlps is None else mlps[:, 0],
            blocks=None if blocks is None else blocks[:, 0],
        )
        caption = (
            f"Exact change when one head's output is replaced by {by}; red: the head helps. A dot: an effect after "
            "Holm's correction over all heads (sign flips). Heads that stand in for each other can each look "
            "unimportant."
        )
        yield Drawn(name, figure, caption)
    figure = importance_ranking(
        names=[label(row) for row in rows],
        values=[row["delta_loss"] for row in rows],
        low=_floats(rows, "delta_loss_low"),
        high=_floats(rows, "delta_loss_high"),
        matters=[row["matters"] for row in rows],
        first_order=_floats(rows, "first_order") if any(row["first_order"] is not None for row in rows) else None,
        unit=RISE,
        title="What matters most (layer.head, counted from 1)",
    )
    caption = (
        "Exact rise of the mean cross-entropy with its paired 95 % bootstrap interval over images; hollow: the "
        "first-order estimate, one backward pass for all heads. Coloured: an effect after Holm's correction."
    )
    yield Drawn("ranking", figure, caption)


def _agreement(record: RunRecord) -> Iterator[Drawn]:
    pairs = record.table("agreement")
    if not pairs:
        return
    values: dict[str, Any] = {}
    for name in dict.fromkeys(str(row[side]) for row in pairs for side in ("first", "second")):
        rows = main_rows(record) if name == "first-order" else rows_of(record, name)
        column = "first_order" if name == "first-order" else "delta_loss"
        values[name] = _floats([row for row in rows if row["kind"] == "head"], column)
    rho = {(str(row["first"]), str(row["second"])): _float(row["rank_correlation"]) for row in pairs}
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
        found[name] = Curve(*(_floats(own, column) for column in ("share", "accuracy", "low", "high")))
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


def _teamwork(record: RunRecord) -> Iterator[Drawn]:
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
    yield Drawn("redundancy", figure, caption)
    rows = record.table("pairs")
    names = list(dict.fromkeys(str(row[side]) for row in rows for side in ("first", "second")))
    values = np.full((len(names), len(names)), np.nan)
    significant = np.zeros(values.shape, dtype=bool)
    for row in rows:
        one, two = names.index(str(row["first"])), names.index(str(row["second"]))
        values[one, two] = values[two, one] = _float(row["synergy"])
        apart = _float(row["low"]) > 0 or _float(row["high"]) < 0
        significant[one, two] = significant[two, one] = apart
    figure = synergy_matrix(
        synergy=values, names=[unit_label(name) for name in names], significant=significant, unit="nats"
    )
    caption = (
        "Rise of loss without both heads minus the sum of the rises without each. Red: they stand in for each other "
        "(both are missed more than one by one); blue: they need each other. Dots: the interval excludes 0; p-values "
        "after Holm's correction are in the table."
    )
    yield Drawn("pairs", figure, caption)


def _patching(record: RunRecord) -> Drawn:
    found: Any = record.arrays("patching")
    (row,) = record.table("patching")
    grid, prefix = row["grid"], list(row["prefix"] or ())  # type: ignore[call-overload]
    positions, before = None, None
    if grid is not None and found["positions"].shape[1] == len(prefix) + grid[0] * grid[1]:  # type: ignore[index]
        positions = found["positions"][:, len(prefix) :].reshape(-1, *grid)  # type: ignore[misc]
        numbered = [f"{name} {index}" if prefix.count(name) > 1 else name for index, name in enumerate(prefix, 1)]
        before = {
            name.replace("cls", "CLS"): found["positions"][:, index] for index, name in enumerate(numbered)
        } or None
    figure = patching_maps(
        clean=found["clean"],
        corrupted=found["corrupted"],
        heads=found["heads"],
        positions=positions,
        prefix=before,
        names=(f"clean: {row['clean']}", f"corrupted: {row['corrupted']}"),
        title="What the clean run brings back when a part of it is put into the other",
    )
    caption = (
        f"Share of the logit difference {row['target']} minus {row['other']} that comes back when one head's output, "
        "or the residual stream at one token before a block, is taken from the clean run; one pair of images alone. "
        "Beyond 1 or below 0 is possible: parts can overshoot or work against the rest."
    )
    return Drawn("patching", figure, caption)


def _lens(record: RunRecord) -> Drawn:
    found: Any = record.arrays("lens")
    names = [str(row["class"]) for row in record.table("lens_classes")]
    figure = logit_lens(
        values=found["probability"][1:],
        names=names,
        title="The answer after each block, first image",
        unit="probability",
    )
    caption = (
        "The final norm and classifier applied to the residual stream after each block (logit lens); early blocks were "
        "not trained to be read this way."
    )
    return Drawn("lens", figure, caption)


def _contributions(record: RunRecord) -> Drawn:
    found: Any = record.arrays("contributions")
    (row,) = record.table("contributions")
    figure = contribution_bars(
        heads=found["heads"],
        mlps=found["mlps"],
        rest=float(found["rest"]),
        title=f"What heads and MLPs write straight into the true class's logit, mean of {row['images']} images",
    )
    caption = (
        "Direct contributions with the final norm's scale fixed at each image's own; with the rest they sum to the "
        "logit. What a head does through later layers is not in them."
    )
    return Drawn("contributions", figure, caption)


def _adaptive(record: RunRecord) -> Drawn:
    rows = record.table("adaptive")
    figure = importance_ranking(
        names=[unit_label(str(row["unit"])) for row in rows],
        values=_floats(rows, "delta_loss"),
        low=_floats(rows, "low"),
        high=_floats(rows, "high"),
        matters=[bool(row["top"]) for row in rows],
        unit=RISE,
        title="The most important heads, found by elimination (layer.head, counted from 1)",
    )
    caption = (
        "Coloured: the heads asked for. Intervals hold for all heads and rounds at once; wide ones belong to heads "
        "that were left out early, on few images."
    )
    return Drawn("ranking", figure, caption)


def has_table(record: RunRecord, name: str) -> bool:
    """Whether the run wrote a table of this name that has rows."""
    tables: Any = record.results["tables"]
    return bool(tables.get(name))


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


def _table(rows: Sequence[Row], kind: str, column: str) -> Any:
    """(layers, heads) of one kind of unit, NaN where there is none; None where none was measured."""
    own = [row for row in rows if row["kind"] == kind]
    if not own:
        return None
    depth = 1 + max(int(row["layer"]) for row in rows)
    wide = 1 + max(int(row["head"] or 0) for row in own)
    table = np.full((depth, wide), np.nan)
    for row in own:
        table[int(row["layer"]), int(row["head"] or 0)] = _float(row[column])
    return table


def _numbers(values: Any) -> Any:
    return np.asarray(values, dtype=np.float64)


def _floats(rows: Sequence[Row], column: str) -> Any:
    return np.array([_float(row[column]) for row in rows])


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)
