"""The head alone against everything: accuracy, time, and how soon each came near the best."""

from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.scaffold.pairs import PAIRS, pair_table
from vitlens.commands.train.record import ACCURACY, DIFFERENCE, EPOCH_SECONDS, LOOKS, REACHED, SECONDS, WAYS
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LIMIT: Final = (
    "One run of each with one seed: the intervals stand for the choice of test images, not for other seeds. Each has a "
    "recipe of its own (see `frozen/report.md` and `full/report.md`); neither was tuned on these data. This folder is "
    "no MODEL; `frozen/` and `full/` are."
)


def compared(record: Record) -> Document:
    """What freezing costs in accuracy, and what it saves in time."""
    figure = FigureSpec(
        "compared",
        "Accuracy on the test images at each evaluation, by epoch and by time since the start (the frozen way begins "
        "with one pass of the backbone over all images). One run of each with one seed; the two have recipes of their "
        "own.",
        partial(_draw, record),
    )
    reached = Table.of(
        "First evaluation at which each reached a share of the best accuracy",
        record.rows(REACHED),
        {
            "way": lambda row: WAYS[row.way],
            "share of the best": lambda row: percent(row.share_of_best),
            "accuracy": lambda row: percent(row.accuracy, 1),
            "epochs": lambda row: row.epochs,
            "seconds": lambda row: row.seconds,
        },
    )
    soon = "A dash: never. The best is the highest accuracy of either at any evaluation."
    sections = (
        Section("Frozen against full", _summary(record), figures=(figure,), leading=True),
        Section("How soon", sentences(soon), (reached, pair_table(record.rows(PAIRS)))),
    )
    return Document(record.config.title, sections, limits=sentences(_LIMIT))


def _summary(record: Record) -> tuple[Sentence, ...]:
    pace = {way: record.metric(EPOCH_SECONDS(model=way)).value for way in WAYS}
    ways = sentences(
        *(
            f"With {words} (`{way}/`): top-1 accuracy {in_words(record.metric(ACCURACY(model=way)))}, after "
            f"{in_words(record.metric(SECONDS(model=way)))} in all."
            for way, words in WAYS.items()
        )
    )
    (pair,) = record.rows(PAIRS)
    difference = in_words(record.metric(DIFFERENCE(first="full", second="frozen")))
    return (
        *ways,
        Sentence(
            f"Training everything instead of the head changes accuracy by {difference}; McNemar's exact p on the "
            f"images that only one predicts correctly is {pair.p:.2g}. An epoch of the head alone takes "
            f"{pace['frozen']:.2g} s, an epoch of everything {pace['full']:.2g} s: "
            f"{pace['full'] / pace['frozen']:,.0f} times as long.",
            (pair,),
        ),
    )


def _draw(record: Record) -> "Figure":
    from vitlens.figures.train_compared import learning_compared

    ways = {
        words: [(row.epochs, row.seconds, row.accuracy) for row in record.rows(LOOKS) if row.way == way]
        for way, words in WAYS.items()
    }
    return learning_compared(ways=ways, title=record.config.title)
