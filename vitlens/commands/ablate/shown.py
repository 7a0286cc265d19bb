"""The rows that charts and tables of `vitlens ablate` show, made of those that are recorded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.commands.ablate.claims import agreement_shown
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    AblateRecord,
    HeadPairRow,
    PatchingArrays,
    PatchingRow,
    UnitRow,
    is_ranked,
)
from vitlens.figures.patching import patching_maps
from vitlens.names import Replacement
from vitlens.record import by, col
from vitlens.report.prose import Marked, say
from vitlens.uncertainty import LEVEL, Estimate

_BROKEN: Final = "{{ most.class_name }}, {{ most.loss|number }} nats (n = {{ most.images }})"
_ORDERS: Final = {
    "least first": "least first",
    "most first": "most first",
    FIRST_ORDER: "first-order",
    "greedy": "ranked again",
}


@dataclass(frozen=True)
class NamedHead:
    """A head with what it attends to and what its removal costs."""

    unit: str = col("head")
    does: str | None = col("attends to")
    loss: Estimate = col("rise of the loss")
    accuracy: Estimate = col("accuracy lost")
    otherwise: Mapping[Replacement, Estimate] | None = col("rise, replaced otherwise")
    broken: str | None = col("class that loses most")


@dataclass(frozen=True)
class Agreeing:
    """The importance of one head by the exact measurement and by another."""

    exact: float = col("exact rise of the loss", unit="nats")
    other: float = col("by another measure", unit="nats")
    measure: str = col("measure")


@dataclass(frozen=True)
class OrderRow:
    """Accuracy after so many removals, in one order or in the mean of the random ones."""

    order: str = col("order")
    share: float = col("heads removed", unit="fraction")
    accuracy: Estimate | float = col("top-1 accuracy", unit="fraction")


@dataclass(frozen=True)
class RemovedRow:
    """Accuracy after so many removals, by order."""

    share: Estimate = col("heads removed")
    least: Estimate | None = col("least important first")
    most: Estimate | None = col("most important first")
    estimated: Estimate | None = col("by the first-order estimate")
    greedy: Estimate | None = col("ranked again after removals")


@dataclass(frozen=True)
class AlikeRow:
    """The similarity of two heads' outputs."""

    first: str = col("head")
    second: str = col("and head")
    similarity: float = col("linear CKA of the outputs")


@dataclass(frozen=True)
class ExampleRow:
    """The probability of a class on one image."""

    layer: int = col("layer (after its block)")
    class_name: str = col("class")
    probability: float = col("probability", unit="fraction")


@dataclass(frozen=True)
class DepthRow:
    """The accuracy of the logit lens."""

    layer: int = col("layer (after its block)")
    accuracy: Estimate = col("accuracy of the logit lens")


@dataclass(frozen=True)
class SumRow:
    """The direct contributions of the heads or the MLP of one layer."""

    layer: str = col("layer")
    part: str = col("part")
    logit: float = col("direct contribution", unit="logits")


