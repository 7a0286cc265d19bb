"""Verdicts and findings of `vitlens explain`, from its record: which map may be trusted."""

from collections.abc import Iterator
from dataclasses import replace
from math import hypot
from typing import Final

from vitlens.analysis.faithfulness.cascade import Cascade, RandomisedStage, judged_cascade
from vitlens.analysis.faithfulness.steadiness import JUMPY
from vitlens.commands.explain.choice_record import CHOICE
from vitlens.commands.explain.evidence_record import SHIFTS, STABILITY, STEADY, SWAPPED
from vitlens.commands.explain.record import CHECKS, LEAGUE, METHODS, SETTINGS, LeagueRow
from vitlens.commands.shared.maps.findings import listed, map_findings, uniform_finding
from vitlens.commands.shared.maps.judged import explanation_verdict
from vitlens.commands.shared.maps.rows import BASELINES, MapCheck, Margin
from vitlens.records import Record
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import finding
from vitlens.uncertainty import Estimate, widened

UNTESTED: Final = "no check was run; add --verify"
CHOSEN: Final = "only the checks of the choice were run; add --verify"


def verdicts(record: Record) -> Iterator[Verdict]:
    """Which map of each model may be trusted on these images."""
    chosen = {row.model for row in record.rows(CHOICE) if not row.reason}
    for alias in record.aliases:
        untested = CHOSEN if alias in chosen else UNTESTED
        yield explanation_verdict(alias, checks_of(record, alias), untested=untested)


def findings(record: Record) -> Iterator[Finding | None]:
    """Methods that fail a check or fall below a baseline, uniform maps, and a method that is clearly the best."""
    for alias in record.aliases:
        suffix = f"_{alias}" if len(record.aliases) > 1 else ""
        yield from map_findings(alias, checks_of(record, alias), figure=f"league{suffix}")
        rows = [row for row in record.rows(METHODS) if row.model == alias]
        unusable = {row.method: row.constant + row.not_finite for row in rows}
        yield uniform_finding(alias, unusable, max((row.maps for row in rows), default=0), rows)
        yield _jumping(record, alias)
        yield _swapping(record, alias)


def _jumping(record: Record, alias: str) -> Finding | None:
    """The method whose maps jump most when images are shifted by at most one pixel."""
    rows = [row for row in record.rows(STABILITY) if (row.model, row.disturbance) == (alias, SHIFTS)]
    flagged = [row for row in rows if row.state == "jumps"]
    if not flagged:
        return None
    worst = max(flagged, key=lambda row: row.jumped or 0.0)
    share = record.metric(STEADY(model=alias, score="jumped", disturbance=SHIFTS, method=worst.method))
    others = [row.method for row in flagged if row is not worst]
    also = f" Flagged for the same: {listed(others)}." if others else ""
    return finding(
        f"The top point of **{worst.method}**'s maps of **{alias}** jumps on this share of the images when they are "
        f"shifted by at most one pixel.{also}",
        _within(widened(share, len(rows))),
        kind="hidden fault",
        reference=JUMPY,
        rows=tuple(flagged),
    )


def _within(share: Estimate) -> Estimate:
    """A fraction whose widened interval ends at 0 and 1."""
    low, high = (None if end is None else min(max(end, 0.0), 1.0) for end in (share.low, share.high))
    return Estimate(share.value, low, high, share.n, share.unit)


def _swapping(record: Record, alias: str) -> Finding | None:
    """Two methods that change places with what replaces a removed patch."""
    rows = [row for row in record.rows(SWAPPED) if row.model == alias]
    if not rows:
        return None
    worst = max(rows, key=lambda row: min(row.in_first.value, -row.in_second.value))
    return finding(
        f"Which map is more faithful to **{alias}** depends on what replaces a removed patch: with {worst.first} "
        f"{worst.better} is above {worst.worse}, with {worst.second} below it (difference there).",
        worst.in_second,
        kind="hidden fault",
        rows=tuple(rows),
    )


def checks_of(record: Record, alias: str) -> tuple[MapCheck, ...]:
    """The checks of a model's methods without the baselines, the best first; none without
    --verify. In folders of earlier versions they follow from the metrics that those wrote."""
    rows = [row for row in record.rows(LEAGUE) if row.model == alias and not row.baseline]
    return tuple(_check(record, row) for row in rows)


def is_paired(record: Record, alias: str) -> bool:
    """Whether the differences of a model's methods from the baselines were taken image by image."""
    rows = [row for row in record.rows(LEAGUE) if row.model == alias and not row.baseline]
    return all(row.check is not None and row.check.margins for row in rows)


def _check(record: Record, row: LeagueRow) -> MapCheck:
    check = row.check or _of_older(record, row)
    return check if check.margins else replace(check, margins=_unpaired_margins(record, row))


def _of_older(record: Record, row: LeagueRow) -> MapCheck:
    """The checks of a row without them: no paired differences, and no interval of the stages but the last."""
    gap = record.metric(CHECKS["gap"](model=row.model, method=row.method))
    own = next((each for each in record.rows(METHODS) if (each.model, each.method) == (row.model, row.method)), None)
    return MapCheck(
        model=row.model,
        method=row.method,
        images=gap.n or 0,
        unusable=0 if own is None else own.constant + own.not_finite,
        gap=gap.value,
        low=gap.low,
        high=gap.high,
        road=row.road,
        margins=(),
        cascade=_older_cascade(record, row),
    )


def _unpaired_margins(record: Record, row: LeagueRow) -> tuple[Margin, ...]:
    """Differences with the interval of independent means, which is wider than that of paired ones."""
    gap = record.metric(CHECKS["gap"](model=row.model, method=row.method))
    bases = [(name, record.metric(CHECKS["gap"](model=row.model, method=name))) for name in BASELINES]
    return tuple(_unpaired(gap, base, name) for name, base in bases)


def _unpaired(own: Estimate, other: Estimate, against: str) -> Margin:
    difference, low, high = own.value - other.value, None, None
    if None not in (own.low, own.high, other.low, other.high):
        below = hypot(own.value - (own.low or 0.0), (other.high or 0.0) - other.value)
        above = hypot((own.high or 0.0) - own.value, other.value - (other.low or 0.0))
        low, high = difference - below, difference + above
    return Margin(against, difference, low, high, own.n or 0)


def _older_cascade(record: Record, row: LeagueRow) -> Cascade | None:
    if row.by_stage is None:
        return None
    last = record.metrics.get(CHECKS["randomisation"](model=row.model, method=row.method))
    stages = [RandomisedStage(name, mean) for name, mean in row.by_stage.items()]
    if last is not None:
        stages[-1] = RandomisedStage(stages[-1].name, last.value, last.low, last.high)
    images = next((each.randomised for each in record.rows(SETTINGS) if each.model == row.model), 0)
    return judged_cascade(stages, images if last is None else last.n or 0)
