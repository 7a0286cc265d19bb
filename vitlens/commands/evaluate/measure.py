"""Accuracy, calibration and confusions of one model or several on the same labelled images."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from vitlens.analysis.evaluation.evaluate import (
    Evaluation,
    accuracy,
    calibration_bins,
    calibration_error,
    confusion,
    evaluate,
    per_class,
    require_labels,
)
from vitlens.analysis.evaluation.log_odds import cross_entropy
from vitlens.commands.evaluate import record as rows
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.run.load import load_splits, read_as
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import require_evaluable
from vitlens.commands.shared.calibration import calibration_rows
from vitlens.commands.shared.comparison import in_pairs
from vitlens.commands.shared.planted import FactorRow, factor_rows
from vitlens.commands.shared.saturation import is_saturated
from vitlens.commands.shared.trainings import trainings_of
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.models.language_image import has_text_tower
from vitlens.uncertainty import bootstrap_mean, calibration_test, holm, student_test

SAMPLED: Final = 450  # images on which it is decided whether errors are too few
MOST_SCENES: Final = 3600  # of drawn data, where the usual number leaves too few errors to explain
MANY_CLASSES: Final = 20  # from which on top-5 accuracy is measured too
SHOWN: Final = 12  # errors that are drawn


def measure(options: EvaluateOptions) -> Path | None:
    """Evaluate models on the test part of labelled data and write the report; returns the report's path.

    With several models McNemar's exact test for each pair. Of several processes each takes its share of the images; all
    but the first return None. Raises InputError (or one of its kind) before anything is written.
    """
    if options.run.labels is None:
        require_evaluable(options.data)
    run = Run("evaluate", replace(options, data=options.data or "digits"), repeat=True)
    run.splits = _with_more_scenes(run)
    for split in run.splits:
        require_labels(split)
    run.splits = read_as(run.models, run.splits, run.run)
    _ = run.shares  # fewer images than processes are refused before anything is written
    with run.folder("Evaluation of") as folder:
        evaluations = []
        seed = run.run.seed
        for model, split, mine in zip(run.models, run.splits, run.shares):
            with run.progress(f"evaluating {model.alias}", len(mine)) as advance:
                part = evaluate(model, mine, **run.passes, advance=advance)
            labels = require_labels(split).cpu().long()
            logits = run.processes.gathered(part.logits)
            evaluations.append(replace(part, logits=logits, labels=labels, groups=split.groups))
        return folder.publish(
            lambda: replace(
                _with_candidates(recorded(evaluations, classes=len(run.split.classes), seed=seed), run, evaluations),
                training=trainings_of(run.models),
                by_factor=_by_factor(run, evaluations),
                predictions={each.alias: _arrays(each, split) for each, split in zip(evaluations, run.splits)},
            )
        )


def _by_factor(run: Run[EvaluateOptions], evaluations: Sequence[Evaluation]) -> tuple[FactorRow, ...]:
    """Return the accuracy by the planted factors of drawn images; none where the factors are not known."""
    factors = run.split.factors
    if factors is None:
        return ()
    correct = {each.alias: each.correct.numpy() for each in evaluations}
    groups = None if run.split.groups is None else run.split.groups.cpu().numpy()
    return tuple(factor_rows(factors, correct, groups))


def _with_more_scenes(run: Run[EvaluateOptions]) -> Sequence[Split]:
    """Return more scenes of data that are drawn where a model makes too few errors on the usual number.

    A sample decides, not where the user limits the images. At most MOST_SCENES are drawn: the time stays bounded.
    """
    name = run.options.data
    is_drawn = name is not None and name in SETS and SETS[name].scenes
    if not is_drawn or run.run.limit is not None or len(run.split) >= MOST_SCENES:
        return run.splits
    for model, split in zip(run.models, run.splits):
        if split.labels is None:
            return run.splits
        sample = split.limit(SAMPLED, seed=run.run.seed)
        found = evaluate(model, sample, **run.passes)
        loss = float(cross_entropy(found.logits, require_labels(sample).cpu().long()).mean())
        share = float((~found.correct).double().mean())
        if is_saturated(round(share * len(split)), loss):
            return load_splits(run.models, options=run.run, data=name, limit=MOST_SCENES, repeat=True)
    return run.splits


def recorded(evaluations: Sequence[Evaluation], *, classes: int, seed: int) -> rows.EvaluateRecord:
    """Return the rows of models on the same images. classes: those of the data."""
    groups = None if evaluations[0].groups is None else evaluations[0].groups.numpy()
    return rows.EvaluateRecord(
        scores=tuple(_score(each, seed) for each in evaluations),
        per_class=tuple(
            ClassRow(each.alias, *score) for each in evaluations for score in per_class(each, count=classes)
        ),
        by_prediction=tuple(row for each in evaluations for row in predicted_rows(each, seed)),
        confusion=tuple(row for each in evaluations for row in _confusion_rows(each)),
        calibration=tuple(row for each in evaluations for row in calibration_rows(each.alias, calibration_bins(each))),
        pairs=in_pairs({each.alias: each.correct.numpy() for each in evaluations}, groups=groups, seed=seed),
    )


def _with_candidates(
    record: rows.EvaluateRecord, run: Run[EvaluateOptions], evaluations: Sequence[Evaluation]
) -> rows.EvaluateRecord:
    """Return the record with the number of classes among which a model that only reads their names chooses."""
    scores = []
    for score, model, evaluation in zip(record.scores, run.models, evaluations):
        count = len(evaluation.classes)
        scores.append(replace(score, candidates=count, chance=1 / count) if has_text_tower(model) else score)
    return replace(record, scores=tuple(scores))


def _score(evaluation: Evaluation, seed: int) -> rows.ScoreRow:
    groups = None if evaluation.groups is None else evaluation.groups.numpy()
    losses = cross_entropy(evaluation.logits, evaluation.labels).numpy()
    excess = evaluation.confidence.double() - evaluation.correct.double()
    many = len(evaluation.classes) >= MANY_CLASSES
    top5 = (evaluation.logits.topk(5).indices == evaluation.labels[:, None]).any(-1) if many else None
    return rows.ScoreRow(
        evaluation.alias,
        accuracy(evaluation.correct, groups=evaluation.groups),
        bootstrap_mean(losses, groups=groups, seed=seed, unit="nats", least=0.0),
        calibration_error(evaluation.probabilities, evaluation.labels, groups=evaluation.groups, seed=seed),
        bootstrap_mean(excess.numpy(), groups=groups, seed=seed, least=-1.0, most=1.0),
        None if top5 is None else accuracy(top5, groups=evaluation.groups),
    )


def predicted_rows(evaluation: Evaluation, seed: int) -> list[rows.PredictedClassRow]:
    """Confidence against accuracy of the images predicted as each class (top-label calibration, Gupta 2022).

    Grouped by prediction, as a calibrated model is calibrated on these; on the images of one true class it is not.
    """
    confidence, predictions = evaluation.probabilities.double().max(-1)
    found = []
    for index in predictions.unique().tolist():
        members = predictions == index
        own = confidence[members].numpy()
        correct = evaluation.correct[members].double().numpy()
        groups = None if evaluation.groups is None else evaluation.groups[members].numpy()
        gap = bootstrap_mean(own - correct, groups=groups, seed=seed, least=-1.0, most=1.0)
        means = float(own.mean()), float(correct.mean())
        # the exact test takes images as independent
        p = calibration_test(own, int(correct.sum())) if groups is None else student_test(own - correct, groups=groups)
        found.append((evaluation.alias, evaluation.classes[index], len(own), *means, gap, p))
    return [rows.PredictedClassRow(*row, p_holm) for row, p_holm in zip(found, holm([row[-1] for row in found]))]


def _confusion_rows(evaluation: Evaluation) -> Iterator[ConfusionRow]:
    names = evaluation.classes
    counts = confusion(evaluation.labels, evaluation.predictions, count=len(names))
    for truth, prediction in counts.nonzero().tolist():
        yield ConfusionRow(evaluation.alias, names[truth], names[prediction], int(counts[truth, prediction]))


def _arrays(evaluation: Evaluation, split: Split) -> rows.PredictionArrays:
    probability, prediction = evaluation.probabilities.max(-1)
    wrong = (~evaluation.correct).nonzero().flatten()
    surest = wrong[probability[wrong].argsort(descending=True, stable=True)[:SHOWN]]
    pixels = split.source.read(surest).numpy() if len(surest) else np.zeros((0, 3, *split.size), np.uint8)
    return rows.PredictionArrays(
        np.array(evaluation.classes),
        evaluation.labels.numpy(),
        prediction.numpy(),
        probability.numpy(),
        surest.numpy(),
        pixels,
        None if evaluation.groups is None else evaluation.groups.numpy(),
    )
