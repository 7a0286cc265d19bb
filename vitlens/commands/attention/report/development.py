"""The section on how attention develops over the layers."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.attention.record import (
    DEVELOPMENT,
    DEVELOPMENT_MAPS,
    LAYERS,
    MAPS,
    OBJECTS,
    AttentionArrays,
    DevelopmentArrays,
    DevelopmentRow,
    HeadObjectRow,
)
from vitlens.commands.attention.report.maps import head_means, pixels
from vitlens.commands.scaffold.sheets import sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, Side, apart, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ON_A_SHEET: Final = 12  # images


def development_section(record: Record) -> Iterator[Section]:
    """Attention and rollout by depth, where there is a rollout."""
    if not record.has(DEVELOPMENT_MAPS):
        return
    maps, rollouts = record.arrays(MAPS), record.arrays(DEVELOPMENT_MAPS)
    numbers = [row.layer for row in record.rows(LAYERS)]
    figures = tuple(
        FigureSpec(
            name,
            "How attention develops: the mean over heads of each layer (left), and the rollout up to that layer "
            "(right). Each map has its own colours, so only places can be compared.",
            partial(_draw, maps, rollouts, numbers, part),
        )
        for name, part in sheets("development", len(maps.images), _ON_A_SHEET)
    )
    rows = record.rows(DEVELOPMENT)
    title, question = "How attention develops", "Where does the model look, layer by layer?"
    tables = (*_tables(rows), *_head_tables(record.rows(OBJECTS)))
    yield Section(title, tuple(_sentences(rows)), tables, figures, question, leading=True)


def _sentences(rows: tuple[DevelopmentRow, ...]) -> Iterator[Sentence]:
    """Where the share of attention on the object is largest, and whether it rises over the layers."""
    if not rows:
        return
    best, first, last = max(rows, key=lambda row: row.weights), rows[0], rows[-1]
    against = {Side.ABOVE: "more than", Side.BELOW: "less than", Side.UNDECIDED: "not significantly other than"}
    side = against[beyond(_weights(best), best.area)]
    yield Sentence(
        f"Attention lies on the object most in layer {best.layer}: {in_words(_weights(best))} of the map's mass, "
        f"{side} the objects' share of the image, {percent(best.area, 1)}.",
        (best, _weights(best)),
    )
    moved = apart(_rollout(last), _rollout(first))
    how = {Side.ABOVE: "rises", Side.BELOW: "falls", Side.UNDECIDED: "does not change significantly"}[moved]
    yield Sentence(
        f"The share of the rollout on the object {how} with depth, from "
        f"{in_words(_rollout(first), with_n=False)} after layer {first.layer} to "
        f"{in_words(_rollout(last), with_n=False)} after layer {last.layer}.",
        (first, last),
    )


def _weights(row: DevelopmentRow) -> Estimate:
    return Estimate(row.weights, row.weights_low, row.weights_high, row.n)


def _rollout(row: DevelopmentRow) -> Estimate:
    return Estimate(row.rollout, row.rollout_low, row.rollout_high, row.n)


def _tables(rows: tuple[DevelopmentRow, ...]) -> Iterator[Table]:
    if rows:
        columns = {
            "layer": lambda row: row.layer,
            "attention on the object": _weights,
            "rollout on the object": _rollout,
            "objects' share of the image": lambda row: Estimate(row.area),
        }
        yield Table.of("Share of the maps on the object by layer", rows, columns)


def _head_tables(rows: tuple[HeadObjectRow, ...]) -> Iterator[Table]:
    if rows:
        columns = {
            "layer": lambda row: row.layer,
            "head": lambda row: row.head,
            "attention on the object": lambda row: row.estimate,
        }
        yield Table.of("Share of each head's map on the object", rows, columns)


def _draw(maps: AttentionArrays, rollouts: DevelopmentArrays, numbers: list[int], part: slice) -> "Figure":
    from vitlens.figures.development import development

    return development(
        images=pixels(maps)[part],
        attention=head_means(maps)[part],
        rollout=rollouts.rollout[part],
        numbers=numbers,
        title="Attention by layer (left) and rollout up to a layer (right)",
    )
