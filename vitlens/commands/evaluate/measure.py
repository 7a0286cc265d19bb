"""Accuracy, calibration and confusions of one model or several on the same labelled images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import (
    Evaluation,
    accuracy,
    calibration_error,
    calibration_rows,
    confusion_rows,
    evaluate,
    per_class,
    require_labels,
)
from vitlens.analysis.evaluation.log_odds import cross_entropy
from vitlens.analysis.evaluation.rows import CalibrationRow, ClassRow, ConfusionRow
from vitlens.commands.evaluate import record as rows
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.run.load import ImageRequest, load_splits, read_as
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import require_evaluable
from vitlens.commands.shared.comparison import in_pairs
from vitlens.commands.shared.planted import FactorRow, factor_rows
from vitlens.commands.shared.saturation import is_saturated
from vitlens.commands.shared.trainings import trainings_of
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.models.language_image import is_language_image
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, bootstrap_mean, calibration_test, holm, student_test

SATURATION_SAMPLE: Final = 450  # images that show whether a model makes enough errors to explain
MOST_SCENES: Final = 3600  # scenes that are drawn if the usual number leaves too few errors
MANY_CLASSES: Final = 20  # from this number on, top-5 accuracy is measured too
DRAWN_ERRORS: Final = 12  # the most confident errors, which figures show
DRAWN_SAMPLE: Final = 8  # right predictions in a figure of a random sample, and wrong ones


def measure(options: EvaluateOptions) -> Path | None:
    """Evaluate models on the test part of labelled data and write the report.

    Several models are compared in pairs by McNemar's exact test. Of several processes each takes
    its share of the images. Returns the report's path in the first process and None in the others.
    Raises InputError (or one of its kind) before anything is written.
    """
    run = _open(options)
    with run.folder("Evaluation of") as folder:
        evaluations = [_evaluate(run, index) for index in range(len(run.models))]
        return folder.publish(lambda: _record(run, evaluations))


def _open(options: EvaluateOptions) -> Run[EvaluateOptions]:
    """Load the models and their labelled images."""
    if options.run.labels is None:
        require_evaluable(options.data)
    run = Run(
        "evaluate",
        replace(options, data=options.data or "digits"),
        images=ImageRequest(repeat=True),
    )
    if _needs_more_scenes(run):
        request = ImageRequest(limit=MOST_SCENES, repeat=True)
        scenes = load_splits(
            run.models, options=run.run_options, data=run.options.data, request=request
        )
        run = run.with_images(scenes)
    for split in run.splits:
        require_labels(split)
    run = run.with_images(read_as(run.models, run.splits, run.run_options))
    _ = run.shares  # raises now, before anything is written, if images are fewer than processes
    return run


def _needs_more_scenes(run: Run[EvaluateOptions]) -> bool:
    """Return True if more scenes can be drawn and a model makes too few errors to explain.

    A sample of the images decides. Where the user limits the images, no more are drawn.
    """
    name = run.options.data
    is_drawn = name is not None and name in SETS and SETS[name].scenes
    may_draw_more = run.run_options.limit is None and len(run.split) < MOST_SCENES
    if not is_drawn or not may_draw_more:
        return False
    for model, split in zip(run.models, run.splits):
        if split.labels is None:
            return False
        sample = split.limit(SATURATION_SAMPLE, seed=run.run_options.seed)
        evaluation = evaluate(model, sample, **run.passes)
        loss = float(cross_entropy(evaluation.logits, evaluation.labels).mean())
        error_rate = float((~evaluation.correct).double().mean())
        if is_saturated(round(error_rate * len(split)), loss):
            return True
    return False


def _evaluate(run: Run[EvaluateOptions], index: int) -> Evaluation:
    """Evaluate one model on this process's share of images; gather the logits of all processes."""
    model = run.models[index]
    split = run.splits[index]
    share = run.shares[index]
    with run.progress(f"evaluating {model.alias}", len(share)) as advance:
        evaluation = evaluate(model, share, **run.passes, advance=advance)
    return replace(
        evaluation,
        logits=run.processes.gathered(evaluation.logits),
        labels=require_labels(split).cpu().long(),
        groups=split.groups,
    )


def _record(run: Run[EvaluateOptions], evaluations: Sequence[Evaluation]) -> rows.EvaluateRecord:
    predictions = {}
    for evaluation, split in zip(evaluations, run.splits):
        predictions[evaluation.alias] = _prediction_arrays(
            evaluation, split, seed=run.run_options.seed
        )
    record = build_record(evaluations, classes=len(run.split.classes), seed=run.run_options.seed)
    scores = []
    for score, model, evaluation in zip(record.scores, run.models, evaluations):
        scores.append(_with_candidates(score, model, evaluation))
    return replace(
        record,
        scores=tuple(scores),
        training=trainings_of(run.models),
        by_factor=_by_factor(run, evaluations),
        predictions=predictions,
    )


def build_record(
    evaluations: Sequence[Evaluation], *, classes: int, seed: int
) -> rows.EvaluateRecord:
    """Return the tables about models on the same images.

    classes: the number of classes of the data.
    """
    scores: list[rows.ScoreRow] = []
    by_class: list[ClassRow] = []
    by_prediction: list[rows.PredictedClassRow] = []
    confusions: list[ConfusionRow] = []
    calibration: list[CalibrationRow] = []
    correct: dict[str, NDArray[np.bool_]] = {}
    for evaluation in evaluations:
        scores.append(_score(evaluation, seed))
        by_class += per_class(evaluation, count=classes)
        by_prediction += predicted_rows(evaluation, seed)
        confusions += confusion_rows(evaluation)
        calibration += calibration_rows(evaluation)
        correct[evaluation.alias] = evaluation.correct.numpy()
    return rows.EvaluateRecord(
        scores=tuple(scores),
        per_class=tuple(by_class),
        by_prediction=tuple(by_prediction),
        confusion=tuple(confusions),
        calibration=tuple(calibration),
        pairs=in_pairs(correct, groups=_as_array(evaluations[0].groups), seed=seed),
    )


