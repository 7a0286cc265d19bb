"""The effective receptive field of each layer of some models: rows, arrays and charts; free of torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.arrays import Matrix
from vitlens.commands.shared.sheets import evenly
from vitlens.record import OfModel, by, col
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from vitlens.analysis.features.receptive_field import ReceptiveField
    from vitlens.charts import Picture

_LAYERS: Final = 6  # maps of each of several models


@dataclass(frozen=True)
class FieldRow(OfModel):
    """What the middle patch of one layer depends on, means over images with Student's 95 % interval.

    model: its alias, words: its name in tables and figures; uniform: the distance for equal weights.
    """

    words: str = col("model")
    layer: int = col("layer")
    title: str = col("after")
    distance: Estimate = col(
        "distance", term="mean distance from the patch to a pixel, weighted by the norm of the gradient"
    )
    uniform: float = col("distance if uniform", unit="px")
    half: Estimate = col("pixels with half of the gradient", term="the least share of the pixels that holds half of it")
    seen: float = col("pixels with any", unit="fraction")


@dataclass(frozen=True)
class FieldArrays:
    """field: by row of the table, the norm of the gradient at each pixel (height, width), mean over images."""

    field: Mapping[int, Matrix]


def field_rows(
    fields: "Mapping[tuple[str, str], Sequence[ReceptiveField]]",
) -> tuple[tuple[FieldRow, ...], FieldArrays | None]:
    """Return the fields of each model, by its alias and its name in words; None for the arrays of no model."""
    known = [(alias, words, field) for (alias, words), of_model in fields.items() for field in of_model]
    rows = tuple(
        FieldRow(alias, words, each.layer, each.title, each.distance, each.uniform, each.half, each.seen)
        for alias, words, each in known
    )
    maps = {index: np.asarray(each.field.float().numpy()) for index, (_, _, each) in enumerate(known)}
    return rows, FieldArrays(maps) if rows else None


def field_charts() -> tuple[Chart, ...]:
    """Return the distance and the share of the pixels by layer, and the maps, of a record with both."""
    from vitlens.charts import images, lines

    return (
        Chart(
            "receptive_field",
            lines("layer", "distance", "uniform", panel="words"),
            "Distance from the middle patch to the pixels that change it, weighted by the gradient, with intervals; "
            "uniform: if all pixels counted equally.",
            title="Effective receptive field by layer",
            rows="receptive_fields",
        ),
        Chart(
            "receptive_seen",
            lines("layer", "seen", of="words"),
            "Share of the pixels with any gradient, however small, by layer.",
            title="Pixels that a patch depends on at all",
            rows="receptive_fields",
        ),
        Chart(
            "receptive_maps",
            images(),
            "Square root of the norm of the gradient at each pixel, by layer. Each map has its own colours; pixels "
            "without any gradient are grey.",
            title="Effective receptive field of the middle patch, layer by layer",
            rows=_maps,
        ),
    )


def _maps(record: Any) -> "Iterator[Picture]":
    """Yield the square roots of the norms at each pixel; of several models evenly spaced layers."""
    from vitlens.charts import Picture

    models = by(record.receptive_fields, "model")
    places = {id(row): at for at, row in enumerate(record.receptive_fields)}
    for rows in models.values():
        most = len(rows) if len(models) == 1 else min(len(rows), _LAYERS)
        for at in evenly(len(rows), most):
            field = np.asarray(record.field_maps.field[places[id(rows[at])]], float)
            shown = np.sqrt(np.where(field > 0, field, np.nan))
            yield Picture(None, shown, rows[at].words if len(models) > 1 else "", below=f"layer {rows[at].layer}")
