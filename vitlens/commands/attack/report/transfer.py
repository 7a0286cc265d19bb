"""Whether images made for one model fool another."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import SAMPLE, TRANSFER
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTION: Final = (
    "Of the images that fooled the model they were made for, and that the other classifies correctly when clean, the "
    "fraction that fools the other too. The attack stops once its own model is fooled; one made to transfer would not."
)


def transfer(record: Record) -> Iterator[Section]:
    """Every model on the images made for every model; nothing for one model."""
    rows = record.rows(TRANSFER)
    if not rows:
        return
    table = Table.of(
        "Images made for one model, shown to another",
        rows,
        {
            "made for": lambda row: row.made_for,
            "shown to": lambda row: row.shown_to,
            "fooled too": lambda row: row.estimate,
            "accuracy": lambda row: percent(row.accuracy, 1),
            "clean accuracy": lambda row: percent(row.clean, 1),
        },
    )
    figure = FigureSpec("transfer", _CAPTION, partial(_draw, record))
    yield Section("Transfer", tuple(_sentences(record)), (table,), (figure,))


def _sentences(record: Record) -> Iterator[Sentence]:
    for row in record.rows(TRANSFER):
        if row.made_for == row.shown_to:
            continue
        if row.estimate is None:
            text = f"No image that fools {row.made_for} is classified correctly by {row.shown_to} when clean."
        else:
            text = f"Of the images that fool {row.made_for}, {in_words(row.estimate)} also fool {row.shown_to}."
        yield Sentence(text, (row,))


def _draw(record: Record) -> "Figure":
    from vitlens.figures.attack.transfer import transfer_matrix

    aliases, sample = list(record.aliases), record.rows(SAMPLE)[0]
    rates = np.full((len(aliases), len(aliases)), np.nan)
    clean, counts = np.zeros(len(aliases)), np.zeros(rates.shape, dtype=int)
    for row in record.rows(TRANSFER):
        place = aliases.index(row.made_for), aliases.index(row.shown_to)
        rates[place] = np.nan if row.rate is None else row.rate
        clean[place[1]] = row.clean
        counts[place] = row.n or 0
    epsilon = epsilon_words(sample.epsilon, sample.norm)
    title = f"Images made by {sample.title} at {epsilon}: which models they fool"
    return transfer_matrix(rates=rates, clean=clean, counts=counts, names=aliases, title=title)
