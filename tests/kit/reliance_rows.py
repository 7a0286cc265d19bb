"""Rows of reliance with planted effects."""

from dataclasses import replace

import numpy as np

from tests.kit.planted_answers import answers, compare_record
from vitlens.analysis.reliance.rows import LeftOutCueRow, ReliancePairRow, RelianceRow
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


def pair_row(first: RelianceRow, second: RelianceRow, p_holm: float) -> ReliancePairRow:
    """Return the difference of two rows."""
    gap = first.changed.value - second.changed.value
    estimate = Estimate(gap, gap - 4, gap + 4, N, "points")
    by = 100 * (first.changed_by.value - second.changed_by.value)
    relying = tuple(row.model for row in (first, second) if row.is_relied_on)
    return ReliancePairRow(
        cue=first.cue, intervention=first.intervention, first=first.model, second=second.model, changed=estimate,
        lost=estimate, p=p_holm, p_lost=p_holm, is_matched=first.is_matched, changed_by=by, relying=relying,
        p_holm=p_holm, p_lost_holm=p_holm,
    )  # fmt: skip


def record_of(*rows: RelianceRow, pairs: tuple[ReliancePairRow, ...] = (), left_out: str = "") -> CompareRecord:
    """Return a comparison of two equal models with these rows; left_out: a cue that could not be tested."""
    right = np.random.default_rng(0).random(1000) > 0.1
    record = compare_record({alias: answers(right) for alias in PAIR}, methods=("relevance", "gradcam"), seed=0)
    gone = (LeftOutCueRow(left_out, "the objects' masks are not known"),) if left_out else ()
    return replace(record, reliance=rows, reliance_pairs=pairs, reliance_left_out=gone)
