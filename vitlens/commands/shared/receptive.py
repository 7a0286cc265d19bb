"""The effective receptive field of each layer: rows and arrays, their figures and their section; free of torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.record import by, col
from vitlens.records import ArraysOf, Record, TableOf
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.analysis.features.receptive_field import ReceptiveField
    from vitlens.commands.run.folder import RunFolder


@dataclass(frozen=True)
class FieldRow:
    """What the middle patch of one layer depends on, means over images with Student's 95 % interval.

    model: its alias, words: its name in tables and figures; uniform: the distance for equal weights.
    """

    model: str = col("model")
    words: str = col("model in words")
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


FIELDS = TableOf("receptive_fields", FieldRow, optional=True)
FIELD_MAPS = ArraysOf("receptive_fields", FieldArrays)

Fields: TypeAlias = "Mapping[tuple[str, str], Sequence[ReceptiveField]]"


def field_rows(fields: Fields) -> tuple[tuple[FieldRow, ...], FieldArrays | None]:
    """The fields of each model, by its alias and its name in words; None for the arrays of no model."""
    known = [(alias, words, field) for (alias, words), of_model in fields.items() for field in of_model]
    rows = tuple(
        FieldRow(alias, words, each.layer, each.title, each.distance, each.uniform, each.half, each.seen)
        for alias, words, each in known
    )
    maps = {index: np.asarray(each.field.float().numpy()) for index, (_, _, each) in enumerate(known)}
    return rows, FieldArrays(maps) if rows else None


def write_fields(folder: "RunFolder", fields: Fields) -> None:
    """Write the fields of each model; nothing is stored for no model."""
    rows, maps = field_rows(fields)
    folder.write(FIELDS, rows)
    if maps is not None:
        folder.save(FIELD_MAPS, maps)


_METHOD: Final = (
    "The gradient of the features of the patch in the middle of each layer's map with respect to every pixel (Luo "
    "2016): its norm, estimated with random directions of the features and averaged over images. Distance: from the "
    "patch to a pixel, weighted by the norm; half: the least share of the pixels that holds half of all norms (50 % if "
    "all are equal); seen: the share whose gradient is not exactly 0."
)
_LIMIT: Final = "A gradient is that of small changes at these images, and of one patch; patches at the edge see less."


def field_section(record: Record) -> Iterator[Section]:
    """How far the models see by depth, where it was measured."""
    rows = record.rows(FIELDS)
    if not rows:
        return
    arrays = record.arrays(FIELD_MAPS)
    yield Section(
        "Effective receptive field by depth",
        (*_sentences(rows), *sentences(_METHOD, _LIMIT, says="method")),
        (_table(rows),),
        (
            FigureSpec(
                "receptive_field",
                "Distance from the middle patch to the pixels that move it, weighted by the gradient, and the share of "
                "the pixels that move it at all, by layer; bands: 95 % intervals; dashed: all pixels alike.",
                partial(draw_depth, rows),
            ),
            FigureSpec(
                "receptive_maps",
                "The norm of the gradient at each pixel. Each map has its own colours, from 0 to its largest value "
                "by the square root, so only places can be compared; pixels without any gradient are grey.",
                partial(draw_maps, rows, arrays),
            ),
        ),
        "How far does a patch see?",
        leading=True,
    )


def _sentences(rows: Sequence[FieldRow]) -> Iterator[Sentence]:
    """The first and the last layer of each model, and the models whose first layers lie apart."""
    models = list(by(rows, "model").values())
    for layers in models:
        first, last = layers[0], layers[-1]
        yield Sentence(
            f"The middle patch of `{first.words}` depends on {percent(first.seen, 1)} of the pixels after "
            f"{first.title}, and on {percent(last.seen, 1)} after {last.title}; the mean distance grows from "
            f"{in_words(first.distance, with_n=False)} to {in_words(last.distance, with_n=False)}, where "
            f"equal weights have {in_words(first.uniform)} and {in_words(last.uniform)} px."
            if apart(last.distance, first.distance) is Side.ABOVE
            else f"The middle patch of `{first.words}` depends on {percent(first.seen, 1)} of the pixels after "
            f"{first.title}, and on {percent(last.seen, 1)} after {last.title}; the mean distance is "
            f"{in_words(first.distance, with_n=False)} and {in_words(last.distance, with_n=False)}, which is "
            "not shown to grow.",
            (first, last),
        )


def _table(rows: Sequence[FieldRow]) -> Table:
    several = len(by(rows, "model")) > 1
    return Table.of(
        "Effective receptive field of the middle patch",
        rows,
        {
            **({"model": lambda row: row.words} if several else {}),
            "layer": lambda row: row.title,
            "distance": lambda row: row.distance,
            "if uniform (px)": lambda row: row.uniform,
            "half": lambda row: row.half,
            "seen (%)": lambda row: round(100 * row.seen, 1),
        },
    )


def draw_depth(rows: Sequence[FieldRow]) -> "Figure":
    """How far the middle patch sees by layer, and the share of the pixels that it sees."""
    from vitlens.figures.windows.receptive import FieldCurve, field_by_depth

    return field_by_depth(
        curves=[
            FieldCurve(
                layers[0].words,
                distances=[
                    [
                        each.value,
                        each.value if each.low is None else each.low,
                        each.value if each.high is None else each.high,
                    ]
                    for each in (row.distance for row in layers)
                ],
                seen=[row.seen for row in layers],
                uniform=[row.uniform for row in layers],
            )
            for layers in by(rows, "model").values()
        ]
    )


def draw_maps(rows: Sequence[FieldRow], arrays: FieldArrays) -> "Figure":
    """The norm of the gradient at each pixel, by layer."""
    from vitlens.figures.windows.receptive import field_maps

    places = {alias: [index for index, row in enumerate(rows) if row.model == alias] for alias in by(rows, "model")}
    return field_maps(
        fields={rows[indices[0]].words: [arrays.field[index] for index in indices] for indices in places.values()}
    )
