"""The record of a study of variants with planted accuracies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens import Model, Split
from vitlens.analysis.evaluation.intervals import accuracy_over_seeds
from vitlens.analysis.features.features import extract
from vitlens.analysis.features.probe import probe
from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.commands.study.kinds.pretraining.features import probe_frozen
from vitlens.commands.study.kinds.pretraining.record import PretrainingRecord
from vitlens.commands.study.kinds.pretraining.rows import objectness_rows, score_rows
from vitlens.commands.study.kinds.record import ComparisonRow, DesignRow, RecipeRow, VariantRow
from vitlens.commands.study.kinds.rows import Comparisons
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.kinds.transfer.measure import reached_rows
from vitlens.commands.study.kinds.transfer.record import CurveRow, TransferRecord
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import record_class
from vitlens.uncertainty import Estimate

IMAGES: Final = 450
RECIPE: Final = RecipeRow(
    points="all",
    optimiser="adamw",
    learning_rate=1e-3,
    batch_size=64,
    epochs=6,
    augmentation="none",
    source="",
)
# by kind: the labels of its variants, and what it does not try
LABELS: Final = {
    kind: tuple(variant.label for variant in planned.variants) for kind, planned in KINDS.items()
}
UNTRIED: Final = {kind: planned.untried for kind, planned in KINDS.items()}


def planted_predictions(
    shares: Mapping[str, float], *, seeds: int, seed: int, spread: float
) -> dict[str, NDArray[np.bool_]]:
    """Draw which predictions (seeds, images) of each variant are correct, by label.

    All variants find the same images hard.
    shares: the accuracies.
    spread: the standard deviation of accuracy over seeds.
    """
    generator = np.random.default_rng(seed)
    hardness = generator.random(IMAGES)
    correct = {}
    for label, share in shares.items():
        hardness_for_variant = hardness + 0.03 * generator.standard_normal((seeds, IMAGES))
        accuracy = share + spread * generator.standard_normal((seeds, 1))
        correct[label] = hardness_for_variant < accuracy
    return correct


def study_record(
    kind: str,
    shares: Mapping[str, float],
    *,
    seeds: int = 3,
    seed: int = 0,
    spread: float = 0.01,
    gain: Sequence[float] = (30.0, 20.0, 40.0),
    classes: int = 5,
) -> Any:
    """Return the record of a kind whose variants have these accuracies by label.

    gain: of probes, where a model is adapted: value, low and high in points.
    """
    planned = KINDS[kind]
    correct = planted_predictions(shares, seeds=seeds, seed=seed, spread=spread)
    variants = {}
    for variant in planned.variants:
        if variant.label in shares:
            variants[variant.label] = VariantRow(
                variant.label,
                variant.words,
                preset=variant.preset,
                line=variant.line,
                candidate=variant.candidate,
                accuracy=accuracy_over_seeds(correct[variant.label]),
                chance=1 / classes,
                train_images=round(100 * (variant.share or 1)),
                parameters=1000,
                trained=10 if variant.trained == "head" else 1000,
                flops=20,
                epochs=6,
                steps=30,
                images_per_second=9.0,
                seconds=3.0,
            )
    pairs = [pair for pair in planned.pairs if set(pair) <= set(shares)]
    rows = list(Comparisons(variants, correct).planned(pairs, planned.steps))
    if planned.adapts:
        value, low, high = gain
        probes = ComparisonRow(
            family="probe_gain",
            label="pretrained",
            against="random",
            words="pretrained",
            against_words="random weights",
            difference=Estimate(value, low, high, IMAGES, "points"),
        )
        rows.append(probes)
        rows.append(
            replace(probes, label="full", against="pretrained", words="after full training")
        )
    design = DesignRow(
        kind,
        epochs=6,
        seeds=seeds,
        train_images=100,
        test_images=IMAGES,
        classes=classes,
        image_size=(32, 32),
    )
    if planned.adapts:
        design = replace(design, model="vit", blocks=12, last=3)
    record: Any = record_class({"kind": kind})
    return record(
        design=(design,),
        points=tuple(variants.values()),
        comparisons=tuple(rows),
        recipes=(RECIPE,),
    )


def with_curves(
    record: TransferRecord, accuracies: Mapping[str, Sequence[float]]
) -> TransferRecord:
    """Add the epochs of two trainings of each variant to a record, two seconds each.

    accuracies: after each epoch, by label; the two trainings are 0.01 above and below.
    """
    curves = []
    for label, values in accuracies.items():
        for seed, offset in ((0, 0.01), (1, -0.01)):
            for epoch, value in enumerate(values, start=1):
                row = CurveRow(
                    label,
                    label,
                    seed=seed,
                    epochs=epoch,
                    seconds=2.0 * epoch,
                    loss=1.0,
                    accuracy=value + offset,
                )
                curves.append(row)
    return replace(record, curves=tuple(curves), reached=tuple(reached_rows(curves)))


def pretraining_record(
    knn: Mapping[str, float], iou: Mapping[str, float], *, spread: float = 0.01, seeds: int = 4
) -> PretrainingRecord:
    """Return a study of pretraining with these k-NN accuracies and attention overlaps by label.

    Overlaps of maps of other images are 0.3, of the mean mask 0.4. Seeds differ by `spread`.
    """
    record: PretrainingRecord = study_record("pretraining", dict.fromkeys(knn, 0.6), seeds=seeds)
    words = {row.label: row.words for row in record.points}
    noise = spread * np.random.default_rng(0).standard_normal((len(knn), seeds))
    scores = {}
    for (label, value), offsets in zip(knn.items(), noise):
        scores[label] = [value + offset for offset in offsets]
    overlaps = {}
    for label, offsets in zip(iou, noise):
        values = [[iou[label] + offset, 0.3, 0.4] for offset in offsets]
        overlaps[label] = list(torch.tensor(values, dtype=torch.float64))
    return replace(
        record,
        feature_scores=tuple(score_rows({"k-NN, k = 20": scores}, words, 0.125)),
        objectness=tuple(objectness_rows(overlaps, words, images=IMAGES)),
    )


def probe_correct(
    model: Model, train: Split, test: Split
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the images that a study's probe classifies correctly, and that of a grouped probe."""
    options = StudyOptions(kind="pretraining", data="digits")
    setup = Setup(options, (), train, test, torch.device("cpu"))
    bank = extract(model, train, layer=-1, pool="cls+mean")
    read = extract(model, test, layer=-1, pool="cls+mean")
    assert bank is not None
    assert read is not None
    assert train.labels is not None
    assert test.labels is not None
    apart = probe(
        bank.at(-1), train.labels, read.at(-1), test.labels, train_groups=train.groups, seed=0
    )
    return probe_frozen(setup, model, seed=0), apart.correct.numpy()
