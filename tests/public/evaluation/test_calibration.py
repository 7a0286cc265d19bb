"""Calibration of planted confidences, by plain loops, and how well confidence separates errors."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import vitlens
from tests.kit.commands import ran
from tests.kit.planted_answers import Answers, evaluate_record
from tests.kit.reader import confident
from tests.kit.select import select_one, values_of
from tests.kit.splits import split_of
from vitlens.commands.evaluate.record import EvaluateRecord
from vitlens.uncertainty import Estimate, bootstrap_mean, calibration_test, holm, wilson

N = 600


class Planted:
    """Images of five classes and a model's answers, with known confidence and accuracy."""

    def __init__(self, folder: Path, *, overconfident: float) -> None:
        self.is_calibrated = not overconfident
        draw = np.random.default_rng(1)
        sure = draw.integers(130, 250, N)
        sure[:12] = [75, 90, *[255] * 10]  # less than half, and certain
        sure = np.where(sure % 17, sure, np.minimum(sure + 1, 255))  # not at the edge of a bin
        self.sure = sure / 255
        self.right = draw.random(N) < self.sure - overconfident
        self.answers = draw.integers(0, 4, N)  # the fifth class is never predicted
        self.labels = np.where(self.right, self.answers, (self.answers + 1) % 4)
        pixels = np.zeros((N, 4, 6, 3), np.uint8)
        pixels[..., 0] = 10 * self.answers[:, None, None]
        pixels[..., 1] = sure[:, None, None]
        np.savez(
            folder / "data.npz", test_images=pixels, test_labels=self.labels, classes=[*"abcde"]
        )
        (folder / "classes.txt").write_text("a\nb\nc\nd\ne\n")
        (folder / "hand.py").write_text("from tests.kit.reader import confident as made\n")
        name = f"m={folder / 'hand.py'}:made"
        line = (
            f"evaluate {name} --model-file {name} --classes {folder / 'classes.txt'} --data "
            f"{folder / 'data.npz'}"
        )
        self.record: EvaluateRecord = ran(folder / "out", line)


@pytest.fixture(scope="module", params=[0.0, 0.2], ids=["calibrated", "overconfident"])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"), overconfident=request.param)


def test_calibration_by_a_plain_loop(planted: Planted) -> None:
    confidence = np.clip(planted.sure.astype(np.float32), 1e-6, 1 - 1e-6).astype(np.float64)
    error = 0.0
    assert len(planted.record.calibration) == 15
    for index, row in enumerate(planted.record.calibration):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        assert row.count == inside.sum()
        means = (
            (confidence[inside].mean(), planted.right[inside].mean()) if inside.any() else (0, 0)
        )
        assert (row.confidence, row.accuracy) == pytest.approx(means, abs=1e-5)
        error += inside.sum() / N * abs(means[0] - means[1])
    (score,) = planted.record.scores
    estimate = score.calibration_error
    assert (estimate.value, estimate.n) == (pytest.approx(error, abs=1e-5), N)
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.low < 0.01 if planted.is_calibrated else estimate.low > 0.1
    gap = bootstrap_mean(confidence - planted.right, seed=0)
    measured = (score.confidence_gap.value, score.confidence_gap.low, score.confidence_gap.high)
    assert measured == pytest.approx((gap.value, gap.low, gap.high), abs=1e-5)
    losses = -np.log(np.where(planted.right, confidence, (1 - confidence) / 4))
    assert score.cross_entropy.value == pytest.approx(losses.mean(), abs=1e-4)


@pytest.mark.parametrize(("groups", "sources"), [((4, 4, 7, 4, 7), [2, 2]), (None, [2, 3])])
def test_bins_count_sources_where_several_images_show_one(groups, sources) -> None:
    confidence = np.array([0.9, 0.9, 0.9, 0.6, 0.6])
    labels = np.array([0, 0, 1, 0, 1])
    planted_groups = None if groups is None else np.array(groups)
    record = evaluate_record(
        {"a": Answers(confidence, np.zeros(5, dtype=int), labels, planted_groups)}, names=("a", "b")
    )
    assert [row.sources for row in record.calibration if row.count] == sources


