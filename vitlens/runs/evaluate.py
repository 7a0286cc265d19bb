"""`vitlens evaluate`: how often models are right on labelled images, and whether one is better than another."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import (
    Evaluation,
    accuracy,
    calibration,
    confusion,
    per_class,
    require_labels,
    top_k,
)
from vitlens.analysis.answers.evaluate import evaluate as evaluate_model
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.scaffold.budgets import keep_budgets
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import Part, say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits, read_as
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes, share_of
from vitlens.runs.evaluate_draw import draw
from vitlens.runs.evaluate_tell import tell
from vitlens.runs.report import publish
from vitlens.uncertainty import Estimate, bootstrap_difference, bootstrap_mean

__all__ = ["draw", "evaluate", "tell"]

MANY_CLASSES = 20  # from here on the five likeliest classes are worth a number of their own
SHOWN = 18  # images of a prediction grid


def evaluate(
    models: Sequence[str],
    *,
    data: str = "digits",
    model_options: ModelOptions | None = None,
    options: RunOptions | None = None,
) -> Path | None:
    """Evaluate one model or several on the test part of labelled data; returns the path of report.md.

    Accuracy with its interval, per class, confusions, calibration, predictions on some images; with several models
    McNemar's exact test for each pair. Of several processes each answers its share of the images; the first writes,
    the others return None. Raises InputError (or one of its kind) before anything is written.
    """
    processes, options = join_run(options or RunOptions())
    with processes.first_ahead():
        loaded = load_models(models, command="evaluate", model_options=model_options or ModelOptions(), options=options)
        splits = load_splits(loaded, options=options, data=data)
    for split in splits:
        require_labels(split)
        share_of(split, processes)
    splits = read_as(loaded, splits, options)
    if not processes.is_first:
        _evaluations(loaded, splits, processes, options)
        return None
    aliases, split = [model.alias for model in loaded], splits[0]
    works = [(model, own, [Part("answers", len(own))]) for model, own in zip(loaded, splits)]
    say_expected(works, options, processes=processes.count)
    with RunFolder.create(
        "evaluate",
        name_parts=(*aliases, data),
        title=f"{' and '.join(aliases)} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, models=loaded, split=splits[0]),
        formats=options.formats,
    ) as folder:
        keep_budgets(folder, loaded)
        evaluations = _evaluations(loaded, splits, processes, options)
        keep_metrics(folder, evaluations, seed=options.seed)
        keep_tables(folder, evaluations, classes=len(split.classes), seed=options.seed)
        for evaluation, images in zip(evaluations, splits):
            _keep_arrays(folder, evaluation, images, seed=options.seed)
        return publish(folder, draw, tell)


def _evaluations(
    models: Sequence[Model], splits: Sequence[Split], processes: Processes, options: RunOptions
) -> list[Evaluation]:
    """What each model answers on all images of its split, whichever process asked it."""
    found = []
    for model, split in zip(models, splits):
        mine = share_of(split, processes)
        with progress(f"evaluating {model.alias}", len(mine), quiet=options.quiet) as advance:
            part = evaluate_model(
                model, mine, batch_size=options.batch_size, precision=options.precision, advance=advance
            )
        labels = require_labels(split).cpu().long()
        found.append(replace(part, logits=processes.gathered(part.logits), labels=labels, groups=split.groups))
    return found


def keep_metrics(folder: RunFolder, evaluations: Sequence[Evaluation], *, seed: int) -> None:
    """Write accuracy, cross-entropy and calibration error of each model, and the difference of each pair."""
    for evaluation in evaluations:
        suffix = f"/{evaluation.alias}" if len(evaluations) > 1 else ""
        groups = None if evaluation.groups is None else evaluation.groups.numpy()
        folder.metric(f"accuracy{suffix}", accuracy(evaluation.correct, groups=evaluation.groups, seed=seed))
        if len(evaluation.classes) >= MANY_CLASSES:
            top5 = top_k(evaluation.logits, evaluation.labels, k=5)
            folder.metric(f"top5_accuracy{suffix}", accuracy(top5, groups=evaluation.groups, seed=seed))
        losses = F.cross_entropy(evaluation.logits, evaluation.labels, reduction="none").numpy()
        folder.metric(f"cross_entropy{suffix}", bootstrap_mean(losses, groups=groups, seed=seed, unit="nats"))
        # no interval: resampling images biases a binned error upwards, so its quantiles can miss the value itself
        error = calibration(evaluation.probabilities, evaluation.labels).error
        folder.metric(f"calibration_error{suffix}", Estimate(error, n=len(evaluation.labels)))
    for first, second in combinations(evaluations, 2):
        groups = None if first.groups is None else first.groups.numpy()
        gain = bootstrap_difference(
            100.0 * first.correct.numpy(), 100.0 * second.correct.numpy(), groups=groups, seed=seed, unit="points"
        )
        folder.metric(f"accuracy_difference/{first.alias}/{second.alias}", gain)


def keep_tables(folder: RunFolder, evaluations: Sequence[Evaluation], *, classes: int, seed: int) -> None:
    """Write per_class, confusion (cells that are not 0), calibration (by bin) and, for several models, pairs."""
    rows: dict[str, list[dict[str, object]]] = {"per_class": [], "confusion": [], "calibration": []}
    for evaluation in evaluations:
        model = {"model": evaluation.alias}
        for score in per_class(evaluation, count=classes, seed=seed):
            found = {} if score.accuracy is None else asdict(score.accuracy)
            value = {key: found.get(name) for key, name in (("accuracy", "value"), ("low", "low"), ("high", "high"))}
            rows["per_class"].append({**model, "class": score.name, "n": score.n, **value})
        names = evaluation.classes
        counts = confusion(evaluation.labels, evaluation.predictions, count=len(names))
        for truth, prediction in counts.nonzero().tolist():
            cell = {"truth": names[truth], "prediction": names[prediction], "count": int(counts[truth, prediction])}
            rows["confusion"].append({**model, **cell})
        bins = calibration(evaluation.probabilities, evaluation.labels)
        for confidence, right, count in zip(bins.confidence.tolist(), bins.accuracy.tolist(), bins.count.tolist()):
            rows["calibration"].append({**model, "confidence": confidence, "accuracy": right, "count": count})
    for name, content in rows.items():
        folder.table(name, content)
    if len(evaluations) > 1:
        folder.table("pairs", [asdict(pair) for pair in pairs(evaluations)])


def _keep_arrays(folder: RunFolder, evaluation: Evaluation, split: Split, *, seed: int) -> None:
    """Write what the figures need: every prediction, and the pixels of a few images."""
    probability, prediction = evaluation.probabilities.max(-1)
    likely = evaluation.probabilities.topk(min(5, len(evaluation.classes)), dim=-1)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    random = order[:SHOWN].sort().values
    wrong = (~evaluation.correct).nonzero().flatten()
    surest = wrong[probability[wrong].argsort(descending=True, stable=True)[:SHOWN]]
    folder.arrays(
        f"predictions-{evaluation.alias}",
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
