"""Both models' predictions: accuracy, calibration, the cells of errors, errors by class and by image property."""

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from vitlens.analysis.answers.evaluate import Evaluation, accuracy, calibration, calibration_error
from vitlens.analysis.failures.errors import Comparison, Slice, by_class, by_number, confusions
from vitlens.analysis.failures.image_traits import MEASURES, OBJECT_SIZE
from vitlens.commands.compare.record import (
    ACCURACY,
    BY_CLASS,
    BY_NUMBER,
    CELL_SHARE,
    CELLS,
    CONFUSED,
    DIFFERENCE,
    MCNEMAR_P,
    ConfusedPairRow,
    NumberSliceRow,
    SliceRow,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.calibration import CALIBRATION, CALIBRATION_ERROR, CalibrationRow, calibration_rows
from vitlens.uncertainty import Estimate

TRAITS: Final = {**{name: measure.title for name, measure in MEASURES.items()}, OBJECT_SIZE: "object size"}


def write_answers(folder: RunFolder, comparison: Comparison, evaluations: Sequence[Evaluation], *, seed: int) -> None:
    """Accuracy, its difference with McNemar's test, calibration, the cells by class, and the confusions."""
    pair = {"first": comparison.first.alias, "second": comparison.second.alias}
    for alias, estimate in zip(pair.values(), comparison.accuracies(seed=seed)):
        folder.metric(ACCURACY(model=alias), estimate)
    n = len(comparison.labels)
    folder.metric(DIFFERENCE(**pair), comparison.difference(seed=seed))
    folder.metric(MCNEMAR_P(**pair), Estimate(comparison.p, n=n, unit=""))
    rows: list[CalibrationRow] = []
    for evaluation in evaluations:
        bins = calibration(evaluation.probabilities, evaluation.labels)
        error = calibration_error(evaluation.probabilities, evaluation.labels, groups=comparison.groups, seed=seed)
        folder.metric(CALIBRATION_ERROR(model=evaluation.alias), error)
        rows += calibration_rows(evaluation.alias, bins)
    folder.write(CALIBRATION, rows)
    for index, column in enumerate(CELLS):
        share = accuracy(comparison.cells == index, groups=comparison.groups, seed=seed)
        folder.metric(CELL_SHARE(**pair, cell=column.replace("_", "-")), share)
    folder.write(BY_CLASS, [_slice_row(part) for part in by_class(comparison, seed=seed)])
    confused = confusions(comparison)
    folder.write(CONFUSED, [ConfusedPairRow(row.truth, row.prediction, row.first, row.second) for row in confused])


def write_numbers(folder: RunFolder, comparison: Comparison, traits: Mapping[str, Tensor], *, seed: int) -> None:
    """Cells and accuracies in quarters of the images by every quantity: image traits, confidences and margins."""
    quantities = {TRAITS[name]: values for name, values in traits.items()}
    for model in (comparison.first, comparison.second):
        quantities[f"confidence of {model.alias}"] = model.confidence
        quantities[f"margin of {model.alias}"] = model.margin
    rows = [
        _number_row(name, part)
        for name, values in quantities.items()
        for part in by_number(comparison, values, seed=seed)
    ]
    folder.write(BY_NUMBER, rows)


def _slice_row(part: Slice) -> SliceRow:
    counts = {column: part.counts[cell] for column, cell in CELLS.items()}
    return SliceRow(
        name=part.name,
        n=part.n,
        **counts,
        first_accuracy=part.first.value,
        first_low=part.first.low,
        first_high=part.first.high,
        second_accuracy=part.second.value,
        second_low=part.second.low,
        second_high=part.second.high,
    )


def _number_row(number: str, part: Slice) -> NumberSliceRow:
    if part.low is None or part.high is None:
        raise TypeError(f"expected a slice of {number} with bounds, found {part.name!r} without")
    lowest, highest = round(part.low, 6), round(part.high, 6)
    return NumberSliceRow(**vars(_slice_row(part)), number=number, lowest=lowest, highest=highest)
