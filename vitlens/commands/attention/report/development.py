"""The section on how attention develops over the layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.attention.record import (
    DEVELOPMENT_MAPS,
    LAYERS,
    MAPS,
    AttentionArrays,
    DevelopmentArrays,
)
from vitlens.commands.attention.report.maps import head_means, pixels
from vitlens.commands.scaffold.maps.on_object import (
    ATTENTION,
    HEAD,
    METHOD,
    ON_OBJECT,
    ROLLOUT,
    OnObjectRow,
    mass_of,
    on_object_table,
)
from vitlens.commands.scaffold.sheets import sheets
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Side, apart

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
    title, question = "How attention develops", "Where does the model look, layer by layer?"
    rows = record.rows(ON_OBJECT)
    yield Section(title, tuple(_sentences(rows)), tuple(_tables(rows)), figures, question, leading=True)


def _sentences(rows: tuple[OnObjectRow, ...]) -> Iterator[Sentence]:
    """Where the share of attention on the object is largest, and whether that of the rollout rises over the layers."""
    means = mass_of(rows, ATTENTION)
    if not means:
        return
    best = max(means, key=lambda row: row.estimate.value)
    against = {Side.ABOVE: "more than", Side.BELOW: "less than", Side.UNDECIDED: "not significantly other than"}
    yield Sentence(
        f"Attention lies on the object most in layer {best.layer}: {in_words(best.estimate)} of the map's mass, "
        f"{against[best.side]} that of {best.chance_words}.",
        (best, best.estimate, best.of_baseline),
    )
    yield Sentence(METHOD, says="method")
    rollouts = mass_of(rows, ROLLOUT)
    if not rollouts:
        return
    first, last = rollouts[0], rollouts[-1]
    moved = apart(last.estimate, first.estimate)
    how = {Side.ABOVE: "rises", Side.BELOW: "falls", Side.UNDECIDED: "does not change significantly"}[moved]
    yield Sentence(
        f"The share of the rollout on the object {how} with depth, from "
        f"{in_words(first.estimate, with_n=False)} after layer {first.layer} to "
        f"{in_words(last.estimate, with_n=False)} after layer {last.layer}.",
        (first, last),
    )


def _tables(rows: Sequence[OnObjectRow]) -> Iterator[Table]:
    layer: Mapping[str, Callable[[OnObjectRow], Cell]] = {"layer": lambda row: row.layer}
    both: Mapping[str, Callable[[OnObjectRow], Cell]] = {**layer, "head": lambda row: row.head}
    hits = [row for row in rows if row.score == "pointing"]
    for title, chosen, columns, score in (
        ("Share of each layer's mean map on the object", mass_of(rows, ATTENTION), layer, "on the object"),
        ("Share of the rollout up to each layer on the object", mass_of(rows, ROLLOUT), layer, "on the object"),
        ("Pointing game of each layer's mean map", hits, layer, "maximum on the object"),
        ("Share of each head's map on the object", mass_of(rows, HEAD), both, "on the object"),
    ):
        if chosen:
            yield on_object_table(title, chosen, columns, score)


def _draw(maps: AttentionArrays, rollouts: DevelopmentArrays, numbers: list[int], part: slice) -> "Figure":
    from vitlens.figures.development import development

    return development(
        images=pixels(maps)[part],
        attention=head_means(maps)[part],
        rollout=rollouts.rollout[part],
        numbers=numbers,
        title="Attention by layer (left) and rollout up to a layer (right)",
    )
