"""The tables and arrays of a command that asks why models fail, and how to look things up in them.

`failures` makes claims of them, `failures_sections` sections, and `failures_measure` measures them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from numpy.typing import NDArray

from vitlens.analysis.failures.rows import (
    Cause,
    CovariateRow,
    DifferenceRow,
    InterventionRow,
    QuarterRow,
    causes,
)
from vitlens.arrays import Form, Indices, Pixels, Words
from vitlens.record import Record, arrays, by, table
from vitlens.uncertainty import Estimate

QUARTERS: Final = 4


@dataclass(frozen=True)
class MendedArrays:
    """Errors of one model that the change of a cause corrects and its control does not.

    image: (images,), the number of each image in the data.
    pixels, changed, control: the image, and it after the change and after the control.
    truth: (images,), the label.
    predictions: (3, images), the predictions for the image, after the change, and after the
        control.
    """

    image: Indices
    pixels: Pixels
    changed: Pixels
    control: Pixels
    truth: Words
    predictions: Annotated[NDArray[Any], Form("U", (3, None))]


@dataclass(frozen=True, kw_only=True)
class FailuresRecord(Record):
    """The tables and arrays of a command that asks why models fail."""

    covariates: tuple[CovariateRow, ...] = table()
    covariate_differences: tuple[DifferenceRow, ...] = table()
    quarters: tuple[QuarterRow, ...] = table()
    interventions: tuple[InterventionRow, ...] = table()
    failure_examples: Mapping[str, MendedArrays] = arrays("mended-{model}")


def properties_of(record: FailuresRecord, model: str) -> Sequence[CovariateRow]:
    """Return how each property separates the errors of one model."""
    return by(record.covariates, "model")[model]


def causes_of(record: FailuresRecord, model: str) -> tuple[Cause, ...]:
    """Return the causes of one model's errors that no other property rivals."""
    return causes(model, record.covariates, record.interventions)


def strongest_property(rows: Sequence[CovariateRow]) -> CovariateRow | None:
    """Return the property in which one model's errors differ most, None if they differ in none.

    Properties of images come before those that follow from predictions. Of the latter, only those
    with a next test count.
    """
    candidates = [row for row in rows if row.differs and (not row.known.outcome or row.next_test)]
    return min(
        candidates,
        key=lambda row: (row.known.outcome, -(row.likelihood_ratio or 0.0), row.p),
        default=None,
    )


def test_of(record: FailuresRecord, row: CovariateRow) -> InterventionRow | None:
    """Return the change of the images that tests a property; None where there is none."""
    for test in record.interventions:
        if is_test_of(test, row):
            return test
    return None


def is_test_of(test: InterventionRow, row: CovariateRow) -> bool:
    """Return True if a change of the images tests this property of this model."""
    return (test.model, test.covariate) == (row.model, row.covariate)


@dataclass(frozen=True)
class AccuracyByProperty:
    """The accuracy of one model on parts of the images by one property.

    part_count: QUARTERS, or fewer if many images have equal values.
    worst: the accuracy at the end where errors are more frequent.
    best: the accuracy at the opposite end.
    """

    part_count: int
    worst: Estimate
    best: Estimate


def accuracy_by_property(record: FailuresRecord, row: CovariateRow) -> AccuracyByProperty | None:
    """Return the accuracy by the property of a row; None where it was not measured."""
    parts = []  # from least to most of the property
    for quarter in record.quarters:
        if (quarter.model, quarter.covariate) == (row.model, row.covariate):
            parts.append(quarter)
    if not parts:
        return None
    least = parts[0].accuracy
    greatest = parts[-1].accuracy
    if row.more_in_errors:
        return AccuracyByProperty(len(parts), worst=greatest, best=least)
    return AccuracyByProperty(len(parts), worst=least, best=greatest)
