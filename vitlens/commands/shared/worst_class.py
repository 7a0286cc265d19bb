"""The classes of the data: accuracy of each, confusions, and the one that a model classifies worst; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.commands.shared.comparison import FEWEST
from vitlens.record import col
from vitlens.report.claims import Claim, below, found
from vitlens.report.sections import Chart, Section
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEWEST_CLASSES: Final = 3
_DRAWN: Final = 3  # models


@dataclass(frozen=True)
class ClassRow:
    """One class of the data, for one model; accuracy: None where it has no images."""

    model: str = col("model")
    class_name: str = col("class")
    n: int = col("images")
    accuracy: Estimate | None = col("accuracy", default=None)


@dataclass(frozen=True)
class ConfusionRow:
    """How many images of one class one model takes for another; only cells that are not 0."""

    model: str = col("model")
    truth: str = col("class")
    prediction: str = col("prediction")
    count: int = col("images")


def worst_class(model: str, rows: Sequence[ClassRow], overall: Estimate) -> Iterator[Claim]:
    """The class with the lowest accuracy, where it is below the overall one also for as many tests as classes."""
    own = [row for row in rows if row.model == model and row.n >= FEWEST]
    judged = [(row, row.accuracy) for row in own if row.accuracy is not None]
    if len(judged) < _FEWEST_CLASSES:
        return
    worst, accuracy = min(judged, key=lambda pair: pair[1].value)
    if below(accuracy, overall.value, len(judged)):
        yield found(
            "worst class", model,
            "**{{ row.model }}** classifies images of class {{ row.class_name }} worst: {{ effect }}, beside "
            "{{ overall|value }} of all images.",
            replace(accuracy, n=worst.n), given={"row": worst, "overall": overall},
            reference=overall.value, place="per_class",
        )  # fmt: skip


def class_sections() -> tuple[Section, Section]:
    """Which classes are recognised worst, and which are confused, of a record with per_class and confusion."""
    from vitlens.charts import bars

    return (
        Section(
            "Which classes are recognised worst?",
            lambda record: [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST],
            order=lambda row: row.accuracy.value,
            opening="The lowest accuracy is that of **{{ first.model }}** on class {{ first.class_name }}, "
            "{{ first.accuracy|alone }} of {{ first.n }} images; the highest is {{ rows[-1].accuracy|value }}.",
            columns=("model", "class_name", "n", "accuracy"),
            charts=(Chart(
                "per_class", bars("class_name", "accuracy", of="model"),
                "Accuracy of each class with its interval, lowest first. Where intervals overlap, classes may differ "
                "by chance.",
                title="Accuracy by class",
            ),),
        ),
        Section(
            "Which classes are confused?", _confused, order=lambda row: -row.count,
            opening="{% if first.count > 1 %}Most often **{{ first.model }}** predicts {{ first.prediction }} for "
            "{{ first.truth }}: {{ first.count }} images.{% else %}No confusion occurs twice.{% endif %}",
            columns=("model", "truth", "prediction", "count"),
            charts=(Chart(
                "confusion", _confusion,
                "Images by true class (rows) and predicted class (columns); colour: share of the row. Classes that "
                "do not occur are left out.",
                title="Confusions of {{ first.model }}", each="model",
                rows=lambda record: [row for row in record.confusion if row.model in record.aliases[:_DRAWN]],
            ),),
        ),
    )  # fmt: skip


def _confused(record: Any) -> list[ConfusionRow]:
    several = sum(row.count for row in record.confusion if row.model == record.confusion[0].model) >= FEWEST
    return [row for row in record.confusion if row.truth != row.prediction and several]


def _confusion(rows: Sequence[ConfusionRow], _: str) -> "Figure":
    """The counts among classes that are a label or a prediction of at least one image."""
    from vitlens.figures.confusion import confusion_matrix

    names = list(dict.fromkeys([*(row.truth for row in rows), *(row.prediction for row in rows)]))
    counts = np.zeros((len(names), len(names)), np.int64)
    for row in rows:
        counts[names.index(row.truth), names.index(row.prediction)] = row.count
    return confusion_matrix(counts=counts, classes=names, model=rows[0].model)
