"""Whether the maps of two models may be compared: by one method for both, or by each model's verified best."""

from dataclasses import dataclass
from typing import Final

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import MAP_CHECKS, METHODS, MapMethodRow
from vitlens.commands.shared.maps.judged import JudgedMap, judged_maps
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.records import Record

_NO_CHECKS: Final = "this folder has no checks of its maps; run the command again"


@dataclass(frozen=True)
class MapComparison:
    """The methods of both models' maps, and whether a difference between the maps says something about the models.

    same: one method for both; fair: that, or each model's method passes its checks; words: how a sentence names the
    methods; rows: what backs it.
    """

    methods: tuple[MapMethodRow, MapMethodRow]
    judged: tuple[JudgedMap | None, JudgedMap | None]
    same: bool
    fair: bool
    words: str

    @property
    def rows(self) -> tuple[object, ...]:
        """The rows that name the methods and their checks."""
        return (*self.methods, *(each.check for each in self.judged if each is not None))


def map_comparison(record: Record) -> MapComparison:
    """How the maps of a record's two models can be compared."""
    first, second = record.rows(METHODS)
    judged = (_judged(record, first), _judged(record, second))
    same = first.method == second.method
    verified = all(each is not None and each.state == "pass" for each in judged)
    named = " and ".join(f"{ATTRIBUTIONS[row.method].title} for {row.model}" for row in (first, second))
    if same:
        words = f"by {ATTRIBUTIONS[first.method].title} for both models"
    elif verified:
        asked = bool(record.options(CompareOptions).method)
        words = f"by {named}, {'both verified' if asked else 'each the verified best of its model'} on these images"
    else:
        words = f"by {named}"
    return MapComparison((first, second), judged, same, same or verified, words)


def unfair_words(comparison: MapComparison) -> str:
    """Why maps by two methods are not compared."""
    reasons = [
        f"{row.method} of {row.model}: {_NO_CHECKS if judged is None else f'{judged.state}, {judged.because}'}"
        for row, judged in zip(comparison.methods, comparison.judged)
        if judged is None or judged.state != "pass"
    ]
    return "; ".join(dict.fromkeys(reasons))


def checks_of(record: Record, alias: str) -> tuple[MapCheck, ...]:
    """The checks of the methods of one model."""
    return tuple(row for row in record.rows(MAP_CHECKS) if row.model == alias)


def _judged(record: Record, row: MapMethodRow) -> JudgedMap | None:
    return next((each for each in judged_maps(checks_of(record, row.model)) if each.check.method == row.method), None)
