"""The report of `vitlens attention`, from its record."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from vitlens.commands.attention.conclusions import findings, images_in, verdicts
from vitlens.commands.attention.record import (
    ALIKE,
    CHECKS,
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
from vitlens.commands.attention.report.matrix import matrix_section
from vitlens.commands.attention.report.views import views
from vitlens.commands.attention.report.windows import window_section
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.explorer.report import Shown, explorer_of, explorer_sentences
from vitlens.commands.scaffold.maps.information import UNIFORM, InformationRow
from vitlens.commands.scaffold.maps.on_object import ON_OBJECT
from vitlens.commands.scaffold.mixed_heads import mixed_heads_limit
from vitlens.commands.scaffold.position_order import DEFINITION, PAIRS, RANK_CORRELATION
from vitlens.commands.scaffold.receptive.report import field_section
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_ranges, in_words, percent
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]

ORDERED: Final = -0.2  # correlation of similarity with distance, at or below which embeddings follow the positions


def report(record: Record) -> Document:
    """The layers and their maps, the optional views, and the patches and position embeddings."""
    rows = record.rows(LAYERS)
    figures = list(map_figures(record))
    figures.sort(key=lambda figure: not figure.name.startswith("evolution"))  # attention by depth first
    layers = Section(
        "Attention by layer and head",
        (*_check_sentences(record), *_layer_sentences(record, rows), *_prefix_sentences(rows)),
        (*_check_tables(record), _layer_table(rows)),
        tuple(figures),
        leading=True,
    )
    return Document(
        record.config.title,
        (
            layers,
            *development_section(record),
            *window_section(record),
            *field_section(record),
            *views(record),
            *matrix_section(record),
            *_inputs(record),
        ),
        limits=tuple(_limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=(*data_sentences(record), *explorer_sentences(record)),
        explorer=explorer_of(record, Shown(record.arrays(MAPS).images, [row.image for row in record.rows(IMAGES)])),
    )


def _limits(record: Record) -> Iterator[Sentence]:
    """At most four, about the images and heads that were drawn."""
    yield from mixed_heads_limit(record)
    n, rows = images_in(record), record.rows(LAYERS)
    heads = sum(row.heads for row in rows)
    counts = (*rows, Estimate(float(n), unit="images"), Estimate(float(heads), unit="heads"))
    if n:
        yield Sentence(
            f"{n} image{' was' if n == 1 else 's were'} looked at: what the {heads} heads do on others may differ, and "
            "`vitlens stats` measures it.",
            counts,
        )
    if not record.rows(ON_OBJECT):
        yield Sentence("No masks of objects are known, so no map is held against the object.", says="setting")
    yield Sentence(
        f"The maps show from which patches the {heads} heads take values, not which information these values hold.",
        counts,
    )


def _check_sentences(record: Record) -> Iterator[Sentence]:
    """The layers of the sharpest and of the most even mean map, and how the map changes with depth."""
    checks, alike = record.rows(CHECKS), record.rows(ALIKE)
    if checks:
        least, most = (
            min(checks, key=lambda row: row.information.value),
            max(checks, key=lambda row: row.information.value),
        )
        yield Sentence(
            f"The mean map of the heads holds most information in layer {most.maps}, {in_words(most.information)}, and "
            f"least in layer {least.maps}, {in_words(least.information)}.",
            (most, least),
        )
        yield Sentence(
            f"Information: log2 of the number of patches minus the entropy of the map; a map of fewer than {UNIFORM} "
            "bits is uniform. Fixed places: the share of it that the mean map of the other images explains.",
            says="method",
        )
    several = [row for row in alike if row.heads > 1]
    if several:
        closest = max(several, key=lambda row: row.alike)
        yield Sentence(
            f"Heads are most alike in layer {closest.layer}: cosine similarity of two heads' maps "
            f"{in_words(closest.between_heads, with_n=False)}.",
            (closest,),
        )
    hits = [row for row in record.rows(ON_OBJECT) if row.score == "pointing"]
    if hits:
        best = max(hits, key=lambda row: row.estimate.value)
        yield Sentence(
            f"In the pointing game the mean map of layer {best.layer} is best: its maximum lies on the object in "
            f"{in_words(best.estimate)} of the images, that of {best.chance_words}.",
            (best, best.estimate, best.of_baseline),
        )


def _check_tables(record: Record) -> Iterator[Table]:
    alike = {row.layer: row for row in record.rows(ALIKE)}
    columns: dict[str, Callable[[InformationRow], Cell]] = {
        "layer": lambda row: int(row.maps),
        "information": lambda row: row.information,
        "fixed places": lambda row: row.by_place,
        "heads alike": lambda row: alike[int(row.maps)].between_heads,
        "like the layer before": lambda row: alike[int(row.maps)].to_previous,
    }
    if alike and len(alike) == len(record.rows(CHECKS)):
        yield Table.of("The mean map of each layer's heads, means over images", record.rows(CHECKS), columns)


def _layer_sentences(record: Record, rows: tuple[LayerRow, ...]) -> Iterator[Sentence]:
    heads, count = sum(row.heads for row in rows), len(record.rows(IMAGES))
    totals = (Estimate(float(heads), unit="heads"), Estimate(float(count), unit="images"))
    words = f"{len(rows)} layers with {heads} heads in all, on {count} image{'s' if count > 1 else ''}."
    yield Sentence(words, (*rows, *totals))
    without = sorted(record.rows(WITHOUT_MAP), key=lambda row: row.kind)
    for _, of_kind in groupby(without, key=lambda row: row.kind):
        unplaced = tuple(of_kind)
        numbers = in_ranges([row.layer for row in unplaced])
        yield Sentence(f"Without a map in the image: {numbers}, as {unplaced[0].reason}.", unplaced)


def _prefix_sentences(rows: tuple[LayerRow, ...]) -> Iterator[Sentence]:
    most = max(rows, key=lambda row: row.prefix_mass)
    if most.prefix_mass > 0:
        mean = Estimate(sum(row.prefix_mass for row in rows) / len(rows))
        yield Sentence(
            f"Attention to prefix tokens (CLS and registers) is not in the maps: {percent(mean.value, 1)} on average "
            f"over layers, at most {percent(most.prefix_mass, 1)} (layer {most.layer}).",
            (most, mean),
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
        layout, words = record.rows(LAYOUT)[0], _correlation(record)
        cut = f"An image is cut into {layout.grid[0]} x {layout.grid[1]} patches of {layout.patch_size[0]} x "
        lines = [Sentence(f"{cut}{layout.patch_size[1]} px.", (layout,))]
        if words:
            backing = (*(estimate for _, estimate in record.all(DISTANCE_CORRELATION)), Estimate(ORDERED))
            lines.insert(0, Sentence(words, backing))
        lines += _rank_correlations(record)
        yield Section("Patches and positions", tuple(lines), figures=figures, leading=True)


def _input_figures(record: Record, layout: LayoutRow) -> Iterator[FigureSpec]:
    if record.has(POSITIONS):
        arrays = record.arrays(POSITIONS)
        yield FigureSpec(
            "positions", "Cosine similarity of the position embeddings.", partial(_draw_matrix, arrays, layout)
        )
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


def _rank_correlations(record: Record) -> Iterator[Sentence]:
    """The rank correlation of similarity and distance, of all pairs, in rows and in columns."""
    found = {parts["pairs"]: estimate for parts, estimate in record.all(RANK_CORRELATION)}
    if found:
        listed = ", ".join(f"{PAIRS[pairs]} {estimate.value:.2f}" for pairs, estimate in found.items())
        yield Sentence(f"Rank correlation of similarity and nearness: {listed}.", tuple(found.values()))
        yield from sentences(DEFINITION, says="method")


def _draw_matrix(arrays: PositionArrays, layout: LayoutRow) -> "Figure":
    from vitlens.figures.positions import position_matrix

    return position_matrix(similarity=arrays.similarity, grid=layout.grid)


def _draw_maps(arrays: PositionArrays, layout: LayoutRow) -> "Figure":
    from vitlens.figures.positions import position_maps

    return position_maps(similarity=arrays.similarity, grid=layout.grid)


def _draw_patches(image: Any, layout: LayoutRow) -> "Figure":
    from vitlens.figures.patches import patch_grid

    return patch_grid(image=image, patch_size=layout.patch_size)
