"""The class that a model classifies worst, as a finding where chance among the classes does not explain it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from vitlens.report.document import Finding
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate, Side, beyond, widened

NAMED: Final = 10  # images of a class from which on it can be named as the worst
_FEWEST: Final = 3  # classes


class ClassAccuracy(Protocol):
    """The accuracy of one class."""

    @property
    def class_name(self) -> str:
        """Its name."""
        ...

    @property
    def n(self) -> int:
        """Its images."""
        ...

    @property
    def estimate(self) -> Estimate | None:
        """The accuracy; None without images."""
        ...


def worst_class(alias: str, rows: Sequence[ClassAccuracy], overall: Estimate) -> Finding | None:
    """The class with the lowest accuracy, where it is below the overall one also for as many looks as classes."""
    known = [(row, row.estimate) for row in rows if row.n >= NAMED]
    judged = [(row, estimate) for row, estimate in known if estimate is not None]
    if len(judged) < _FEWEST:
        return None
    worst, accuracy = min(judged, key=lambda pair: pair[1].value)
    if beyond(widened(accuracy, len(judged)), overall.value) is not Side.BELOW:
        return None
    return finding(
        f"**{alias}** classifies images of class {worst.class_name} worst; over all classes its top-1 accuracy is "
        f"{in_words(overall, with_n=False)}.",
        replace(accuracy, n=worst.n),
        kind="fact",
        reference=overall.value,
        figure="per_class",
        rows=(worst, overall),
    )
