"""Accuracy, calibration and confusions of one model or several on the same labelled images."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import (
    Evaluation,
    accuracy,
    calibration,
    calibration_by_prediction,
    calibration_error,
    confusion,
    evaluate,
    per_class,
    require_labels,
    top_k,
)
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.evaluate.record import (
    ACCURACY,
    CLASSES,
    CONFIDENCE_GAP,
    CONFUSIONS,
    CROSS_ENTROPY,
    DIFFERENCE,
    PREDICTED,
    PREDICTIONS,
    TOP5,
    ClassRow,
    ConfusionRow,
    PredictedClassRow,
    PredictionArrays,
)
from vitlens.commands.scaffold.budgets import write_trainings
from vitlens.commands.scaffold.calibration import CALIBRATION, CALIBRATION_ERROR, calibration_rows
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits, read_as
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.pairs import PAIRS, PairRow
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.publish import publish
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes, share_of
from vitlens.uncertainty import accuracy_difference, bootstrap_mean, holm

MANY_CLASSES: Final = 20  # from which on top-5 accuracy is measured too
SHOWN: Final = 18  # images of a prediction grid


def measure(options: EvaluateOptions) -> Path | None:
    """Evaluate models on the test part of labelled data and write the report; returns the report's path.

    With several models McNemar's exact test for each pair. Of several processes each takes its share of the images; all
    but the first return None. Raises InputError (or one of its kind) before anything is written.
    """
    processes, run = join_run(options.run)
    data = options.data or "digits"
    with processes.main_process_first():
        models = load_models(options.models, command="evaluate", model_options=options.model_options, options=run)
        splits = load_splits(models, options=run, data=data)
    for split in splits:
        require_labels(split)
        share_of(split, processes)
    splits = read_as(models, splits, run)
    if not processes.is_first:
        _evaluations(models, splits, processes, run)
        return None
    aliases, split = [model.alias for model in models], splits[0]
    with RunFolder.create(
        "evaluate",
        name_parts=(*aliases, data),
        title=f"{' and '.join(aliases)} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=models, split=split),
        formats=run.formats,
    ) as folder:
        write_trainings(folder, models)
        write_evaluations(folder, _evaluations(models, splits, processes, run), splits, seed=run.seed)
        return publish(folder)


def _evaluations(
    models: Sequence[Model], splits: Sequence[Split], processes: Processes, options: RunOptions
) -> list[Evaluation]:
    """The logits of each model on all images of its split, of all processes."""
    evaluations = []
    for model, split in zip(models, splits):
        mine = share_of(split, processes)
        with progress(f"evaluating {model.alias}", len(mine), quiet=options.quiet) as advance:
            part = evaluate(model, mine, batch_size=options.batch_size, precision=options.precision, advance=advance)
        labels = require_labels(split).cpu().long()
        evaluations.append(replace(part, logits=processes.gathered(part.logits), labels=labels, groups=split.groups))
    return evaluations


def write_evaluations(
    folder: RunFolder, evaluations: Sequence[Evaluation], splits: Sequence[Split], *, seed: int
) -> None:
    """Write metrics, tables and predictions of models on the same images."""
    write_metrics(folder, evaluations, seed=seed)
    write_tables(folder, evaluations, classes=len(splits[0].classes), seed=seed)
    for evaluation, split in zip(evaluations, splits):
        folder.save(PREDICTIONS, _arrays(evaluation, split, seed=seed), model=evaluation.alias)


def write_metrics(folder: RunFolder, evaluations: Sequence[Evaluation], *, seed: int) -> None:
    """Write accuracy, cross-entropy and calibration of each model, and the difference of each pair."""
    for evaluation in evaluations:
        alias = evaluation.alias
        groups = None if evaluation.groups is None else evaluation.groups.numpy()
        folder.metric(ACCURACY(model=alias), accuracy(evaluation.correct, groups=evaluation.groups, seed=seed))
        if len(evaluation.classes) >= MANY_CLASSES:
            top5 = top_k(evaluation.logits, evaluation.labels, k=5)
            folder.metric(TOP5(model=alias), accuracy(top5, groups=evaluation.groups, seed=seed))
        losses = F.cross_entropy(evaluation.logits, evaluation.labels, reduction="none").numpy()
        folder.metric(CROSS_ENTROPY(model=alias), bootstrap_mean(losses, groups=groups, seed=seed, unit="nats"))
        error = calibration_error(evaluation.probabilities, evaluation.labels, groups=evaluation.groups, seed=seed)
        folder.metric(CALIBRATION_ERROR(model=alias), error)
        excess = evaluation.probabilities.amax(-1).double() - evaluation.correct.double()
        folder.metric(CONFIDENCE_GAP(model=alias), bootstrap_mean(excess.numpy(), groups=groups, seed=seed))
    for first, second in combinations(evaluations, 2):
        gain = accuracy_difference(first.correct, second.correct, groups=first.groups, seed=seed)
        folder.metric(DIFFERENCE(first=first.alias, second=second.alias), gain)


def write_tables(folder: RunFolder, evaluations: Sequence[Evaluation], *, classes: int, seed: int) -> None:
    """Write accuracy by class, confusions, calibration by bin, and each pair of models. classes: those of the data."""
    folder.write(CLASSES, [row for evaluation in evaluations for row in _class_rows(evaluation, classes, seed)])
    folder.write(PREDICTED, [row for evaluation in evaluations for row in _predicted_rows(evaluation, seed)])
    folder.write(CONFUSIONS, [row for evaluation in evaluations for row in _confusion_rows(evaluation)])
    bins = {evaluation.alias: calibration(evaluation.probabilities, evaluation.labels) for evaluation in evaluations}
    folder.write(CALIBRATION, [row for alias, own in bins.items() for row in calibration_rows(alias, own)])
    folder.write(PAIRS, [PairRow(**asdict(pair)) for pair in pairs(evaluations)])


def _class_rows(evaluation: Evaluation, classes: int, seed: int) -> Iterator[ClassRow]:
    for score in per_class(evaluation, count=classes, seed=seed):
        right = score.accuracy
        values = (None, None, None) if right is None else (right.value, right.low, right.high)
        yield ClassRow(evaluation.alias, score.name, score.n, *values)


def _predicted_rows(evaluation: Evaluation, seed: int) -> list[PredictedClassRow]:
    """Confidence against accuracy of the images that are predicted as each class."""
    classes = list(calibration_by_prediction(evaluation, seed=seed))
    return [
        PredictedClassRow(
            evaluation.alias, each.name, each.n, each.confidence, each.accuracy, each.gap.value, each.gap.low,
            each.gap.high, each.p, p_holm,
        )
        for each, p_holm in zip(classes, holm([each.p for each in classes]))
    ]  # fmt: skip


def _confusion_rows(evaluation: Evaluation) -> Iterator[ConfusionRow]:
    names = evaluation.classes
    counts = confusion(evaluation.labels, evaluation.predictions, count=len(names))
    for truth, prediction in counts.nonzero().tolist():
        yield ConfusionRow(evaluation.alias, names[truth], names[prediction], int(counts[truth, prediction]))


def _arrays(evaluation: Evaluation, split: Split, *, seed: int) -> PredictionArrays:
    probability, prediction = evaluation.probabilities.max(-1)
    likely = evaluation.probabilities.topk(min(5, len(evaluation.classes)), dim=-1)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    random = order[:SHOWN].sort().values
    wrong = (~evaluation.correct).nonzero().flatten()
    surest = wrong[probability[wrong].argsort(descending=True, stable=True)[:SHOWN]]
    return PredictionArrays(
        classes=np.array(evaluation.classes),
        label=evaluation.labels.numpy(),
        prediction=prediction.numpy(),
        probability=probability.numpy(),
        likely_classes=likely.indices.numpy(),
        likely_probabilities=likely.values.numpy(),
        random=random.numpy(),
        random_pixels=_pixels(split, random),
        surest_errors=surest.numpy(),
        surest_errors_pixels=_pixels(split, surest),
    )


def _pixels(split: Split, indices: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return split.source.read(indices).numpy() if len(indices) else np.zeros((0, 3, *split.size), np.uint8)
