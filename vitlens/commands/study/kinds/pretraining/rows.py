"""Rows on frozen features: means over seeds, compared with random weights and with the supervised
variant.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.features.cka import CKAStream
from vitlens.commands.study.kinds.pretraining.record import (
    FeatureScoreRow,
    LikenessRow,
    ObjectnessRow,
)
from vitlens.uncertainty import Estimate, holm, student_mean, student_test, welch

RANDOM: Final = "random"
SUPERVISED: Final = "supervised"
Overlaps: TypeAlias = NDArray[np.floating[Any]]  # (seeds, 3), or one of its columns
Values: TypeAlias = Mapping[str, Sequence[float]]  # of each variant by its label, one for each seed
Tested: TypeAlias = tuple[Estimate, float]  # a difference, and its p


def score_rows(
    scores: Mapping[str, Values], words: Mapping[str, str], chance: float | None
) -> Iterator[FeatureScoreRow]:
    """Yield each measure of each variant over seeds, compared with random weights and with the
    supervised variant.

    scores: by measure.
    words: the names of the variants by label.
    chance: the accuracy of guessing; None for a measure that may be negative. p-values are
        corrected for the comparisons of their measure.
    """
    least = -1.0 if chance is None else 0.0
    for measure, values_by_label in scores.items():
        differences = _differences(values_by_label)
        for label, values in values_by_label.items():
            over_random, p_random = differences.get((label, RANDOM), (None, None))
            over_supervised, p_supervised = differences.get((label, SUPERVISED), (None, None))
            yield FeatureScoreRow(
                label,
                words[label],
                measure=measure,
                value=student_mean(values, least=least, most=1.0),
                chance=chance,
                over_random=over_random,
                p_random=p_random,
                over_supervised=over_supervised,
                p_supervised=p_supervised,
            )


def _differences(values: Values) -> Mapping[tuple[str, str], Tested]:
    """Return the differences from random weights and from the supervised variant, in points, by
    pair of labels.
    """
    pairs = []
    tests = []
    for against in (RANDOM, SUPERVISED):
        for label in values:
            if label not in (RANDOM, against):
                first = 100 * np.array(values[label])
                second = 100 * np.array(values[against])
                pairs.append((label, against))
                tests.append(welch(first, second, unit="points", most=100.0))
    return dict(zip(pairs, _corrected(tests), strict=True))


def _corrected(tests: Sequence[Tested]) -> list[Tested]:
    """Return differences with their p-values after Holm's correction for their number."""
    p_values = holm([p for _, p in tests])
    return [(difference, p) for (difference, _), p in zip(tests, p_values, strict=True)]


def objectness_rows(
    overlaps: Mapping[str, Sequence[Tensor]], words: Mapping[str, str], *, images: int
) -> Iterator[ObjectnessRow]:
    """Yield the overlap of each variant over seeds, compared with both baselines and with random
    weights.

    overlaps: by label, for each seed (3,): of the best head, of maps of other images, of the mean
    mask. p-values are corrected for all comparisons with baselines, paired by seed, and separately
    for those with random weights.
    """
    tables = {label: torch.stack(tuple(of_seeds)).numpy() for label, of_seeds in overlaps.items()}
    p_values = []
    for iou, shuffled, mean_mask in map(np.transpose, tables.values()):
        p_values += [student_test(iou - shuffled), student_test(iou - mean_mask)]
    corrected = iter(holm(p_values))
    over_random = _over_random(tables)
    for label, table in tables.items():
        iou, shuffled, mean_mask = table.T
        difference, p_random = over_random.get(label, (None, None))
        yield ObjectnessRow(
            label,
            words[label],
            images=images,
            iou=_mean_overlap(iou),
            shuffled=_mean_overlap(shuffled),
            mean_mask=_mean_overlap(mean_mask),
            over_shuffled=_mean_overlap(iou - shuffled, least=-1.0),
            p_shuffled=next(corrected),
            over_mean=_mean_overlap(iou - mean_mask, least=-1.0),
            p_mean=next(corrected),
            over_random=difference,
            p_random=p_random,
        )


def _mean_overlap(values: Overlaps, least: float = 0.0) -> Estimate:
    return student_mean(values, unit="IoU", least=least, most=1.0)


def _over_random(tables: Mapping[str, Overlaps]) -> Mapping[str, Tested]:
    """Return the overlaps of the best head minus those of random weights, by label."""
    trained = [label for label in tables if label != RANDOM]
    tests = []
    for label in trained:
        tests.append(welch(tables[label][:, 0], tables[RANDOM][:, 0], unit="IoU", most=1.0))
    return dict(zip(trained, _corrected(tests), strict=True))


def likeness_rows(
    features: Mapping[tuple[str, int], Tensor], words: Mapping[str, str]
) -> Iterator[LikenessRow]:
    """Yield the CKA of every pair of variants with one seed; of a variant with itself, between its
    seeds.

    features: (images, dim) by label and seed.
    """
    trainings = list(features)
    stream = CKAStream()
    stream.add([*features.values()])
    cka = stream.cka().numpy()
    for label, against in product(words, words):
        values = [float(cka[pair]) for pair in _comparable(trainings, label, against)]
        if not np.isfinite(values).all():  # fewer than 4 images, or features that are all the same
            continue
        if label == against:
            mean = Estimate(float(np.mean(values or [1.0])), unit="")
        else:
            mean = student_mean(values, unit="", least=-1.0, most=1.0)
        yield LikenessRow(label, words[label], against, words[against], mean)


def _comparable(
    trainings: Sequence[tuple[str, int]], label: str, against: str
) -> Iterator[tuple[int, int]]:
    """Yield the places of two trainings with one seed; of one variant, those with different seeds,
    once each.
    """
    for row, (first, seed) in enumerate(trainings):
        for column, (second, other_seed) in enumerate(trainings):
            if (first, second) != (label, against):
                continue
            if (seed < other_seed) if label == against else (seed == other_seed):
                yield row, column
