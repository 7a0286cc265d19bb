"""The report of `vitlens attention`, from its record."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from vitlens.commands.attention.record import (
    DISTANCE_CORRELATION,
    IMAGES,
    LAYERS,
    LAYOUT,
    MAPS,
    POSITIONS,
    WITHOUT_MAP,
    LayerRow,
    LayoutRow,
    PositionArrays,
)
from vitlens.commands.attention.report.development import development_section
from vitlens.commands.attention.report.maps import map_figures, pixels
from vitlens.commands.attention.report.views import views
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_ranges, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]

ORDERED: Final = -0.2  # correlation of similarity with distance, at or below which embeddings follow the positions
_LIMIT: Final = (
    "Attention weights show from which patches a head takes values, not which information these values hold."
)


def report(record: Record) -> Document:
    """The layers and their maps, the optional views, and the patches and position embeddings."""
    rows = record.rows(LAYERS)
    layers = Section(
        "Attention by layer and head",
        (*_layer_sentences(record, rows), *data_sentences(record), *_prefix_sentences(rows)),
        (_layer_table(rows),),
        tuple(map_figures(record)),
        leading=True,
    )
    sections = (layers, *development_section(record), *views(record), *_inputs(record))
    return Document(record.config.title, sections, limits=sentences(_LIMIT))


def _layer_sentences(record: Record, rows: tuple[LayerRow, ...]) -> Iterator[Sentence]:
    heads, count = sum(row.heads for row in rows), len(record.rows(IMAGES))
    yield Sentence(f"{len(rows)} layers with {heads} heads in all, on {count} image{'s' if count > 1 else ''}.", rows)
    without = sorted(record.rows(WITHOUT_MAP), key=lambda row: row.kind)
    for _, of_kind in groupby(without, key=lambda row: row.kind):
        unplaced = tuple(of_kind)
        numbers = in_ranges([row.layer for row in unplaced])
        yield Sentence(f"Without a map in the image: {numbers}, as {unplaced[0].reason}.", unplaced)


def _prefix_sentences(rows: tuple[LayerRow, ...]) -> Iterator[Sentence]:
    most = max(rows, key=lambda row: row.prefix_mass)
    if most.prefix_mass > 0:
        mean = sum(row.prefix_mass for row in rows) / len(rows)
        yield Sentence(
            f"Attention to prefix tokens (CLS and registers) is not in the maps: {percent(mean, 1)} on average over "
            f"layers, at most {percent(most.prefix_mass, 1)} (layer {most.layer}).",
            (most,),
        )


def _layer_table(rows: tuple[LayerRow, ...]) -> Table:
    return Table.of(
        "Layers",
        rows,
        {
            "layer": lambda row: row.layer,
            "kind": lambda row: row.kind,
            "heads": lambda row: row.heads,
            "queries x keys": lambda row: f"{row.queries} x {row.keys}",
            "map": lambda row: row.map,
            "row shown": lambda row: row.reading,
            "on prefix (%)": lambda row: round(100 * row.prefix_mass, 1),
        },
    )


def _inputs(record: Record) -> Iterator[Section]:
    """Patches and position embeddings, where the model has them."""
    figures = tuple(figure for layout in record.rows(LAYOUT) for figure in _input_figures(record, layout))
    if figures:
        yield Section("Patches and positions", figures=figures)


def _input_figures(record: Record, layout: LayoutRow) -> Iterator[FigureSpec]:
    if record.has(POSITIONS):
        arrays = record.arrays(POSITIONS)
        caption = f"Cosine similarity of the position embeddings. {_correlation(record)}".rstrip()
        yield FigureSpec("positions", caption, partial(_draw_matrix, arrays, layout))
        described = "The same similarities as one map for each patch, arranged as the patches in the image."
        yield FigureSpec("position_maps", described, partial(_draw_maps, arrays, layout))
    if layout.whole:
        image = pixels(record.arrays(MAPS))[0]
        yield FigureSpec(
            "patches", "The first image cut into the model's patches.", partial(_draw_patches, image, layout)
        )


def _correlation(record: Record) -> str:
    """Whether near patches have more similar embeddings than far ones, by the correlation with their distance."""
    for _, correlation in record.all(DISTANCE_CORRELATION):
        ordered = correlation.value <= ORDERED
        how = "more similar embeddings than" if ordered else "no more similar embeddings than"
        side, number = "at or below" if ordered else "above", round(correlation.value, 2) + 0.0  # no minus before 0.00
        return (
            f"The correlation with the distance between patches is {number:.2f} (Pearson, all pairs of {correlation.n} "
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
