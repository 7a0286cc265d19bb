"""Measuring what models rely on: the rows of shared/reliance.py, as fields of a record."""

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Any

from vitlens.analysis.evaluation.evaluate import require_labels
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.reliance.cues import CUES, interventions_of
from vitlens.analysis.reliance.measure import Level, Measured, Plan, Viewer
from vitlens.data.split import Split
from vitlens.models.model import Model


def viewers_of(models: Sequence[Model], splits: Sequence[Split], precision: str) -> list[Viewer]:
    """Return models with their images, which are labelled."""
    return [Viewer(model, split, require_labels(split).cpu().long(), precision) for model, split in zip(models, splits)]


def plan_of(splits: Sequence[Split], *, thorough: bool, levels: bool) -> Plan:
    """Return all interventions or the main ones, with the levels of all disturbances where they are wanted."""
    interventions = tuple(interventions_of(tuple(CUES), thorough=thorough))
    size = (reduce(gcd, [split.size[0] for split in splits]), reduce(gcd, [split.size[1] for split in splits]))
    every = list[Level]()
    for kind, disturbance in DISTURBANCES.items() if levels else ():
        every += [(kind, level) for level in disturbance.at(size)]
    return Plan(interventions, tuple(every))


def reliance_fields(found: Measured) -> dict[str, Any]:
    """Return the tables, as keyword arguments of a record."""
    return {
        "reliance": found.rows,
        "reliance_pairs": found.pairs,
        "reliance_left_out": found.left_out,
    }
