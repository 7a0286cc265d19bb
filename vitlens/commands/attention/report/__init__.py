"""The report of `vitlens attention`, from its record."""

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from vitlens.commands.attention.record import IMAGES, LAYERS, WITHOUT_MAP, LayerRow
from vitlens.commands.attention.report.inputs import inputs
from vitlens.commands.attention.report.maps import map_figures
from vitlens.commands.attention.report.views import views
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_ranges, percent

__all__ = ["report"]

_LIMIT: Final = "Attention weights say which patches a head reads, not what it reads from them."


def report(record: Record) -> Document:
    """The layers and their maps, the views that were asked for, and how the image is cut."""
    rows = record.rows(LAYERS)
    layers = Section(
        "Attention by layer and head",
        (*_layer_sentences(record, rows), *data_sentences(record), *_prefix_sentences(rows)),
        (_layer_table(rows),),
        tuple(map_figures(record)),
        leading=True,
    )
    return Document(record.config.title, (layers, *views(record), *inputs(record)), limits=sentences(_LIMIT))


def _layer_sentences(record: Record, rows: tuple[LayerRow, ...]) -> Iterator[Sentence]:
    heads, count = sum(row.heads for row in rows), len(record.rows(IMAGES))
    yield Sentence(f"{len(rows)} layers with {heads} heads in all, on {count} image{'s' if count > 1 else ''}.", rows)
    without = sorted(record.rows(WITHOUT_MAP), key=lambda row: row.kind)
    for _, some in groupby(without, key=lambda row: row.kind):
        unplaced = tuple(some)
        numbers = in_ranges([row.layer for row in unplaced])
        yield Sentence(f"Without a map in the image: {numbers} ({unplaced[0].reason}).", unplaced)


def _prefix_sentences(rows: tuple[LayerRow, ...]) -> Iterator[Sentence]:
    most = max(rows, key=lambda row: row.prefix_mass)
    if most.prefix_mass > 0:
        mean = sum(row.prefix_mass for row in rows) / len(rows)
        yield Sentence(
            f"Of the readout's attention, {percent(mean, 1)} is on the prefix tokens (CLS and registers) on average "
            f"over layers, most in layer {most.layer} ({percent(most.prefix_mass, 1)}); maps show the rest.",
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
