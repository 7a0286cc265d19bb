"""Every number of every golden run lies within its bounds, and so does its interval."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from tests.kit.golden import LINES
from vitlens.uncertainty import Estimate

BOUNDS = {"fraction": (0.0, 1.0), "points": (-100.0, 100.0), "": (-1.0, 1.0)}
SIGNED = {  # differences of shares
    "AgreementRow.half_difference",
    "FeatureScoreRow.value",
    "LeagueRow.gap",
    "LeagueRow.road",
    "PredictedClassRow.gap",
    "ScoreRow.confidence_gap",
}
TWICE = {"MapCheckRow.margin", "MapCheckRow.behind"}  # differences of differences of shares
COSINE_DISTANCES = {"BlockDistanceRow.distance"}  # 1 minus a cosine
POSITIVE = {  # of any size: relative to a mean, norms, places
    "HeadRow.output",
    "DictionaryRow.l0",  # a number of latents
    "AttackRow.median",
    "AttackedModelRow.halfway",
    "LayerRow.statistics.token_norm",
    "LayerRow.statistics.greatest_norm",
    "HeadRow.statistics.energy",
    "HeadsRow.statistics.energy",
    "LayerRow.remaining",  # a loss, relative to that of uniform attention
}
UNBOUNDED = {
    "ChoiceScores.selection.score",
    "ChoiceScores.report.score",
    "ChoiceMargin.difference",
    "ExponentRow.exponent",
    "PushedRow.adds",
    "SwappedRow.by_first",
    "SwappedRow.by_second",
}


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, Estimate]]:
    """Yield every estimate below a value, with the row class and the field that hold it."""
    if isinstance(value, Estimate):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from numbers(entry, f"{name}.{key}" if isinstance(entry, Estimate) else name)
    elif isinstance(value, tuple):
        for entry in value:
            yield from numbers(entry, name)
    elif is_dataclass(value):
        for attribute in fields(value):
            yield from numbers(
                getattr(value, attribute.name), f"{type(value).__name__}.{attribute.name}"
            )


def bounds_of(name: str, unit: str) -> tuple[float, float]:
    if name in SIGNED:
        return -1.0, 1.0
    if name in TWICE:
        return -2.0, 2.0
    if name in COSINE_DISTANCES:
        return 0.0, 2.0
    if name in POSITIVE:
        return 0.0, math.inf
    if name in UNBOUNDED or unit not in BOUNDS:
        return -math.inf, math.inf
    return BOUNDS[unit]


@pytest.mark.parametrize("name", LINES)
def test_every_number_and_its_interval_lie_where_they_can(name, golden):
    wrong = []
    for place, number in numbers(golden(name).record):
        least, most = bounds_of(place, number.unit)
        low = number.value if number.low is None else number.low
        high = number.value if number.high is None else number.high
        if not least <= low <= number.value <= high <= most:
            wrong.append((place, number))
    assert not wrong
