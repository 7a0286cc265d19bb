"""Accuracy by class and confusions: rows, section, and the class that a model classifies worst beyond chance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from vitlens.charts import bars
from vitlens.commands.shared.comparison import FEWEST
from vitlens.record import col
from vitlens.report.document import Finding
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.report.sections import Chart, Section
from vitlens.uncertainty import Estimate, Side, beyond, widened

NAMED: Final = 10  # images of a class from which on it can be named as the worst
_FEWEST: Final = 3  # classes
Row = TypeVar("Row", bound="OfImages")


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


SECTION: Final = Section(
    "Which classes are recognised worst?",
    lambda record: [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST],
    order=lambda row: row.accuracy.value,
    opening="The lowest accuracy is that of **{{ first.model }}** on class {{ first.class_name }}, "
    "{{ first.accuracy|alone }} of {{ first.n }} images; the highest is {{ rows[-1].accuracy|value }}.",
    columns=("model", "class_name", "n", "accuracy"),
    charts=(
        Chart(
            "per_class",
            bars("class_name", "accuracy", of="model"),
            "Accuracy of each class with its interval, lowest first. Where intervals overlap, classes may differ by "
            "chance.",
            title="Accuracy by class",
        ),
    ),
)


class OfImages(Protocol):
    """A class with so many images."""

    @property
    def n(self) -> int:
        """Its images."""
        ...


class ClassAccuracy(OfImages, Protocol):
    """The accuracy of one class."""

    @property
    def class_name(self) -> str:
        """Its name."""
        ...

    @property
    def estimate(self) -> Estimate | None:
        """The accuracy; None without images."""
        ...


def worst_of(rows: Sequence[tuple[Row, Estimate | None]], overall: Estimate) -> tuple[Row, Estimate] | None:
    """The class with the lowest accuracy, where it is below the overall one also for as many looks as classes."""
    judged = [(row, accuracy) for row, accuracy in rows if row.n >= NAMED and accuracy is not None]
    if len(judged) < _FEWEST:
        return None
    worst, accuracy = min(judged, key=lambda pair: pair[1].value)
    below = beyond(widened(accuracy, len(judged)), overall.value) is Side.BELOW
    return (worst, accuracy) if below else None


def worst_class(alias: str, rows: Sequence[ClassAccuracy], overall: Estimate) -> Finding | None:
    """The same as a finding."""
    found = worst_of([(row, row.estimate) for row in rows], overall)
    if found is None:
        return None
    worst, accuracy = found
    return finding(
        f"**{alias}** classifies images of class {worst.class_name} worst; over all classes its top-1 accuracy is "
        f"{in_words(overall, with_n=False)}.",
        replace(accuracy, n=worst.n),
        kind="fact",
        reference=overall.value,
        figure="per_class",
        rows=(worst, overall),
    )
