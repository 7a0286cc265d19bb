"""The effective receptive field of each layer of some models: rows, arrays and charts; free of
torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.arrays import Matrix
from vitlens.commands.shared.sheets import evenly
from vitlens.record import OfModel, col
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from vitlens.analysis.features.receptive_field import ReceptiveField
    from vitlens.charts import Picture

_LAYERS: Final = 6  # maps of each of several models


@dataclass(frozen=True)
class FieldRow(OfModel):
    """The pixels on which the middle patch of one layer depends, means over images with Student's
    95 % interval.

    model: its alias; words: its name in tables and figures; uniform: the distance if all pixels had
    equal weight.
    """

    words: str = col("model")
    layer: int = col("layer")
    title: str = col("after")
    distance: Estimate = col(
        "distance",
        term="mean distance from the patch to a pixel, weighted by the norm of the gradient",
    )
    uniform: float = col("distance if uniform", unit="px")
    half: Estimate = col(
        "pixels with half of the gradient",
        term="the least share of the pixels that holds half of it",
    )
    seen: float = col("pixels with any", unit="fraction")


@dataclass(frozen=True)
class FieldArrays:
    """Maps of receptive fields.

    field: norm of the gradient at each pixel (height, width), mean over images, by row of the
    table.
    """

    field: Mapping[int, Matrix]


def field_rows(
    fields: "Mapping[tuple[str, str], Sequence[ReceptiveField]]",
) -> tuple[tuple[FieldRow, ...], FieldArrays | None]:
    """Return a row and a map for each layer of each model; None in place of the maps of no layer.

    fields: by the alias of a model and its name in words.
    """
    rows: list[FieldRow] = []
    maps = {}
    for (alias, words), layers in fields.items():
        for layer in layers:
            maps[len(rows)] = np.asarray(layer.field.float().numpy())
            row = FieldRow(
                alias,
                words=words,
                layer=layer.layer,
                title=layer.title,
                distance=layer.distance,
                uniform=layer.uniform,
                half=layer.half,
                seen=layer.seen,
            )
            rows.append(row)
    return tuple(rows), FieldArrays(maps) if rows else None


def field_charts() -> tuple[Chart, ...]:
    """Return charts of the distance and of the share of pixels by layer, and of the maps."""
    from vitlens.charts import images, lines

    return (
        Chart(
            "receptive_field",
            lines("layer", "distance", "uniform", panel="words"),
            "Distance from the middle patch to the pixels that change it, weighted by the "
            "gradient, with intervals; uniform: if all pixels counted equally.",
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
            "Square root of the norm of the gradient at each pixel, by layer. Each map has its "
            "own colours; pixels without any gradient are grey.",
            title="Effective receptive field of the middle patch, layer by layer",
            rows=_maps,
        ),
    )


def _maps(record: Any) -> "Iterator[Picture]":
    """Yield the square roots of the norms at each pixel; for several models, of evenly spaced
    layers.
    """
    from vitlens.charts import Picture

    indices: dict[str, list[int]] = {}
    for index, row in enumerate(record.receptive_fields):
        indices.setdefault(row.model, []).append(index)
    is_single = len(indices) == 1
    for of_model in indices.values():
        most = len(of_model) if is_single else min(len(of_model), _LAYERS)
        for position in evenly(len(of_model), most):
            index = of_model[position]
            row = record.receptive_fields[index]
            field = np.asarray(record.field_maps.field[index], float)
            root = np.sqrt(np.where(field > 0, field, np.nan))
            yield Picture(None, root, "" if is_single else row.words, below=f"layer {row.layer}")
