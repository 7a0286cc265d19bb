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

_MOST_LAYERS: Final = 6  # drawn of each model, if there are several


@dataclass(frozen=True)
class FieldRow(OfModel):
    """The pixels on which the middle patch of one layer depends.

    Estimates are means over images with Student's 95 % interval.

    model: the alias of the model.
    words: the name of the model in tables and figures.
    layer: the number of the layer.
    title: the layer in words.
    distance: the mean distance from the patch to a pixel, weighted by the norm of the gradient.
    uniform: the distance in px if all pixels had equal weight.
    half: the least share of the pixels that holds half of the gradient.
    seen: the share of the pixels with any gradient.
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

    field: (height, width), the norm of the gradient at each pixel, mean over images, by index of
        the FieldRow.
    """

    field: Mapping[int, Matrix]


def field_rows(
    fields: "Mapping[tuple[str, str], Sequence[ReceptiveField]]",
) -> tuple[tuple[FieldRow, ...], FieldArrays | None]:
    """Return a row and a map for each layer of each model; None for the maps if there is no layer.

    fields: by the alias of a model and its name in words.
    """
    rows: list[FieldRow] = []
    maps = {}
    for (alias, words), layers in fields.items():
        for layer in layers:
            # its key is the index of the row that is added below
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
    if not rows:
        return (), None
    return tuple(rows), FieldArrays(maps)


def field_charts() -> tuple[Chart, ...]:
    """Return charts of the distance and of the share of pixels by layer, and of the maps."""
    from vitlens.charts import images, lines

    return (
        Chart(
            "receptive_field",
            lines("layer", "distance", "uniform", panel="words", y_title="distance (px)"),
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
    """Yield the maps of a single model, or evenly spaced ones of each of several models."""
    from vitlens.charts import Picture

    rows_by_model: dict[str, list[int]] = {}  # indices of rows
    for index, row in enumerate(record.receptive_fields):
        rows_by_model.setdefault(row.model, []).append(index)
    is_single = len(rows_by_model) == 1
    for indices in rows_by_model.values():
        count = len(indices)
        if not is_single:
            count = min(count, _MOST_LAYERS)
        for position in evenly(len(indices), count):
            index = indices[position]
            row = record.receptive_fields[index]
            norms = np.asarray(record.field_maps.field[index], float)
            root = np.sqrt(np.where(norms > 0, norms, np.nan))  # drawn grey where NaN
            row_title = "" if is_single else row.words
            yield Picture(None, root, row=row_title, below=f"layer {row.layer}")
