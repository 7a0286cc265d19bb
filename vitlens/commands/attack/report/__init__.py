"""The report of `vitlens attack`, from its record."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.attack.conclusions import findings, verdicts
from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import BY_CLASS, SAMPLE, TRANSFER
from vitlens.commands.attack.record.rows import RobustClassRow
from vitlens.commands.attack.report.checks import checks
from vitlens.commands.attack.report.corruptions import corruptions
from vitlens.commands.attack.report.distances import distances
from vitlens.commands.attack.report.inside import inside
from vitlens.commands.attack.report.limits import limits
from vitlens.commands.attack.report.summary import preface, summary
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Side, apart, values_and_ends, widened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]

_ENOUGH: Final = 5  # images of the largest class from which on accuracy by class is informative
_CLASSES_CAPTION: Final = (
    "Classes of low clean accuracy have less accuracy to lose. Classes with few images have wide intervals, and among "
    "many classes the lowest and highest accuracies are extreme partly by chance."
)
_TRANSFER_CAPTION: Final = (
    "Of the adversarial images that fool the model for which they were made, and that the other model classifies "
    "correctly when clean, the fraction that fools the other model too. The attack stops when its own model is fooled; "
    "an attack designed for transfer would not."
)


def report(record: Record) -> Document:
    """Summary, distances, classes, transfer, changes inside the models, common corruptions, self-checks."""
    sections = (
        summary(record),
        distances(record),
        *_by_class(record),
        *_transfer(record),
        *inside(record),
        *corruptions(record),
        checks(record),
    )
    return Document(
        record.config.title,
        sections,
        limits=tuple(limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=preface(record),
    )


def _by_class(record: Record) -> Iterator[Section]:
    """The classes of lowest and highest robust accuracy, where images have labels."""
    rows = record.rows(BY_CLASS)
    if rows and max(row.n for row in rows) < _ENOUGH:
        refused = (
            f"No class has {_ENOUGH} images, so accuracy by class is not drawn; its intervals are in results.json."
        )
        yield Section("Accuracy by class", (Sentence(refused, (*rows, _ENOUGH)),))
    elif rows:
        figure = FigureSpec("classes", _CLASSES_CAPTION, partial(_draw_classes, record))
        yield Section("Accuracy by class", tuple(_class_sentences(record)), figures=(figure,), leading=True)


def _classes_of_models(record: Record) -> Iterator[tuple[str, list[RobustClassRow]]]:
    for alias in record.aliases:
        rows = [row for row in record.rows(BY_CLASS) if row.model == alias]
        if rows:
            yield alias, rows


def _class_sentences(record: Record) -> Iterator[Sentence]:
    for alias, rows in _classes_of_models(record):
        ordered = sorted(rows, key=lambda row: row.robust_accuracy)
        least, most = ordered[0], ordered[-1]
        looks = len(rows)
        if apart(widened(least.robust, looks), widened(most.robust, looks)) is Side.BELOW:
            text = (
                f"{alias}: robust accuracy is lowest for {least.class_name} ({in_words(least.robust)}) and highest for "
                f"{most.class_name} ({in_words(most.robust)})."
            )
        else:
            text = (
                f"{alias}: the classes are not shown to differ: the intervals of the lowest and the highest overlap, "
                f"widened for {looks} looks."
            )
        yield Sentence(text, tuple(rows))


def _draw_classes(record: Record) -> "Figure":
    from vitlens.figures.attack.classes import ByClass, class_robustness

    sample = record.rows(SAMPLE)[0]
    return class_robustness(
        models=[
            ByClass(alias, values_and_ends(row.clean for row in rows), values_and_ends(row.robust for row in rows))
            for alias, rows in _classes_of_models(record)
        ],
        classes=list(dict.fromkeys(row.class_name for row in record.rows(BY_CLASS))),
        title=f"Accuracy by class, clean and under {sample.title} at {epsilon_words(sample.epsilon, sample.norm)}",
    )


def _transfer(record: Record) -> Iterator[Section]:
    """Every model on the adversarial images of every model; nothing for one model."""
    rows = record.rows(TRANSFER)
    if not rows:
        return
    table = Table.of(
        "Adversarial images of one model, classified by another",
        rows,
        {
            "made for": lambda row: row.made_for,
            "shown to": lambda row: row.shown_to,
            "fooled too": lambda row: row.estimate,
            "accuracy": lambda row: percent(row.accuracy, 1),
            "clean accuracy": lambda row: percent(row.clean, 1),
        },
    )
    figure = FigureSpec("transfer", _TRANSFER_CAPTION, partial(_draw_transfer, record))
    yield Section("Transfer", tuple(_transfer_sentences(record)), (table,), (figure,), leading=True)


def _transfer_sentences(record: Record) -> Iterator[Sentence]:
    for row in record.rows(TRANSFER):
        if row.made_for == row.shown_to:
            continue
        if row.estimate is None:
            text = f"No image that fools {row.made_for} is classified correctly by {row.shown_to} when clean."
        else:
            text = f"Of the images that fool {row.made_for}, {in_words(row.estimate)} also fool {row.shown_to}."
        yield Sentence(text, (row,))


def _draw_transfer(record: Record) -> "Figure":
    from vitlens.figures.attack.transfer import transfer_matrix

    aliases, sample = list(record.aliases), record.rows(SAMPLE)[0]
    rates = np.full((len(aliases), len(aliases)), np.nan)
    clean, counts = np.zeros(len(aliases)), np.zeros(rates.shape, dtype=int)
    for row in record.rows(TRANSFER):
        cell = aliases.index(row.made_for), aliases.index(row.shown_to)
        rates[cell] = np.nan if row.rate is None else row.rate
        clean[cell[1]] = row.clean
        counts[cell] = row.n or 0
    epsilon = epsilon_words(sample.epsilon, sample.norm)
    title = f"Transfer of {sample.title} at {epsilon} between models"
    return transfer_matrix(rates=rates, clean=clean, counts=counts, names=aliases, title=title)
