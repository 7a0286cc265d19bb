"""What `vitlens evaluate` says of confidences that are planted, against plain loops over the images."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vitlens.cli.main import run
from vitlens.commands.evaluate.record import EvaluateRecord
from vitlens.commands.run.publish import read_folder
from vitlens.uncertainty import bootstrap_mean, calibration_test, holm

N = 600


class Planted:
    """Images of five classes and what a model answers on them: how sure it is, and how often it is right."""

    def __init__(self, folder: Path, *, overconfident: float) -> None:
        draw = np.random.default_rng(1)
        sure = draw.integers(130, 250, N)
        sure[:12] = [75, 90, *[255] * 10]  # less than half, and certain
        self.sure = np.where(sure % 17, sure, np.minimum(sure + 1, 255)) / 255  # not at the edge of a bin
        right = draw.random(N) < self.sure - overconfident
        self.answers = draw.integers(0, 4, N)  # the fifth class is never predicted
        self.labels = np.where(right, self.answers, (self.answers + 1) % 4)
        self.right = right
        pixels = np.zeros((N, 4, 6, 3), np.uint8)
        pixels[..., 0] = 10 * self.answers[:, None, None]
        pixels[..., 1] = (255 * self.sure).round()[:, None, None]
        np.savez(folder / "data.npz", test_images=pixels, test_labels=self.labels, classes=[*"abcde"])
        self.sure = pixels[:, 0, 0, 1] / 255
        (folder / "classes.txt").write_text("a\nb\nc\nd\ne\n")
        (folder / "hand.py").write_text("from tests.kit.reader import confident as made\n")
        model = ["--model-file", f"m={folder / 'hand.py'}:made", "--classes", str(folder / "classes.txt")]
        line = [f"m={folder / 'hand.py'}:made", *model, "--data", str(folder / "data.npz"), "--device", "cpu"]
        assert run(["evaluate", *line, "--quiet", "--out", str(folder / "out")]) == 0
        self.record: EvaluateRecord = read_folder(folder / "out")


@pytest.fixture(scope="module", params=[0.0, 0.2], ids=["calibrated", "overconfident"])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"), overconfident=request.param)


def test_calibration_by_a_plain_loop(planted: Planted) -> None:
    confidence, error = np.clip(planted.sure.astype(np.float32), 1e-6, 1 - 1e-6).astype(np.float64), 0.0
    assert len(planted.record.calibration) == 15
    for index, row in enumerate(planted.record.calibration):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        assert row.count == inside.sum()
        means = (confidence[inside].mean(), planted.right[inside].mean()) if inside.any() else (0, 0)
        assert (row.confidence, row.accuracy) == pytest.approx(means, abs=1e-5)
        error += inside.sum() / N * abs(means[0] - means[1])
    (score,) = planted.record.scores
    found = score.calibration_error
    assert (found.value, found.n) == (pytest.approx(error, abs=1e-5), N)
    assert found.low <= found.value <= found.high
    gap = bootstrap_mean(confidence - planted.right, seed=0)
    measured = (score.confidence_gap.value, score.confidence_gap.low, score.confidence_gap.high)
    assert measured == pytest.approx((gap.value, gap.low, gap.high), abs=1e-5)
    losses = -np.log(np.where(planted.right, confidence, (1 - confidence) / 4))
    assert score.cross_entropy.value == pytest.approx(losses.mean(), abs=1e-4)


def test_a_calibrated_model_is_within_the_interval_and_an_overconfident_one_is_not(planted: Planted) -> None:
    error, calibrated = planted.record.scores[0].calibration_error, planted.record.scores[0].confidence_gap.low < 0
    assert (error.low < 0.01) == calibrated
    if not calibrated:
        assert error.low > 0.1


def test_classes_and_confusions_are_counted(planted: Planted) -> None:
    record, counts = planted.record, Counter(zip(planted.labels.tolist(), planted.answers.tolist()))
    found = {("abcde".index(row.truth), "abcde".index(row.prediction)): row.count for row in record.confusion}
    assert found == counts
    assert [row.class_name for row in record.per_class] == list("abcde")
    for index, row in enumerate(record.per_class):
        own = planted.labels == index
        assert row.n == own.sum()
        assert row.accuracy is None if not own.any() else row.accuracy.value == pytest.approx(planted.right[own].mean())
    assert (record.per_class[4].n, record.per_class[4].accuracy) == (0, None)
    p = []
    for index, row in enumerate(record.by_prediction):
        own = planted.answers == index
        assert (row.class_name, row.n) == ("abcde"[index], own.sum())
        means = (planted.sure[own].mean(), planted.right[own].mean())
        assert (row.confidence, row.accuracy) == pytest.approx(means, abs=1e-5)
        assert row.gap.value == pytest.approx(means[0] - means[1], abs=1e-5)
        p.append(calibration_test(planted.sure[own].clip(1e-6, 1 - 1e-6), int(planted.right[own].sum())))
    assert [row.p_holm for row in record.by_prediction] == pytest.approx(holm(p), rel=1e-3)
    assert all(math.isfinite(row.p) for row in record.by_prediction)
