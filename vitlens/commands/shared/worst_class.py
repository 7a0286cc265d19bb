"""Accuracy by class, confusions, and the class that a model classifies worst; free of torch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Final

from vitlens.analysis.evaluation.rows import ClassRow, ConfusionRow
from vitlens.record import col
from vitlens.report.claims import FEWEST, Claim, below, found
from vitlens.report.sections import Chart, Section
from vitlens.uncertainty import Estimate

_FEWEST_CLASSES: Final = 3  # of which one can be called the worst
_MOST_MODELS: Final = 3  # with a drawn matrix
_MOST_CLASSES: Final = 14  # of a drawn matrix, so that numbers fit


def worst_class(model: str, rows: Sequence[ClassRow], overall: Estimate) -> Iterator[Claim]:
    """Yield the class with the lowest accuracy if it is significantly below the overall accuracy.

    The test is corrected for the number of classes.
    """
    accuracies: dict[ClassRow, Estimate] = {}
    for row in rows:
        if row.model == model and row.n >= FEWEST and row.accuracy is not None:
            accuracies[row] = row.accuracy
    if len(accuracies) < _FEWEST_CLASSES:
        return
    worst = min(accuracies, key=lambda row: accuracies[row].value)
    accuracy = accuracies[worst]
    if below(accuracy, overall.value, tests=len(accuracies)):
        yield found(
            "worst class",
            model,
            "**{{ row.model }}** classifies images of class {{ row.class_name }} worst: "
            "{{ effect }}, compared with {{ overall|value }} overall.",
            replace(accuracy, n=worst.n),
            given={"row": worst, "overall": overall},
            reference=overall.value,
            place="per_class",
        )


def class_sections() -> tuple[Section, Section]:
    """Return the sections about the worst classes and the confusions, for a record with both
    tables.
    """
    from vitlens.charts import bars, matrix

    return (
        Section(
            "Which classes are recognised worst?",
            _judged_classes,
            order=lambda row: row.accuracy.value,
            opening="**{{ first.model }}** has the lowest accuracy on class "
            "{{ first.class_name }}, {{ first.accuracy|alone }} (n = {{ first.n }}); its highest "
            "is {{ (rows|selectattr('model', 'eq', first.model)|list)[-1].accuracy|value }}.",
            columns=("model", "class_name", "n", "accuracy"),
            charts=(
                Chart(
                    "per_class",
                    bars("class_name", "accuracy", of="model"),
                    "Accuracy of each class with its interval, lowest first. Where intervals "
                    "overlap, classes may differ by chance.",
                    title="Accuracy by class",
                ),
            ),
        ),
        Section(
            "Which classes are confused?",
            _confusions,
            order=lambda row: -row.count,
            opening="{% if first.count > 1 %}Most often **{{ first.model }}** predicts "
            "{{ first.prediction }} for {{ first.truth }}: {{ first.count }} images.{% else %}No "
            "confusion occurs twice.{% endif %}",
            columns=("model", "truth", "prediction", "count"),
            charts=(
                Chart(
                    "confusion",
                    matrix(
                        "truth",
                        "prediction",
                        "share",
                        words=lambda row: str(row.count) if row.count else "",
                    ),
                    "Images by true class (rows) and predicted class (columns)"
                    "{% if first.left_out %} of the classes that are confused most{% endif %}; "
                    "colour: share of all images of the class.",
                    title="Confusions of {{ first.model }}",
                    each="model",
                    rows=_cells,
                ),
            ),
        ),
    )


def _judged_classes(record: Any) -> list[ClassRow]:
    """Return the classes with enough images."""
    return [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST]


def _confusions(record: Any) -> list[ConfusionRow]:
    """Return the confusions; nothing for too few images."""
    if not record.confusion:
        return []
    # all models classify the same images, so the counts of one model give their number
    first = record.confusion[0].model
    images = sum(row.count for row in record.confusion if row.model == first)
    if images < FEWEST:
        return []
    return [row for row in record.confusion if row.truth != row.prediction]


@dataclass(frozen=True)
class _Cell:
    """A cell of the drawn matrix.

    share: the share of the images of class `truth`, None if it has none.
    count: the number of images.
    left_out: the number of classes with images or predictions that are not drawn.
    """

    model: str
    truth: str = col("class")
    prediction: str = col("prediction")
    share: float | None = col("share of the class", unit="fraction")
    count: int = col("images")
    left_out: int = col("classes left out")


def _cells(record: Any) -> Iterator[_Cell]:
    """Yield the cells of the matrix of each of the first models.

    It has the at most _MOST_CLASSES classes that the model confuses most, in the order of the data.
    """
    for model in record.aliases[:_MOST_MODELS]:
        counts = {
            (row.truth, row.prediction): row.count for row in record.confusion if row.model == model
        }
        images_of_class = Counter[str]()
        for (truth, _), count in counts.items():
            images_of_class[truth] += count
        names = [row.class_name for row in record.per_class if row.model == model]
        occurring = set(chain.from_iterable(counts))  # truths and predictions: keys are pairs
        candidates = [name for name in names if name in occurring]
        drawn = _most_confused(candidates, counts)
        for truth, prediction in product(drawn, repeat=2):
            count = counts.get((truth, prediction), 0)
            share = None
            if images_of_class[truth]:
                share = count / images_of_class[truth]
            left_out = len(candidates) - len(drawn)
            yield _Cell(model, truth, prediction, share, count, left_out)


def _most_confused(names: Sequence[str], counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the classes in most confusions, in the order of `names`.

    counts: the counts of images, by label and prediction.
    """
    errors = Counter[str]()
    for (truth, prediction), count in counts.items():
        if truth != prediction:
            errors[truth] += count
            errors[prediction] += count
    by_errors = sorted(names, key=lambda name: -errors[name])
    most_confused = set(by_errors[:_MOST_CLASSES])
    return [name for name in names if name in most_confused]
