"""Which models and statistics the report shows, and how many panels a figure holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from vitlens.analysis.heads.registry import STATISTICS, View, shown_in
from vitlens.commands.stats.record import (
    BACKBONES,
    HEADS,
    LAYERS,
    STATISTIC_ARRAYS,
    AttentionLayerRow,
    BackbonesRow,
    HeadRow,
    StatisticArrays,
)
from vitlens.records import Record

_PANELS: Final = 6  # in a figure


@dataclass(frozen=True)
class ModelShown:
    """One model of the report. suffix, of: appended to the names and titles of its figures where there are two
    models."""

    alias: str
    heads: tuple[HeadRow, ...]
    layers: tuple[AttentionLayerRow, ...]
    arrays: StatisticArrays
    suffix: str
    of: str

    @cached_property
    def by_layer(self) -> Mapping[int, tuple[HeadRow, ...]]:
        """Its heads by layer."""
        return {row.layer: tuple(head for head in self.heads if head.layer == row.layer) for row in self.layers}


def backbones(record: Record) -> BackbonesRow | None:
    """What two models have in common; None for one model."""
    return next(iter(record.rows(BACKBONES)), None)


def are_identical(record: Record) -> bool:
    """Whether two models have the same backbone."""
    row = backbones(record)
    return row is not None and row.identical


def models_shown(record: Record) -> tuple[ModelShown, ...]:
    """The models; of two with the same backbone only the first, as the figures of the other would be the same."""
    several = len(record.aliases) > 1
    return tuple(
        ModelShown(
            alias,
            tuple(row for row in record.rows(HEADS) if row.model == alias),
            tuple(row for row in record.rows(LAYERS) if row.model == alias),
            record.arrays(STATISTIC_ARRAYS, model=alias),
            f"_{alias}" if several else "",
            f" of {alias}" if several else "",
        )
        for alias in (record.aliases[:1] if are_identical(record) else record.aliases)
    )


def title_of(name: str) -> str:
    """The name of a statistic in figures and tables."""
    return STATISTICS[name].title


def is_measured(values: Mapping[str, Any], name: str) -> bool:
    """Whether any head has this statistic."""
    return name in values and not bool(np.isnan(values[name]).all())


def measured_in(view: View, values: Mapping[str, Any]) -> list[str]:
    """The statistics of a view that at least one head has."""
    return [name for name in shown_in(view) if is_measured(values, name)]


def panel_of(name: str) -> str:
    """The statistic whose panel of the curves over depth also shows this one."""
    return STATISTICS[name].beside or name


def pages(name: str, panels: Sequence[str]) -> dict[str, Sequence[str]]:
    """The panels of each figure, by its name: as many as a figure holds, the rest in NAME-2 and so on."""
    starts = range(0, len(panels), _PANELS)
    return {f"{name}-{page}" if page > 1 else name: panels[at : at + _PANELS] for page, at in enumerate(starts, 1)}
