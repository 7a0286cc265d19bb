"""The tables of two models' predictions on the same images, and examples of their errors."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import (
    Evaluation,
    accuracy,
    calibration_error,
    calibration_rows,
    confusion,
    per_class,
)
from vitlens.analysis.evaluation.rows import ClassRow, ConfusionRow
from vitlens.analysis.failures.compare import Comparison
from vitlens.commands.compare.record import CELLS, CellRow, CompareRecord, ScoreRow
from vitlens.commands.shared.comparison import in_pairs

EXAMPLES = 6  # images of each cell whose maps are shown


def prediction_record(comparison: Comparison, seed: int) -> CompareRecord:
    """Return a record with the tables of the predictions: scores, paired test, cells, classes,
    calibration.
    """
    evaluations = (comparison.first, comparison.second)
    correct = {evaluation.alias: evaluation.correct.numpy() for evaluation in evaluations}
    groups = None
    if comparison.first.groups is not None:
        groups = comparison.first.groups.numpy()
    return CompareRecord(
        scores=tuple(_score_rows(comparison, seed)),
        pairs=in_pairs(correct, groups=groups, seed=seed),
        cells=tuple(_cell_rows(comparison)),
        per_class=tuple(_class_rows(evaluations)),
        confusions=tuple(_confusion_rows(evaluations)),
        calibration=(
            *calibration_rows(comparison.first),
            *calibration_rows(comparison.second),
        ),
    )


def _score_rows(comparison: Comparison, seed: int) -> Iterator[ScoreRow]:
    evaluations = (comparison.first, comparison.second)
    for evaluation, accuracy_of_model in zip(evaluations, comparison.accuracies()):
        error = calibration_error(
            evaluation.probabilities,
            evaluation.labels,
            groups=evaluation.groups,
            seed=seed,
        )
        yield ScoreRow(evaluation.alias, accuracy_of_model, error)


def _cell_rows(comparison: Comparison) -> Iterator[CellRow]:
    first = comparison.first.alias
    second = comparison.second.alias
    for index, (cell, name) in enumerate(CELLS.items()):
        is_member = comparison.cells == index
        yield CellRow(
            first=first,
            second=second,
            cell=cell,
            name=name.format(first=first, second=second),
            count=int(is_member.sum()),
            share=accuracy(is_member, groups=comparison.first.groups),
        )


def _class_rows(evaluations: Sequence[Evaluation]) -> Iterator[ClassRow]:
    """Yield the accuracy of each model on each class that has images, class by class."""
    count = len(evaluations[0].classes)
    rows_of_models = [list(per_class(evaluation, count=count)) for evaluation in evaluations]
    for class_index in range(count):
        for rows in rows_of_models:
            if rows[class_index].n:
                yield rows[class_index]


def _confusion_rows(evaluations: Sequence[Evaluation]) -> Iterator[ConfusionRow]:
    """Yield the confusions of each model, those with the most images of all models first."""
    names = evaluations[0].classes
    confusions = {}  # by model, (truth, prediction)
    for evaluation in evaluations:
        matrix = confusion(evaluation.labels, evaluation.predictions, count=len(names))
        confusions[evaluation.alias] = matrix.fill_diagonal_(0)
    total = torch.stack(list(confusions.values())).sum(0)
    pairs = total.nonzero().tolist()
    pairs.sort(key=lambda pair: -int(total[pair[0], pair[1]]))
    for truth, prediction in pairs:
        for alias, matrix in confusions.items():
            count = int(matrix[truth, prediction])
            if count:
                yield ConfusionRow(alias, names[truth], names[prediction], count)


def choose_examples(comparison: Comparison) -> list[Tensor]:
    """Return the indices of a few images of each cell.

    Errors are those with the most confident wrong predictions; images that both models classify
    correctly are drawn at random.
    """
    # confidence in a wrong prediction, 0 where the prediction is correct
    first_confidence = comparison.first.confidence * ~comparison.first.correct
    second_confidence = comparison.second.confidence * ~comparison.second.correct
    confidence = torch.maximum(first_confidence, second_confidence)
    examples = []
    for index, cell in enumerate(CELLS):
        members = (comparison.cells == index).nonzero().flatten()
        if cell == "both-right":
            order = torch.randperm(len(members), generator=torch.Generator().manual_seed(0))
        else:
            order = confidence[members].argsort(descending=True, stable=True)
        examples.append(members[order[:EXAMPLES]])
    return examples
