"""The section on a training: statistics of heads and similarity of positions over the epochs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import (
    ANIMATION,
    MEAN_IN_TRAINING,
    POSITIONS,
    TRAINING,
    TRAINING_ARRAYS,
    PositionCheckpointRow,
    TrainingArrays,
)
from vitlens.commands.stats.shown import is_measured
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 12  # of each table
_MAPS: Final = 6  # of position embeddings, in their figure
_POSITIONS_CAPTION: Final = (
    "Mean over all pairs of positions by their offset, up to half the grid; the centre, always 1, is a position with "
    "itself. Random embeddings show no pattern; a cross means that embeddings of the same row or column became similar."
)


def training_sections(record: Record) -> Iterator[Section]:
    """One section where the checkpoints of a training were measured, none elsewhere."""
    if not record.has(TRAINING_ARRAYS):
        return
    arrays = record.arrays(TRAINING_ARRAYS)
    epochs = [int(epoch) for epoch in arrays.epochs]
    means = {parts["statistic"] for parts, _ in record.all(MEAN_IN_TRAINING)}
    names = [name for name in shown_in("training") if name in means]
    tables = [_mean_table(record, epochs, names)]
    positions = record.rows(POSITIONS)
    if positions:
        tables.append(_position_table(positions))
    sentences = tuple(_sentences(record, epochs, names))
    yield Section("Heads over training", sentences, tuple(tables), tuple(_figures(arrays)), leading=True)


def _sentences(record: Record, epochs: Sequence[int], names: Sequence[str]) -> Iterator[Sentence]:
    (alias,) = record.aliases
    means = {
        name: [record.metric(MEAN_IN_TRAINING(model=alias, statistic=name, epochs=epoch)) for epoch in epochs]
        for name in names
    }
    images, rows = next(iter(means.values()))[0].n, record.rows(TRAINING)
    for name, curve in means.items():
        yield Sentence(
            f"Mean {STATISTICS[name].title}: {in_words(curve[0])} after {epochs[0]} epochs, {in_words(curve[-1])} "
            f"after {epochs[-1]}.",
            (curve[0], curve[-1], *rows[:1], *rows[-1:]),
        )
    yield Sentence(
        f"The weights of {len(epochs)} checkpoints, after {epochs[0]} to {epochs[-1]} epochs, on {images} images, the "
        "same for all checkpoints (a seeded sample, balanced over classes). Weights kept during training are in half "
        "precision.",
        says="setting",
    )
    form = record.options(StatsOptions).animate
    if form is not None:
        place = ANIMATION.format(form=form)
        yield Sentence(f"An animation of the training, with fixed scales: `{place}`.", says="setting")


def _mean_table(record: Record, epochs: Sequence[int], names: Sequence[str]) -> Table:
    (alias,) = record.aliases

    def mean(name: str, epoch: int) -> Cell:
        return record.metric(MEAN_IN_TRAINING(model=alias, statistic=name, epochs=epoch))

    columns: dict[str, Callable[[int], Cell]] = {"epoch": lambda epoch: epoch}
    columns |= {STATISTICS[name].title: partial(mean, name) for name in names}
    chosen = [epochs[place] for place in _evenly(len(epochs), _ROWS)]
    return Table.of("Mean of all heads, with 95 % intervals over images", chosen, columns)


def _position_table(rows: Sequence[PositionCheckpointRow]) -> Table:
    return Table.of(
        "Cosine similarity of position embeddings, means over pairs",
        [rows[place] for place in _evenly(len(rows), _ROWS)],
        {
            "epoch": lambda row: row.epochs,
            "four neighbours": lambda row: row.neighbours,
            "all others": lambda row: row.others,
        },
    )


def _figures(arrays: TrainingArrays) -> Iterator[FigureSpec]:
    for name in shown_in("training"):
        if is_measured(arrays.mean, name):
            caption = f"Epoch 0 is before training. {STATISTICS[name].reading}"
            yield FigureSpec(f"learning_{name}", caption, partial(_draw_curve, arrays, name))
    if arrays.similarity is not None:
        yield FigureSpec("learning_positions", _POSITIONS_CAPTION, partial(_draw_positions, arrays))


def _draw_curve(arrays: TrainingArrays, name: str) -> "Figure":
    from vitlens.figures.stats.training import heads_over_training

    title = STATISTICS[name].title
    return heads_over_training(
        epochs=arrays.epochs.tolist(),
        values=arrays.mean[name],
        title=f"{title[0].upper()}{title[1:]}, every head over training",
        label=STATISTICS[name].label,
        uniform=arrays.uniform_distance if name == "distance" else None,
    )


def _draw_positions(arrays: TrainingArrays) -> "Figure":
    from vitlens.figures.stats.training import near_offsets, positions_over_training

    assert arrays.similarity is not None
    places = _evenly(len(arrays.epochs), _MAPS)
    return positions_over_training(
        epochs=arrays.epochs[places].tolist(), similarity=near_offsets(arrays.similarity)[places]
    )


def _evenly(count: int, most: int) -> list[int]:
    """At most this many of count indices, evenly spaced, with the first and the last."""
    return [int(place) for place in np.linspace(0, count - 1, min(count, most)).round()]
