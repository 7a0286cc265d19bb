"""The head alone against all weights: accuracy, time, and time to shares of the best accuracy."""

from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.scaffold.pairs import PAIRS, pair_table
from vitlens.commands.train.record import ACCURACY, DIFFERENCE, EPOCH_SECONDS, REACHED, SECONDS, TEST_ACCURACIES, WAYS
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LIMIT: Final = (
    "One run of each with one seed: the intervals cover the choice of test images, not other seeds. Each has its own "
    "recipe (see `frozen/report.md` and `full/report.md`); neither was tuned on these data. This folder is "
    "no MODEL; `frozen/` and `full/` are."
)


def compared(record: Record) -> Document:
    """The accuracy and the time of training with a frozen backbone and of training all weights."""
    figure = FigureSpec(
        "compared",
        "Accuracy on the test images at each evaluation, by epoch and by time since the start (with the backbone "
        "frozen, one pass of it over all images comes first). One run of each with one seed, each with its own recipe.",
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
    note = "A dash: not reached. The best is the highest accuracy of either at any evaluation."
    sections = (
        Section("Frozen against full", _summary(record), figures=(figure,), leading=True),
        Section("Time to accuracy", sentences(note), (reached, pair_table(record.rows(PAIRS)))),
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
            f"Training all weights instead of the head changes accuracy by {difference}; McNemar's exact p on the "
            f"images that only one predicts correctly is {pair.p:.2g}. An epoch of the head alone takes "
            f"{pace['frozen']:.2g} s, an epoch of all weights {pace['full']:.2g} s: "
            f"{pace['full'] / pace['frozen']:,.0f} times as long.",
            (pair,),
        ),
    )


def _draw(record: Record) -> "Figure":
    from vitlens.figures.train_compared import learning_compared

    ways = {
        words: [(row.epochs, row.seconds, row.accuracy) for row in record.rows(TEST_ACCURACIES) if row.way == way]
        for way, words in WAYS.items()
    }
    return learning_compared(ways=ways, title=record.config.title)
