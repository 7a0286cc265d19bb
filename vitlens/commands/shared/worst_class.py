"""The classes of the data: accuracy of each, confusions, and the one that a model classifies worst; free of torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from vitlens.record import OfModel, col
from vitlens.report.claims import FEWEST, Claim, below, found
from vitlens.report.sections import Chart, Section
from vitlens.uncertainty import Estimate

_FEWEST_CLASSES: Final = 3
_DRAWN: Final = 3  # models
_CLASSES: Final = 14  # of a drawn matrix, so that numbers fit


@dataclass(frozen=True)
class ClassRow(OfModel):
    """One class of the data, for one model; accuracy: None where it has no images."""

    class_name: str = col("class")
    n: int = col("images")
    accuracy: Estimate | None = col("accuracy", default=None)


@dataclass(frozen=True)
class ConfusionRow(OfModel):
    """How many images of one class one model takes for another; only cells that are not 0."""

    truth: str = col("class")
    prediction: str = col("prediction")
    count: int = col("images")


def worst_class(model: str, rows: Sequence[ClassRow], overall: Estimate) -> Iterator[Claim]:
    """Yield the class with the lowest accuracy, where it is below the overall one also for as many tests as classes."""
    own = [row for row in rows if row.model == model and row.n >= FEWEST]
    judged = [(row, row.accuracy) for row in own if row.accuracy is not None]
    if len(judged) < _FEWEST_CLASSES:
        return
    worst, accuracy = min(judged, key=lambda pair: pair[1].value)
    if below(accuracy, overall.value, len(judged)):
        yield found(
            "worst class",
            model,
            "**{{ row.model }}** classifies images of class {{ row.class_name }} worst: {{ effect }}, compared with "
            "{{ overall|value }} overall.",
            replace(accuracy, n=worst.n),
            given={"row": worst, "overall": overall},
            reference=overall.value,
            place="per_class",
        )


def class_sections() -> tuple[Section, Section]:
    """Return which classes are recognised worst, and which are confused, of a record with per_class and confusion."""
    from vitlens.charts import bars, matrix

    return (
        Section(
            "Which classes are recognised worst?",
            lambda record: [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST],
            order=lambda row: row.accuracy.value,
            opening="**{{ first.model }}** has the lowest accuracy on class {{ first.class_name }}, "
            "{{ first.accuracy|alone }} (n = {{ first.n }}); the highest is {{ rows[-1].accuracy|value }}.",
            columns=("model", "class_name", "n", "accuracy"),
            charts=(
                Chart(
                    "per_class",
                    bars("class_name", "accuracy", of="model"),
                    "Accuracy of each class with its interval, lowest first. Where intervals overlap, classes may "
                    "differ by chance.",
                    title="Accuracy by class",
                ),
            ),
        ),
        Section(
            "Which classes are confused?",
            _confused,
            order=lambda row: -row.count,
            opening="{% if first.count > 1 %}Most often **{{ first.model }}** predicts {{ first.prediction }} for "
            "{{ first.truth }}: {{ first.count }} images.{% else %}No confusion occurs twice.{% endif %}",
            columns=("model", "truth", "prediction", "count"),
            charts=(
                Chart(
                    "confusion",
                    matrix("truth", "prediction", "share", words=lambda row: str(row.count) if row.count else ""),
                    "Images by true class (rows) and predicted class (columns) of the classes that are confused most; "
                    "colour: share of all images of the class.",
                    title="Confusions of {{ first.model }}",
                    each="model",
                    rows=_cells,
                ),
            ),
        ),
    )


def _confused(record: Any) -> list[ConfusionRow]:
    several = sum(row.count for row in record.confusion if row.model == record.confusion[0].model) >= FEWEST
    return [row for row in record.confusion if row.truth != row.prediction and several]


@dataclass(frozen=True)
class _Cell:
    """A cell of the drawn matrix; share: of the images of the class."""

    model: str
    truth: str = col("class")
    prediction: str = col("prediction")
    share: float | None = col("share of the class", unit="fraction")
    count: int = col("images")


def _cells(record: Any) -> Iterator[_Cell]:
    """Yield all pairs of the classes that the first models confuse most, at most _CLASSES, in the order of the data."""
    for model in record.aliases[:_DRAWN]:
        counts = {(row.truth, row.prediction): row.count for row in record.confusion if row.model == model}
        occur = {name for pair in counts for name in pair}
        every = [row.class_name for row in record.per_class if row.model == model and row.class_name in occur]
        errors = Counter[str]()
        totals = Counter[str]()
        for (truth, prediction), count in counts.items():
            totals[truth] += count
            errors.update({truth: count, prediction: count} if truth != prediction else {})
        most = sorted(every, key=lambda name: -errors[name])[:_CLASSES]
        for truth, prediction in product([name for name in every if name in most], repeat=2):
            count = counts.get((truth, prediction), 0)
            share = count / totals[truth] if totals[truth] else None
            yield _Cell(model, truth, prediction, share, count)
