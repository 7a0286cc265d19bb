"""The section on the effective receptive field, from its rows and arrays."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from vitlens.commands.scaffold.receptive.record import FIELD_MAPS, FIELDS, FieldArrays, FieldRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
                partial(_draw_depth, rows),
            ),
            FigureSpec(
                "receptive_maps",
                "The norm of the gradient at each pixel. Each map has its own colours, from 0 to its largest value "
                "by the square root, so only places can be compared; pixels without any gradient are grey.",
                partial(_draw_maps, rows, arrays),
            ),
        ),
        "How far does a patch see?",
        leading=True,
    )


def by_model(rows: Sequence[FieldRow]) -> dict[str, list[FieldRow]]:
    """The rows of each model, in order, by its alias."""
    return {alias: list(of_model) for alias, of_model in groupby(rows, key=lambda row: row.model)}


def _sentences(rows: Sequence[FieldRow]) -> Iterator[Sentence]:
    """The first and the last layer of each model, and the models whose first layers lie apart."""
    models = list(by_model(rows).values())
    for layers in models:
        first, last = layers[0], layers[-1]
        yield Sentence(
            f"The middle patch of `{first.words}` depends on {percent(first.seen, 1)} of the pixels after "
            f"{first.title}, and on {percent(last.seen, 1)} after {last.title}; the mean distance grows from "
            f"{in_words(first.mean_distance, with_n=False)} to {in_words(last.mean_distance, with_n=False)}, where "
            f"equal weights have {in_words(first.uniform)} and {in_words(last.uniform)} px."
            if apart(last.mean_distance, first.mean_distance) is Side.ABOVE
            else f"The middle patch of `{first.words}` depends on {percent(first.seen, 1)} of the pixels after "
            f"{first.title}, and on {percent(last.seen, 1)} after {last.title}; the mean distance is "
            f"{in_words(first.mean_distance, with_n=False)} and {in_words(last.mean_distance, with_n=False)}, which is "
            "not shown to grow.",
            (first, last),
        )


def _table(rows: Sequence[FieldRow]) -> Table:
    several = len(by_model(rows)) > 1
    return Table.of(
        "Effective receptive field of the middle patch",
        rows,
        {
            **({"model": lambda row: row.words} if several else {}),
            "layer": lambda row: row.title,
            "distance": lambda row: row.mean_distance,
            "if uniform (px)": lambda row: row.uniform,
            "half": lambda row: row.half_share,
            "seen (%)": lambda row: round(100 * row.seen, 1),
        },
    )


def _draw_depth(rows: Sequence[FieldRow]) -> "Figure":
    from vitlens.figures.windows.receptive import FieldCurve, field_by_depth

    return field_by_depth(
        curves=[
            FieldCurve(
                layers[0].words,
                distances=[_ends(row.distance, row.distance_low, row.distance_high) for row in layers],
                seen=[row.seen for row in layers],
                uniform=[row.uniform for row in layers],
            )
            for layers in by_model(rows).values()
        ]
    )


def _draw_maps(rows: Sequence[FieldRow], arrays: FieldArrays) -> "Figure":
    from vitlens.figures.windows.receptive import field_maps

    places = {alias: [index for index, row in enumerate(rows) if row.model == alias] for alias in by_model(rows)}
    return field_maps(
        fields={rows[indices[0]].words: [arrays.field[index] for index in indices] for indices in places.values()}
    )


def _ends(value: float, low: float | None, high: float | None) -> tuple[float, float, float]:
    return value, value if low is None else low, value if high is None else high
