"""Accuracy of each class, clean and under attack."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import BY_CLASS, SAMPLE
from vitlens.commands.attack.record.rows import RobustClassRow
from vitlens.commands.attack.report.ends import ends
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTION: Final = (
    "Classes that are hard to begin with have less to lose. Classes with few images have wide intervals, and the first "
    "and the last of many stand out by chance too."
)


def by_class(record: Record) -> Iterator[Section]:
    """The classes of lowest and highest robust accuracy, where images have labels."""
    if record.rows(BY_CLASS):
        figure = FigureSpec("classes", _CAPTION, partial(_draw, record))
        yield Section("Class by class", tuple(_sentences(record)), figures=(figure,))


def _of_models(record: Record) -> Iterator[tuple[str, list[RobustClassRow]]]:
    for alias in record.aliases:
        rows = [row for row in record.rows(BY_CLASS) if row.model == alias]
        if rows:
            yield alias, rows


def _sentences(record: Record) -> Iterator[Sentence]:
    for alias, rows in _of_models(record):
        ordered = sorted(rows, key=lambda row: row.robust_accuracy)
        least, most = ordered[0], ordered[-1]
        if apart(least.robust, most.robust) is Side.BELOW:
            text = (
                f"{alias}: robust accuracy is lowest for {least.class_name} ({in_words(least.robust)}) and highest for "
                f"{most.class_name} ({in_words(most.robust)})."
            )
        else:
            text = f"{alias}: the classes are not shown to differ in robust accuracy: all intervals overlap."
        yield Sentence(text, tuple(rows))


def _draw(record: Record) -> "Figure":
    from vitlens.figures.attack.classes import ByClass, class_robustness

    sample = record.rows(SAMPLE)[0]
    return class_robustness(
        models=[
            ByClass(alias, ends(row.clean for row in rows), ends(row.robust for row in rows))
            for alias, rows in _of_models(record)
        ],
        classes=list(dict.fromkeys(row.class_name for row in record.rows(BY_CLASS))),
        title=f"Accuracy by class, clean and under {sample.title} at {epsilon_words(sample.epsilon, sample.norm)}",
    )
