"""Verdicts and findings of `vitlens rollout`, from its record."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vitlens.commands.rollout.record import CHECKS, MAP_PAIRS, MAPS, MapRow
from vitlens.commands.scaffold.maps.information import fixed_map, uniform_map
from vitlens.commands.scaffold.maps.on_object import ON_OBJECT, beyond_baseline
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Support, Verdict
from vitlens.report.findings import finding
from vitlens.uncertainty import Side, widened, wilson

AGREEING: Final = 0.5  # Spearman's correlation, below which two maps disagree


def verdicts(record: Record) -> Iterator[Verdict]:
    """Which map may be trusted is not tested by this command."""
    (alias,) = record.aliases
    because = (
        "no patch was removed, so it is not known whether a map shows what the output depends on; run vitlens explain"
    )
    yield rules.not_tested(f"explanation of {alias}", because)


def findings(record: Record) -> Iterator[Finding | None]:
    """Maps that are zero, uniform or fixed, rollout that depends on how heads are fused, and the pointing game."""
    kinds = {row.method: row for row in record.rows(MAPS)}
    checks = record.rows(CHECKS)
    for row in kinds.values():
        yield _empty(record, row)
    for fault in (uniform_map, fixed_map):
        found = [
            fault(
                check,
                f"The maps of **{title_of(kinds[check.maps])}**",
                len(checks),
                figure=figure_of(kinds[check.maps]),
            )
            for check in checks
        ]
        yield max((each for each in found if each is not None), key=lambda each: each.rank, default=None)
    yield _fusions(record, kinds)
    yield _pointing(record, kinds)


def title_of(row: MapRow) -> str:
    """A kind of map in figures and sentences."""
    return f"rollout ({row.fusion})" if row.fusion else row.method


def figure_of(row: MapRow) -> str:
    """The figure that draws it first, where all images are on one sheet."""
    return "rollout" if row.fusion else "methods"


def images_in(record: Record) -> int:
    """The number of images whose maps were computed."""
    return record.config.data.images if record.config.data else 0


def _empty(record: Record, row: MapRow) -> Finding | None:
    n = images_in(record)
    if not row.empty_maps or row.empty_maps > n:
        return None
    share = wilson(row.empty_maps, n)
    return finding(
        f"{row.empty_maps} of {n} maps of **{title_of(row)}** are zero everywhere: no attention weight raises the "
        "target's logit there.",
        share,
        kind="hidden fault",
        figure=figure_of(row),
        rows=(row, share),
    )


def _fusions(record: Record, kinds: dict[str, MapRow]) -> Finding | None:
    """The two fusions of heads whose rollouts agree least."""
    pairs = [row for row in record.rows(MAP_PAIRS) if kinds[row.first].fusion and kinds[row.second].fusion]
    apart_pairs = [
        row for row in pairs if (high := widened(row.estimate, len(pairs)).high) is not None and high < AGREEING
    ]
    if not apart_pairs:
        return None
    row = min(apart_pairs, key=lambda row: row.agreement)
    one, two = kinds[row.first].fusion, kinds[row.second].fusion
    return finding(
        f"Rollout depends on how heads are fused: the maps of the {one} and of the {two} of heads have a rank "
        f"correlation of {row.agreement:.2f}.",
        row.estimate,
        kind="hidden fault",
        reference=AGREEING,
        figure="rollout",
        support="methods disagree",
        rows=(row,),
    )


def _pointing(record: Record, kinds: dict[str, MapRow]) -> Finding | None:
    """The kind of map that is furthest from its baseline in the pointing game; below it before above."""
    rows = record.rows(ON_OBJECT)
    found = []
    for row in rows:
        kind = kinds[row.maps]
        each = beyond_baseline(row, f"**{title_of(kind)}**", len(rows), figure=figure_of(kind), rows=(kind,))
        if each is not None:
            sides = {other.side for other in rows}
            support: Support = "one method" if len(rows) == 1 else "methods disagree"
            if len(rows) > 1 and len(sides) == 1 and Side.UNDECIDED not in sides:
                support = "two methods agree"
            found.append(replace(each, support=support))
    return max(found, key=lambda each: each.rank) if found else None
