"""Rows of reliance with planted effects."""

from dataclasses import replace

import numpy as np

from tests.kit.planted_answers import answers, compare_record
from vitlens.analysis.reliance.rows import (
    CueExampleArrays,
    CueExampleRow,
    CueHeadRow,
    CueMapRow,
    LeftOutCueRow,
    ReliancePairRow,
    RelianceRow,
)
from vitlens.commands.compare.record import CompareRecord
from vitlens.uncertainty import Estimate

N = 450
PAIR = ("vit", "cnn")


def reliance_row(
    model: str, cue: str, intervention: str, changed: float, control: float, **more: object
) -> RelianceRow:
    """Return a row by the shares of predictions changed by the intervention, and by its control."""
    points = 100 * (changed - control)
    values = {
        "n": N,
        "unchanged": 0,
        "size": 0.1,
        "control_size": 0.1,
        "changed_by": Estimate(changed, changed - 0.03, changed + 0.03, N),
        "changed_by_control": Estimate(control, control - 0.02, control + 0.02, N),
        "changed": Estimate(points, points - 4, points + 4, N, "points"),
        "lost": Estimate(points, points - 4, points + 4, N, "points"),
        "gained": Estimate(-8.0, -11.0, -5.0, N, "points"),
        "errors": 90,
        "fixed": 4,
        "broken": 40,
        "control_fixed": 3,
        "control_broken": 5,
        "p": 1e-9,
        "p_lost": 1e-9,
        "p_gained": 1e-9,
        "p_holm": 1e-7,
        "p_lost_holm": 1e-7,
        "p_gained_holm": 1e-7,
    }
    return RelianceRow(model=model, cue=cue, intervention=intervention, **values | more)  # type: ignore[arg-type]


def misleading_row(
    model: str, cue: str, intervention: str, gained: float, **more: object
) -> RelianceRow:
    """Return a row whose intervention gains these points of accuracy; its control loses five."""
    values = {
        "gained": Estimate(gained, gained - 4, gained + 4, N, "points"),
        "lost": Estimate(-gained - 5, -gained - 10, -gained, N, "points"),
        "errors": 200,
        "fixed": 171,
        "broken": 14,
        "control_fixed": 9,
        "control_broken": 31,
    }
    return reliance_row(model, cue, intervention, 0.5, 0.06, **values | more)


def head_row(
    row: RelianceRow, head: int, share: float, control: float, **more: object
) -> CueHeadRow:
    """Return a head of layer 3 that carries these shares of a cue's effect and its control's."""
    values = {
        "share": Estimate(share, share - 0.02, share + 0.02, N),
        "control": Estimate(control, control - 0.02, control + 0.02, N),
        "p_holm": 1e-6,
        "accuracy": Estimate(2.0, 1.0, 3.0, N, "points"),
    }
    return CueHeadRow(
        model=row.model,
        cue=row.cue,
        intervention=row.intervention,
        layer=3,
        head=head,
        **values | more,
    )  # type: ignore[arg-type]


def map_row(row: RelianceRow, method: str, area: float, p_holm: float = 1e-6) -> CueMapRow:
    """Return a method whose maps separate the images that a cue decides, with this area."""
    return CueMapRow(
        model=row.model,
        cue=row.cue,
        intervention=row.intervention,
        method=method,
        decided=Estimate(0.6, 0.55, 0.65, N),
        others=Estimate(0.4, 0.35, 0.45, N),
        area=Estimate(area, area - 0.05, area + 0.05, N),
        p_holm=p_holm,
    )


def examples_of(
    row: RelianceRow, count: int = 2
) -> tuple[tuple[CueExampleRow, ...], CueExampleArrays]:
    """Return images that are classified correctly without a cue, with their pixels and maps."""
    example = CueExampleRow(
        model=row.model,
        cue=row.cue,
        intervention=row.intervention,
        label="ant",
        before="dog",
        after="ant",
    )
    generator = np.random.default_rng(0)
    pixels = [generator.integers(256, size=(count, 3, 16, 16), dtype=np.uint8) for _ in range(2)]
    regions = np.ones((count, 16, 16), dtype=bool)
    maps = generator.random((count, 4, 4), dtype=np.float32)
    return (example,) * count, CueExampleArrays(*pixels, regions, maps)


def pair_row(
    first: RelianceRow, second: RelianceRow, p_holm: float, *, accuracy: Estimate | None = None
) -> ReliancePairRow:
    """Return the difference of two rows; accuracy: that of the models' accuracy without the cue."""
    gap = first.changed.value - second.changed.value
    estimate = Estimate(gap, gap - 4, gap + 4, N, "points")
    by = 100 * (first.changed_by.value - second.changed_by.value)
    relying = tuple(row.model for row in (first, second) if row.is_relied_on)
    return ReliancePairRow(
        cue=first.cue,
        intervention=first.intervention,
        first=first.model,
        second=second.model,
        changed=estimate,
        lost=estimate,
        p=p_holm,
        p_lost=p_holm,
        is_matched=first.is_matched,
        changed_by=by,
        relying=relying,
        accuracy=accuracy,
        p_holm=p_holm,
        p_lost_holm=p_holm,
    )


def record_of(
    *rows: RelianceRow,
    pairs: tuple[ReliancePairRow, ...] = (),
    left_out: str = "",
    **tables: object,
) -> CompareRecord:
    """Return a comparison of two equal models with these rows; left_out: an untested cue."""
    right = np.random.default_rng(0).random(1000) > 0.1
    record = compare_record(
        {alias: answers(right) for alias in PAIR}, methods=("relevance", "gradcam"), seed=0
    )
    gone = (LeftOutCueRow(left_out, "the objects' masks are not known"),) if left_out else ()
    return replace(record, reliance=rows, reliance_pairs=pairs, reliance_left_out=gone, **tables)