def test_classes_and_confusions_are_counted(planted: Planted) -> None:
    record = planted.record
    counts = Counter(zip(planted.labels.tolist(), planted.answers.tolist()))
    confusion = {
        ("abcde".index(row.truth), "abcde".index(row.prediction)): row.count
        for row in record.confusion
    }
    assert confusion == counts
    assert values_of(record.per_class, "class_name") == list("abcde")
    for index, row in enumerate(record.per_class):
        selected = planted.labels == index
        assert row.n == selected.sum()
        assert (
            row.accuracy is None
            if not selected.any()
            else row.accuracy.value == pytest.approx(planted.right[selected].mean())
        )
    assert (record.per_class[4].n, record.per_class[4].accuracy) == (0, None)
    p = []
    for index, row in enumerate(record.by_prediction):
        selected = planted.answers == index
        assert (row.class_name, row.n) == ("abcde"[index], selected.sum())
        means = (planted.sure[selected].mean(), planted.right[selected].mean())
        assert (row.confidence, row.accuracy) == pytest.approx(means, abs=1e-5)
        assert row.gap.value == pytest.approx(means[0] - means[1], abs=1e-5)
        p.append(
            calibration_test(
                planted.sure[selected].clip(1e-6, 1 - 1e-6), int(planted.right[selected].sum())
            )
        )
    assert values_of(record.by_prediction, "p_holm") == pytest.approx(holm(p), rel=1e-3)
    assert values_of(record.by_prediction, "p") == pytest.approx(p, rel=1e-3)


# --- the area under the ROC curve of the confidence for errors


def separation(sure: np.ndarray, wrong: np.ndarray) -> tuple[Estimate, float | None]:
    """Return the area of the confidence (n,), in 255ths, for errors, and its p-value."""
    pixels = torch.zeros(len(sure), 3, 4, 6, dtype=torch.uint8)
    pixels[:, 1] = torch.from_numpy(sure.astype(np.uint8))[:, None, None]
    split = split_of(pixels, torch.from_numpy(wrong.astype(np.int64)), tuple("abcde"))
    diagnosis = vitlens.failures(confident(), split, method="saliency")
    row = select_one(diagnosis.covariates, covariate="confidence")
    assert row.errors == wrong.sum()
    return row.area, row.p


def made(n: int, shift: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw n numbers with ties, half of errors that lie higher by shift."""
    wrong = np.arange(n) % 2 == 1
    numbers = np.random.default_rng(seed).normal(size=n) + shift * wrong
    return (170 + 10 * numbers).round().clip(130, 250), wrong


def delong(high: np.ndarray, low: np.ndarray) -> tuple[float, float]:
    """Compute the area and its variance by the definition's double loop."""
    kernel = np.empty((len(high), len(low)))
    for row, x in enumerate(high):
        for column, y in enumerate(low):
            kernel[row, column] = float(x > y) + 0.5 * float(x == y)
    variance = kernel.mean(1).var(ddof=1) / len(high) + kernel.mean(0).var(ddof=1) / len(low)
    return kernel.mean(), variance


def mann_whitney(high: np.ndarray, low: np.ndarray) -> float:
    """Return the p-value of equal distributions, corrected for ties and for continuity."""
    n = len(high) + len(low)
    pairs = len(high) * len(low)
    ties = np.unique(np.concatenate([high, low]), return_counts=True)[1]
    spread = np.sqrt(pairs / 12 * (n + 1 - (ties**3 - ties).sum() / (n * (n - 1))))
    gap = abs(delong(high, low)[0] - 0.5) * pairs - 0.5
    return float(2 * stats.norm.sf(gap / spread))


@pytest.mark.parametrize(("n", "shift"), [(60, 0.7), (31, -0.2)])
def test_the_area_is_mann_whitneys_and_the_interval_delongs(n, shift):
    values, wrong = made(n, shift)
    area_estimate, p = separation(values, wrong)
    high = values[wrong]
    low = values[~wrong]
    area, variance = delong(high, low)
    assert area_estimate.value == pytest.approx(area)
    assert area_estimate.value == pytest.approx(
        stats.mannwhitneyu(high, low).statistic / (len(high) * len(low))
    )
    error = np.sqrt(variance) / (area * (1 - area))
    centre = np.log(area / (1 - area))
    assert area_estimate.low == pytest.approx(1 / (1 + np.exp(1.959964 * error - centre)))
    assert area_estimate.high == pytest.approx(1 / (1 + np.exp(-1.959964 * error - centre)))
    assert p == pytest.approx(mann_whitney(high, low))


def test_complete_separation_none_and_too_few():
    wrong = np.arange(40) < 20
    complete, p = separation(150 + 80.0 * wrong, wrong)
    assert (complete.value, complete.high) == (1.0, 1.0)
    # Newcombe's, of two values
    assert 0.5 + (1 - np.sqrt(2) * (1 - wilson(20, 20).low)) / 2 == pytest.approx(complete.low)
    assert 0 < p < 1e-9
    mirrored = np.where(np.arange(40) % 2 == 0, 150.0, 200.0)  # as many errors as successes at each
    none, p = separation(mirrored, wrong)
    assert (none.value, p) == (0.5, pytest.approx(1.0))
    few, p = separation(made(40, 0.0)[0], np.arange(40) < 9)
    assert (few.n, few.low, p) == (40, None, None)
