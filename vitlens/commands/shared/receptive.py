"""The effective receptive field of each layer of some models: rows, arrays and figures; free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.record import by, col
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.analysis.features.receptive_field import ReceptiveField


@dataclass(frozen=True)
class FieldRow:
    """What the middle patch of one layer depends on, means over images with Student's 95 % interval.

    model: its alias, words: its name in tables and figures; uniform: the distance for equal weights.
    """

    model: str = col("model")
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

    field: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]


def field_rows(
    fields: "Mapping[tuple[str, str], Sequence[ReceptiveField]]",
) -> tuple[tuple[FieldRow, ...], FieldArrays | None]:
    """The fields of each model, by its alias and its name in words; None for the arrays of no model."""
    known = [(alias, words, field) for (alias, words), of_model in fields.items() for field in of_model]
    rows = tuple(
        FieldRow(alias, words, each.layer, each.title, each.distance, each.uniform, each.half, each.seen)
        for alias, words, each in known
    )
    maps = {index: np.asarray(each.field.float().numpy()) for index, (_, _, each) in enumerate(known)}
    return rows, FieldArrays(maps) if rows else None


def draw_depth(rows: Sequence[FieldRow]) -> "Figure":
    """How far the middle patch sees by layer, and the share of the pixels that it sees."""
    from vitlens.figures.windows.receptive import FieldCurve, field_by_depth

    return field_by_depth(
        curves=[
            FieldCurve(
                layers[0].words,
                distances=[_ends(row.distance) for row in layers],
                seen=[row.seen for row in layers],
                uniform=[row.uniform for row in layers],
            )
            for layers in by(rows, "model").values()
        ]
    )


def draw_maps(rows: Sequence[FieldRow], arrays: FieldArrays) -> "Figure":
    """The norm of the gradient at each pixel, by layer."""
    from vitlens.figures.windows.receptive import field_maps

    fields: dict[str, list[NDArray[np.floating]]] = {}
    for index, row in enumerate(rows):
        fields.setdefault(row.words, []).append(arrays.field[index])
    return field_maps(fields=fields)


def _ends(each: Estimate) -> list[float]:
    return [each.value if end is None else end for end in (each.value, each.low, each.high)]
