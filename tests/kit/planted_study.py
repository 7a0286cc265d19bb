"""The record of a study of points whose accuracies are planted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens import Model, Split
from vitlens.analysis.evaluation.intervals import accuracy_over_seeds
from vitlens.analysis.features.features import extract
from vitlens.analysis.features.probe import probe
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.kinds.measure import compared
from vitlens.commands.study.kinds.pretraining import objectness_rows, probed, score_rows
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.kinds.transfer import reached
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import ComparisonRow, CurveRow, DesignRow, PointRow, RecipeRow, StudyRecord
from vitlens.uncertainty import Estimate

IMAGES: Final = 450
RECIPE: Final = RecipeRow("all", "adamw", 1e-3, 64, 6, "none", "")
LABELS: Final = {kind: tuple(point.label for point in known.points) for kind, known in KINDS.items()}
UNTRIED: Final = {kind: known.untried for kind, known in KINDS.items()}


def predicted(shares: Mapping[str, float], *, seeds: int, seed: int, spread: float) -> dict[str, NDArray[np.bool_]]:
    """Predictions (seeds, images) of each point, which find the same images hard; accuracy varies with the seed."""
    generator = np.random.default_rng(seed)
    hardness = generator.random(IMAGES)
    return {
        label: hardness + 0.03 * generator.standard_normal((seeds, IMAGES))
        < share + spread * generator.standard_normal((seeds, 1))
        for label, share in shares.items()
    }


def study_record(
    kind: str,
    shares: Mapping[str, float],
    *,
    seeds: int = 3,
    seed: int = 0,
    spread: float = 0.01,
    gain: Sequence[float] = (30.0, 20.0, 40.0),
    classes: int = 5,
) -> StudyRecord:
    """Return the record of a kind whose points have these accuracies by label; gain: of probes, where a model is
    adapted."""
    known = KINDS[kind]
    correct = predicted(shares, seeds=seeds, seed=seed, spread=spread)
    points = {
        point.label: PointRow(
            point.label,
            point.words,
            point.preset,
            point.line,
            point.candidate,
            accuracy_over_seeds(correct[point.label]),
            1 / classes,
            round(100 * (point.share or 1)),
            1000,
            10 if point.trained == "head" else 1000,
            20,
            6,
            30,
            9.0,
            3.0,
        )
        for point in known.points
        if point.label in shares
    }
    pairs = [pair for pair in known.pairs if set(pair) <= set(shares)]
    best = max((row for row in points.values() if row.candidate), key=lambda row: row.accuracy.value).label
    others = [(row.label, best) for row in points.values() if row.candidate and row.label != best]
    rows = [
        *compared(points, correct, None, "difference", [pair for pair in pairs if points[pair[0]].candidate]),
        *compared(points, correct, None, "share", [pair for pair in pairs if not points[pair[0]].candidate]),
        *compared(points, correct, None, "step", known.steps),
        *compared(points, correct, None, "best", others),
    ]
    if known.adapts:
        value, low, high = gain
        names = ("probe_gain", "pretrained", "random", "pretrained", "random weights")
        rows.append(ComparisonRow(*names, Estimate(value, low, high, IMAGES, "points")))
        rows.append(replace(rows[-1], label="full", against="pretrained", words="after full training"))
    model = ("vit", 12, 3) if known.adapts else ()
    design = DesignRow(kind, 6, seeds, 100, IMAGES, classes, (32, 32), *model)
    return StudyRecord(design=(design,), points=tuple(points.values()), comparisons=tuple(rows), recipes=(RECIPE,))


def with_curves(record: StudyRecord, accuracies: Mapping[str, Sequence[float]]) -> StudyRecord:
    """Return the record with the epochs of two trainings of each point, two seconds each, and when it came near the
    best."""
    curves = tuple(
        CurveRow(label, label, seed, epoch, 2.0 * epoch, 1.0, value + 0.01 * (-1) ** seed)
        for label, values in accuracies.items()
        for seed in (0, 1)
        for epoch, value in enumerate(values, start=1)
    )
    return replace(record, curves=curves, reached=tuple(reached(curves)))


def pretraining_record(
    knn: Mapping[str, float], iou: Mapping[str, float], *, spread: float = 0.01, seeds: int = 4
) -> StudyRecord:
    """Return a study of pretraining whose points have these k-NN accuracies and overlaps of attention, by label; those
    of maps of other images are 0.3, of the mean mask 0.4.

    Seeds differ by `spread`.
    """
    record = study_record("pretraining", dict.fromkeys(knn, 0.6), seeds=seeds)
    words = {row.label: row.words for row in record.points}
    noise = spread * np.random.default_rng(0).standard_normal((len(knn), seeds))
    scores = {label: [value + each for each in own] for (label, value), own in zip(knn.items(), noise)}
    overlaps = {
        label: [torch.tensor([iou[label] + each, 0.3, 0.4], dtype=torch.float64) for each in own]
        for label, own in zip(iou, noise)
    }
    return replace(
        record,
        feature_scores=tuple(score_rows({"k-NN, k = 20": scores}, words, 0.125)),
        objectness=tuple(objectness_rows(overlaps, words, images=IMAGES)),
    )


def probe_correct(model: Model, train: Split, test: Split) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which test images the probe of a study of pretraining classifies correctly, and one with groups kept
    together."""
    options = StudyOptions(kind="pretraining", data="digits")
    setup = Setup(options, (), train, test, torch.device("cpu"))
    bank, read = (extract(model, split, layer=-1, pool="cls+mean") for split in (train, test))
    assert bank is not None
    assert read is not None
    assert train.labels is not None
    assert test.labels is not None
    apart = probe(bank.at(-1), train.labels, read.at(-1), test.labels, train_groups=train.groups, seed=0)
    return probed(setup, model, seed=0), apart.correct.numpy()
