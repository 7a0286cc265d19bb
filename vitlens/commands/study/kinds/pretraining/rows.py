"""Rows on frozen features: means over seeds, compared with random weights and with the supervised
variant.

`label` is the label of a variant, `words` maps labels to names.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

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
Overlaps: TypeAlias = NDArray[np.floating[Any]]  # (seeds,)
Values: TypeAlias = Mapping[str, Sequence[float]]  # of each variant by its label, one for each seed


class _Tested(NamedTuple):
    """A difference with its p-value; both are None where nothing was compared."""

    difference: Estimate | None
    p: float | None


_NOT_COMPARED: Final = _Tested(None, None)


def score_rows(
    scores: Mapping[str, Values], words: Mapping[str, str], chance: float | None
) -> Iterator[FeatureScoreRow]:
    """Yield each measure of each variant over seeds, compared with random weights and with the
    supervised variant.

    p-values are corrected for the comparisons of their measure.
    scores: by measure.
    chance: the accuracy of guessing; None for a measure that may be negative.
    """
    least = -1.0 if chance is None else 0.0
    for measure, values_by_label in scores.items():
        differences = _differences(values_by_label)
        for label, values in values_by_label.items():
            from_random = differences.get((label, RANDOM), _NOT_COMPARED)
            from_supervised = differences.get((label, SUPERVISED), _NOT_COMPARED)
            yield FeatureScoreRow(
                label,
                words[label],
                measure=measure,
                value=student_mean(values, least=least, most=1.0),
                chance=chance,
                over_random=from_random.difference,
                p_random=from_random.p,
                over_supervised=from_supervised.difference,
                p_supervised=from_supervised.p,
            )


def _differences(values: Values) -> Mapping[tuple[str, str], _Tested]:
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


def _corrected(tests: Sequence[tuple[Estimate, float]]) -> list[_Tested]:
    """Return differences with their p-values after Holm's correction for their number."""
    differences = [difference for difference, _p in tests]
    p_values = holm([p for _difference, p in tests])
    return list(map(_Tested, differences, p_values))


class _SeedOverlaps(NamedTuple):
    """The overlaps of one variant with the objects, one for each seed (seeds,)."""

    best_head: Overlaps
    shuffled: Overlaps
    mean_mask: Overlaps


def objectness_rows(
    overlaps: Mapping[str, Sequence[Tensor]], words: Mapping[str, str], *, images: int
) -> Iterator[ObjectnessRow]:
    """Yield the overlap of each variant over seeds, compared with both baselines and with random
    weights.

    p-values are corrected for all comparisons with baselines, paired by seed, and separately for
    those with random weights.
    overlaps: by label, for each seed (3,): of the best head, of maps of other images, of the mean
        mask.
    """
    by_label = {}
    p_values = []
    for label, seed_overlaps in overlaps.items():
        columns = torch.stack(tuple(seed_overlaps)).numpy().T  # (3, seeds)
        of_variant = _SeedOverlaps(*columns)
        by_label[label] = of_variant
        p_values.append(student_test(of_variant.best_head - of_variant.shuffled))
        p_values.append(student_test(of_variant.best_head - of_variant.mean_mask))
    corrected = np.reshape(holm(p_values), (-1, 2))  # (variants, baselines)
    from_random = _from_random(by_label)
    for (label, of_variant), (p_shuffled, p_mean) in zip(by_label.items(), corrected, strict=True):
        test = from_random.get(label, _NOT_COMPARED)
        yield ObjectnessRow(
            label,
            words[label],
            images=images,
            iou=_mean_overlap(of_variant.best_head),
            shuffled=_mean_overlap(of_variant.shuffled),
            mean_mask=_mean_overlap(of_variant.mean_mask),
            over_shuffled=_mean_difference(of_variant.best_head - of_variant.shuffled),
            p_shuffled=float(p_shuffled),
            over_mean=_mean_difference(of_variant.best_head - of_variant.mean_mask),
            p_mean=float(p_mean),
            over_random=test.difference,
            p_random=test.p,
        )


def _mean_overlap(overlaps: Overlaps) -> Estimate:
    return student_mean(overlaps, unit="IoU", least=0.0, most=1.0)


def _mean_difference(differences: Overlaps) -> Estimate:
    return student_mean(differences, unit="IoU", least=-1.0, most=1.0)


def _from_random(overlaps: Mapping[str, _SeedOverlaps]) -> Mapping[str, _Tested]:
    """Return the overlaps of the best head minus those of random weights, by label."""
    trained = [label for label in overlaps if label != RANDOM]
    tests = []
    for label in trained:
        first = overlaps[label].best_head
        second = overlaps[RANDOM].best_head
        tests.append(welch(first, second, unit="IoU", most=1.0))
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
    stream.add(list(features.values()))
    cka = stream.cka().numpy()  # (trainings, trainings)
    for label, against in product(words, words):
        values = [float(cka[pair]) for pair in _comparable(trainings, label, against)]
        if not np.isfinite(values).all():  # fewer than 4 images, or features that are all the same
            continue
        if label == against:
            # not independent, as each seed is in several pairs: no interval; 1 for a single seed
            mean = Estimate(float(np.mean(values or [1.0])), unit="")
        else:
            mean = student_mean(values, unit="", least=-1.0, most=1.0)
        yield LikenessRow(label, words[label], against, words[against], mean)


def _comparable(
    trainings: Sequence[tuple[str, int]], label: str, against: str
) -> Iterator[tuple[int, int]]:
    """Yield the places of two trainings of these variants that are compared.

    Two variants are compared with the same seed, a variant with itself with two seeds, each pair
    once.
    """
    for row, (first_label, first_seed) in enumerate(trainings):
        for column, (second_label, second_seed) in enumerate(trainings):
            if (first_label, second_label) != (label, against):
                continue
            is_comparable = first_seed == second_seed
            if label == against:
                is_comparable = first_seed < second_seed
            if is_comparable:
                yield row, column