def by_loss(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """The greatest rise of the loss first; in order of the layers where no effect is shown, as a ranking were noise."""
    return sorted(rows, key=lambda row: -row.loss.value) if is_ranked(rows) else list(rows)


def named_heads(record: AblateRecord) -> Iterator[NamedHead]:
    """Every head, the most important first."""
    broken = {row.unit: row for row in record.broken}
    for row in by_loss(record.heads):
        label, most = record.label(row), broken.get(row.unit)
        yield NamedHead(
            row.unit,
            None if label is None else label.words,
            row.loss,
            row.accuracy,
            row.other_losses or None,
            None if most is None else Marked(say(_BROKEN, most=most)),
        )


def loses_accuracy(row: UnitRow) -> bool:
    """Whether accuracy changes significantly without a head."""
    return row.accuracy_p is not None and row.accuracy_p <= LEVEL


def where_accuracy_is_lost(record: AblateRecord) -> Sequence[UnitRow]:
    """All heads, where accuracy changes significantly without one of them: else their map were noise."""
    return record.heads if any(map(loses_accuracy, record.heads)) else ()


def others(record: AblateRecord) -> list[UnitRow]:
    """MLPs and blocks."""
    return by_loss([row for row in record.units if row.kind != "head"])


def agreeing(record: AblateRecord) -> Iterator[Agreeing]:
    """Every head by the exact measure and by each other one whose ranking is shown."""
    shown = {name for row in agreement_shown(record) for name in (row.first, row.second)}
    for row in record.heads:
        for name, loss in row.other_losses.items():
            if name in shown:
                yield Agreeing(row.loss.value, loss.value, name)
        if row.first_order is not None and FIRST_ORDER in shown:
            yield Agreeing(row.loss.value, row.first_order, FIRST_ORDER)


def orders(record: AblateRecord) -> Iterator[OrderRow]:
    """Every point of every curve."""
    for row in record.curves:
        known = _ORDERS.get(row.order)
        yield OrderRow(known or "random", row.share, row.accuracy if known else row.accuracy.value)


def removed(record: AblateRecord) -> Iterator[RemovedRow]:
    """The curves but for their common beginning, a column for each order."""
    for share, rows in by(record.curves, "share").items():
        if share:
            found = {row.order: row.accuracy for row in rows}
            yield RemovedRow(Estimate(share), *(found.get(name) for name in _ORDERS))


def paired(record: AblateRecord) -> list[HeadPairRow]:
    """The pairs, those furthest from the sum first."""
    return sorted(record.pairs, key=lambda row: -abs(row.synergy.value))


def alike(record: AblateRecord) -> list[AlikeRow]:
    """Every two heads whose outputs were compared, the most similar first."""
    if record.redundancy is None:
        return []
    units, similarity = record.redundancy.units.tolist(), record.redundancy.similarity
    places = [(one, two) for one, two in zip(*np.triu_indices(len(units), 1)) if np.isfinite(similarity[one, two])]
    found = [AlikeRow(units[one], units[two], float(similarity[one, two])) for one, two in places]
    return sorted(found, key=lambda row: -row.similarity)


def square(record: AblateRecord) -> list[AlikeRow]:
    """Every two heads in both orders, by layer and head; below 0, where the unbiased estimate may lie, it is 0."""
    if record.redundancy is None:
        return []
    units = record.redundancy.units.tolist()
    found = {(row.first, row.second): max(0.0, row.similarity) for row in alike(record)}
    return [AlikeRow(one, two, found.get((one, two), found.get((two, one), np.nan))) for one in units for two in units]


@dataclass(frozen=True)
class Patched:
    """A pair of images with what each part restores."""

    row: PatchingRow
    arrays: PatchingArrays


def patched(record: AblateRecord) -> Iterator[Patched]:
    """The pair of images; none where it was not patched."""
    if record.patched is not None:
        for row in record.patching:
            yield Patched(row, record.patched)


def draw_patching(rows: Sequence[Patched], title: str) -> Figure:
    """The pair and the maps of what its parts restore."""
    row, arrays = rows[0].row, rows[0].arrays
    prefix = row.prefix or ()
    names = [f"{name} {prefix[:at].count(name)}" if prefix.count(name) > 1 else name.replace("cls", "CLS")
             for at, name in enumerate(prefix)]  # fmt: skip
    placed = row.grid is not None and arrays.positions.shape[1] == len(names) + row.grid[0] * row.grid[1]
    grids = arrays.positions[:, len(names) :].reshape(-1, *row.grid) if placed and row.grid else None
    before = {name: arrays.positions[:, at] for at, name in enumerate(names)} if placed else {}
    return patching_maps(
        clean=arrays.clean, corrupted=arrays.corrupted, heads=arrays.heads, positions=grids, prefix=before or None,
        names=(f"clean: {row.clean}", f"corrupted: {row.corrupted}"), title=title,
    )  # fmt: skip


def depths(record: AblateRecord) -> Iterator[DepthRow]:
    """The accuracy of the logit lens after each block."""
    yield from (DepthRow(row.layer, row.accuracy) for row in record.lens[1:])


def example(record: AblateRecord) -> Iterator[ExampleRow]:
    """The classes of one image after each block."""
    for row in record.lens[1:]:
        for name, probability in row.example.items():
            yield ExampleRow(row.layer, name, probability)


def sums(record: AblateRecord) -> Iterator[SumRow]:
    """The heads of each layer together, and its MLP."""
    for layer, rows in by([row for row in record.contributions if row.layer is not None], "layer").items():
        for part, own in by(rows, "part").items():
            yield SumRow(str(layer), {"head": "heads"}.get(part, part), sum(row.logit for row in own))