def _as_array(groups: Tensor | None) -> NDArray[Any] | None:
    if groups is None:
        return None
    return groups.cpu().numpy()


def _by_factor(
    run: Run[EvaluateOptions], evaluations: Sequence[Evaluation]
) -> tuple[FactorRow, ...]:
    """Return the accuracy by generating factor; no rows for images whose factors are not known."""
    factors = run.split.factors
    if factors is None:
        return ()
    correct = {evaluation.alias: evaluation.correct.numpy() for evaluation in evaluations}
    return tuple(factor_rows(factors, correct, _as_array(run.split.groups)))


def _with_candidates(score: rows.ScoreRow, model: Model, evaluation: Evaluation) -> rows.ScoreRow:
    """Add the number of classes and the chance level to the score of a zero-shot model."""
    if not is_language_image(model):
        return score
    count = len(evaluation.classes)
    return replace(score, candidates=count, chance=1 / count)


def _score(evaluation: Evaluation, seed: int) -> rows.ScoreRow:
    groups = _as_array(evaluation.groups)
    losses = cross_entropy(evaluation.logits, evaluation.labels).numpy()
    excess_confidence = evaluation.confidence.double() - evaluation.correct.double()
    return rows.ScoreRow(
        evaluation.alias,
        accuracy=accuracy(evaluation.correct, groups=evaluation.groups),
        cross_entropy=bootstrap_mean(losses, groups=groups, seed=seed, unit="nats", least=0.0),
        calibration_error=calibration_error(
            evaluation.probabilities, evaluation.labels, groups=evaluation.groups, seed=seed
        ),
        confidence_gap=bootstrap_mean(
            excess_confidence.numpy(), groups=groups, seed=seed, least=-1.0, most=1.0
        ),
        top5=_top5_accuracy(evaluation),
    )


def _top5_accuracy(evaluation: Evaluation) -> Estimate | None:
    """Return top-5 accuracy; None for fewer than MANY_CLASSES classes."""
    if len(evaluation.classes) < MANY_CLASSES:
        return None
    top5 = evaluation.logits.topk(5).indices  # (images, 5)
    is_among = (top5 == evaluation.labels[:, None]).any(-1)
    return accuracy(is_among, groups=evaluation.groups)


def predicted_rows(evaluation: Evaluation, seed: int) -> list[rows.PredictedClassRow]:
    """Compare confidence with accuracy on the images predicted as each class.

    This is top-label calibration (Gupta 2022). Images are grouped by prediction because a
    calibrated model is calibrated on these groups. On the images of one true class it is not.
    """
    predicted = []
    for index in evaluation.predictions.unique().tolist():
        predicted.append(_predicted_row(evaluation, index, seed))
    corrected = holm([row.p for row in predicted])
    return [replace(row, p_holm=p_holm) for row, p_holm in zip(predicted, corrected)]


def _predicted_row(evaluation: Evaluation, index: int, seed: int) -> rows.PredictedClassRow:
    """Return the row of one predicted class, with p before the correction."""
    members = evaluation.predictions == index
    confidence = evaluation.probabilities.double().amax(-1)[members].numpy()
    correct = evaluation.correct[members].double().numpy()
    excess = confidence - correct
    if evaluation.groups is None:
        groups = None
        p = calibration_test(confidence, int(correct.sum()))
    else:  # the exact test is for independent images
        groups = evaluation.groups[members].numpy()
        p = student_test(excess, groups=groups)
    return rows.PredictedClassRow(
        evaluation.alias,
        class_name=evaluation.classes[index],
        n=len(confidence),
        confidence=float(confidence.mean()),
        accuracy=float(correct.mean()),
        gap=bootstrap_mean(excess, groups=groups, seed=seed, least=-1.0, most=1.0),
        p=p,
        p_holm=p,
    )


def _prediction_arrays(evaluation: Evaluation, split: Split, *, seed: int) -> rows.PredictionArrays:
    probability, prediction = evaluation.probabilities.max(-1)
    errors = (~evaluation.correct).nonzero().flatten()
    order = probability[errors].argsort(descending=True, stable=True)
    surest_errors = errors[order[:DRAWN_ERRORS]]
    right = _draw_sample(evaluation.correct, seed=seed)
    wrong = _draw_sample(~evaluation.correct, seed=seed)
    sampled = torch.cat([right, wrong])
    return rows.PredictionArrays(
        classes=np.array(evaluation.classes),
        label=evaluation.labels.numpy(),
        prediction=prediction.numpy(),
        probability=probability.numpy(),
        surest_errors=surest_errors.numpy(),
        surest_errors_pixels=_pixels(split, surest_errors),
        groups=_as_array(evaluation.groups),
        sampled=sampled.numpy(),
        sampled_pixels=_pixels(split, sampled),
    )


def _draw_sample(chosen: Bool[Tensor, " images"], *, seed: int) -> Int[Tensor, " drawn"]:
    """Return at most DRAWN_SAMPLE of the chosen images, drawn by the seed, in their order."""
    images = chosen.nonzero().flatten()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    positions = order[:DRAWN_SAMPLE].sort().values
    return images[positions]


def _pixels(split: Split, images: Int[Tensor, " images"]) -> NDArray[np.uint8]:
    if not len(images):
        return np.zeros((0, 3, *split.size), np.uint8)
    return np.asarray(split.source.read(images).numpy())
