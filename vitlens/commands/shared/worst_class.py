"""The class that a model classifies worst, as a finding where chance among the classes does not explain it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from vitlens.report.document import Finding
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate, Side, beyond, widened

NAMED: Final = 10  # images of a class from which on it can be named as the worst
_FEWEST: Final = 3  # classes
Row = TypeVar("Row", bound="OfImages")


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
