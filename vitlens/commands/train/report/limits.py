"""What could overturn the result of a training, the most serious first; at most five."""

from collections.abc import Iterator

from vitlens.commands.shared.pairs import PAIRS
from vitlens.commands.train.conclusions import difference
from vitlens.commands.train.record import ACCURACY, BEST_ACCURACY, HISTORY, TEST_ACCURACIES, WAYS
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import LEVEL


def limits(record: Record) -> Iterator[Sentence]:
    """At most five."""
    if record.rows(TEST_ACCURACIES):
        yield from _of_comparison(record)
        return
    alias = record.aliases[0]
    own = record.metric(ACCURACY(model=alias))
    yield Sentence(
        f"{alias} was trained once, with one seed. The interval of its accuracy, {in_words(own)}, covers the choice of "
        "test images; another seed may give an accuracy outside of it.",
        (own,),
    )
    yield from _selected(record, alias)
    yield from _short(record)
    for row in record.rows(PAIRS):
        gap = difference(record, row.first, row.second)
        if row.p_holm > LEVEL and gap is not None:
            yield Sentence(
                f"No difference is shown between {row.first} and {row.second}, which may still differ by anything "
                f"within {in_words(gap)}.",
                (row, gap),
            )
            break


def _of_comparison(record: Record) -> Iterator[Sentence]:
    """The same for two ways of training."""
    accuracies = [record.metric(ACCURACY(model=way)) for way in WAYS]
    yield Sentence(
        f"Each way was trained once, with one seed: the intervals cover the choice of {accuracies[0].n or 0:,} test "
        "images, and the order of the two may change with the seed.",
        tuple(accuracies),
    )
    rows = record.rows(TEST_ACCURACIES)
    yield Sentence(
        f"The best accuracy, of which the table shows shares, is the highest of {len(rows)} evaluations on the same "
        "test images, and is optimistic for that reason.",
        (*rows, len(rows)),
    )


def _selected(record: Record, alias: str) -> Iterator[Sentence]:
    """That the best epoch was chosen on the test images."""
    best, own = record.metrics.get(BEST_ACCURACY(model=alias)), record.metric(ACCURACY(model=alias))
    if best is not None and best.value > own.value:
        yield Sentence(
            f"The weights of the best epoch reached {percent(best.value, 1)}, but were selected on the test images: "
            "that number is optimistic, and is not the result.",
            (best,),
        )


def _short(record: Record) -> Iterator[Sentence]:
    """That a training of few epochs says little about what the architecture can reach."""
    epochs = len(record.rows(HISTORY))
    if epochs < 30:
        words = "1 epoch" if epochs == 1 else f"{epochs:,} epochs"
        yield Sentence(
            f"The training had {words}: its accuracy is that of this budget, and models that learn more slowly would "
            "gain most by a longer one.",
            (epochs,),
        )
