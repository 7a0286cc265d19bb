"""The report of two ways of training a model: its head alone, and all its weights."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.shared.pairs import PAIRS, pair_table
from vitlens.commands.shared.trainings import training_sentences
from vitlens.commands.train.conclusions import findings, verdicts
from vitlens.commands.train.record import (
    ACCURACY,
    DIFFERENCE,
    EPOCH_SECONDS,
    SECONDS,
    TEST_ACCURACIES,
    TIMES_TO_ACCURACY,
    WAYS,
    TimeToAccuracyRow,
)
from vitlens.commands.train.report.limits import limits
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WRITTEN: Final = (
    "Each has its own recipe (see `frozen/report.md` and `full/report.md`); neither was tuned on these data. This "
    "folder is not a MODEL; `frozen/` and `full/` are."
)


def comparison(record: Record) -> Document:
    """The accuracy and the time of training with a frozen backbone and of training all weights."""
    figure = FigureSpec(
        "compared",
        "Accuracy on the test images at each evaluation, by epoch and by time since the start (with the backbone "
        "frozen, one pass of it over all images comes first). One run of each with one seed, each with its own recipe.",
        partial(_draw_comparison, record),
    )
    times = Table.of(
        "First evaluation at which each reached a share of the best accuracy",
        record.rows(TIMES_TO_ACCURACY),
        {
            "way": lambda row: WAYS[row.way],
            "share of the best": lambda row: percent(row.share_of_best),
            "accuracy": lambda row: percent(row.accuracy, 1),
            "epochs": lambda row: row.epochs,
            "seconds": lambda row: row.seconds,
        },
    )
    note = "A dash: not reached. The best is the highest accuracy of either at any evaluation."
    opening = tuple(map(_time_sentence, record.rows(TIMES_TO_ACCURACY)))
    sections = (
        Section("Frozen against full", _comparison_summary(record), figures=(figure,), leading=True),
        Section(
            "Time to accuracy",
            (*opening[-2:], *sentences(note, _WRITTEN, says="method")),
            (times, pair_table(record.rows(PAIRS))),
        ),
    )
    return Document(
        record.config.title,
        sections,
        limits=tuple(limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=tuple(_budgets(record)),
    )


def _budgets(record: Record) -> Iterator[Sentence]:
    """How the two trainings differ, as their difference in accuracy may come from that."""
    told = tuple(training_sentences(record))
    yield from told
    if told:
        return
    last = {row.way: row for row in record.rows(TEST_ACCURACIES)}
    listed = ", ".join(f"{row.epochs} epochs in {number(row.seconds)} s ({WAYS[way]})" for way, row in last.items())
    yield Sentence(f"The two trainings had {listed}.", tuple(last.values()))


def _time_sentence(row: TimeToAccuracyRow) -> Sentence:
    """When a way reached a share of the best accuracy."""
    way, share = WAYS[row.way], percent(row.share_of_best)
    if row.seconds is None:
        return Sentence(f"With {way}, {share} of the best accuracy was never reached.", (row,))
    text = f"With {way}, {share} of the best accuracy was reached after {number(row.seconds)} s."
    return Sentence(text, (row,))


def _comparison_summary(record: Record) -> tuple[Sentence, ...]:
    seconds = {way: record.metric(EPOCH_SECONDS(model=way)).value for way in WAYS}
    known = {way: [record.metric(metric(model=way)) for metric in (ACCURACY, SECONDS)] for way in WAYS}
    ways = (
        Sentence(
            f"With {words} (`{way}/`): top-1 accuracy {in_words(known[way][0])}, in {in_words(known[way][1])}.",
            tuple(known[way]),
        )
        for way, words in WAYS.items()
    )
    (pair,) = record.rows(PAIRS)
    difference, times = record.metric(DIFFERENCE(first="full", second="frozen")), seconds["full"] / seconds["frozen"]
    return (
        Sentence(
            f"Training all weights instead of the head changes accuracy by {in_words(difference)}; McNemar's exact p "
            f"on the images that only one predicts correctly is {pair.p:.2g}. An epoch of the head alone takes "
            f"{seconds['frozen']:.2g} s, an epoch of all weights {seconds['full']:.2g} s: {times:,.0f} times as long.",
            (pair, difference, times, *seconds.values()),
        ),
        *ways,
    )


def _draw_comparison(record: Record) -> "Figure":
    from vitlens.figures.train.compared import learning_compared

    ways = {
        words: [(row.epochs, row.seconds, row.accuracy) for row in record.rows(TEST_ACCURACIES) if row.way == way]
        for way, words in WAYS.items()
    }
    return learning_compared(ways=ways, title=record.config.title)
