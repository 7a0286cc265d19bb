"""Verdicts and findings of `vitlens attention`, from its record."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.attention.record import ALIKE, CHECKS, LayerAlikeRow
from vitlens.commands.scaffold.maps.information import UNIFORM, InformationRow, fixed_map, uniform_map
from vitlens.commands.scaffold.maps.on_object import ON_OBJECT, beyond_baseline
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_ranges
from vitlens.uncertainty import Estimate, widened

COLLAPSED: Final = 0.95  # cosine similarity, from which on maps are the same to the eye


def verdicts(record: Record) -> Iterator[Verdict]:
    """Attention health is not judged on the few images that are drawn."""
    (alias,) = record.aliases
    because = f"{images_in(record)} drawn images show single maps; run vitlens stats {alias} on a data set"
    yield rules.not_tested(f"attention health of {alias}", because)


def findings(record: Record) -> Iterator[Finding | None]:
    """Layers whose maps are uniform, fixed or alike, and the pointing game of the last layer's map."""
    checks = record.rows(CHECKS)
    uniform = [row for row in checks if is_uniform(row, len(checks))]
    yield _uniform(uniform, [int(row.maps) for row in checks])
    yield _strongest(fixed_map(row, f"The maps of layer {row.maps}", len(checks), figure="evolution") for row in checks)
    sharp = {int(row.maps) for row in checks} - {int(row.maps) for row in uniform}
    yield _collapse([row for row in record.rows(ALIKE) if row.layer in sharp], len(checks))
    yield _pointing(record)


def images_in(record: Record) -> int:
    """The number of images that are drawn."""
    return record.config.data.images if record.config.data else 0


def is_uniform(row: InformationRow, looks: int) -> bool:
    """Whether the maps of a layer are shown to be uniform."""
    high = widened(row.information, looks).high
    return high is not None and high < UNIFORM


def _uniform(rows: Sequence[InformationRow], layers: Sequence[int]) -> Finding | None:
    """The layers of uniform mean maps: expected of early layers, a fault of later ones."""
    if not rows:
        return None
    row, found = max(rows, key=lambda row: row.information.value), [int(row.maps) for row in rows]
    late = [layer for layer in found if layer >= layers[len(layers) // 2]]
    return uniform_map(
        row,
        f"The mean maps of {in_ranges(found)}",
        len(layers),
        figure="evolution",
        kind="hidden fault" if late else "expected fact",
        rows=(*rows, *(Estimate(float(layer), unit="") for layer in found)),
    )


def _strongest(found: Iterator[Finding | None]) -> Finding | None:
    return max((each for each in found if each is not None), key=lambda each: each.rank, default=None)


def _collapse(rows: Sequence[LayerAlikeRow], looks: int) -> Finding | None:
    """The layers, from one on to the last, whose mean maps hardly differ from the layer before."""
    same: list[tuple[LayerAlikeRow, Estimate]] = []
    for row in reversed(rows):
        previous = row.to_previous
        if previous is None or (widened(previous, looks).low or 0.0) <= COLLAPSED:
            break
        same.append((row, previous))
    if len(same) < 2:
        return None
    least, value = min(same, key=lambda each: each[1].value)
    layers = in_ranges([row.layer for row, _ in same])
    return finding(
        f"The maps collapse with depth: in {layers} each mean map has a cosine similarity of at least "
        f"{value.value:.3f} to that of the layer before, so these layers read the same patches.",
        value,
        kind="hidden fault",
        reference=COLLAPSED,
        figure="evolution",
        rows=(least, *(row for row, _ in same)),
    )


def _pointing(record: Record) -> Finding | None:
    """Whether the last layer's mean map points at the object, beside maps that ignore the image."""
    rows = [row for row in record.rows(ON_OBJECT) if row.score == "pointing"]
    if not rows:
        return None
    return beyond_baseline(rows[-1], "the last layer's mean map", 1, figure="evolution")
