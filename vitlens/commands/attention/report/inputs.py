"""What goes into the model: patches, and how alike the position embeddings are."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vitlens.commands.attention.record import (
    DISTANCE_CORRELATION,
    LAYOUT,
    MAPS,
    POSITIONS,
    LayoutRow,
    PositionArrays,
)
from vitlens.commands.attention.report.maps import pixels
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERED: Final = -0.2  # correlation of similarity with distance from which on positions count as ordered by place


def inputs(record: Record) -> Iterator[Section]:
    """The section, where the model has patches."""
    figures = tuple(figure for layout in record.rows(LAYOUT) for figure in _figures(record, layout))
    if figures:
        yield Section("Patches and positions", figures=figures)


def _figures(record: Record, layout: LayoutRow) -> Iterator[FigureSpec]:
    if record.has(POSITIONS):
        arrays = record.arrays(POSITIONS)
        caption = f"Cosine similarity of the position embeddings. {_correlation(record)}".rstrip()
        yield FigureSpec("positions", caption, partial(_draw_matrix, arrays, layout))
        described = "The same, one map a patch, each standing where its patch stands."
        yield FigureSpec("position_maps", described, partial(_draw_maps, arrays, layout))
    if layout.whole:
        image = pixels(record.arrays(MAPS))[0]
        yield FigureSpec(
            "patches", "The first image cut into the model's patches.", partial(_draw_patches, image, layout)
        )


def _correlation(record: Record) -> str:
    """Whether near positions are more alike than far ones, by the correlation of similarity with distance."""
    for _, found in record.all(DISTANCE_CORRELATION):
        ordered = found.value <= ORDERED
        how = "more similar positions than" if ordered else "no more similar positions than"
        side, number = "at or below" if ordered else "above", round(found.value, 2) + 0.0  # no minus before 0.00
        return (
            f"Its correlation with the distance between patches is {number:.2f} (Pearson, all pairs of {found.n} "
            f"patches), {side} the threshold of {ORDERED}: near patches have {how} far ones."
        )
    return ""


def _draw_matrix(arrays: PositionArrays, layout: LayoutRow) -> "Figure":
    from vitlens.figures.positions import position_matrix

    return position_matrix(similarity=arrays.similarity, grid=layout.grid)


def _draw_maps(arrays: PositionArrays, layout: LayoutRow) -> "Figure":
    from vitlens.figures.positions import position_maps

    return position_maps(similarity=arrays.similarity, grid=layout.grid)


def _draw_patches(image: Any, layout: LayoutRow) -> "Figure":
    from vitlens.figures.patches import patch_grid

    return patch_grid(image=image, patch_size=layout.patch_size)
