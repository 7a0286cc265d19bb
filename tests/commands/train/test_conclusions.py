"""Planted facts of a training: overfitting, accuracy that still rises, a baseline that wins; nothing planted, nothing
found."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.backing import unbacked
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.pairs import PAIRS, PairRow
from vitlens.commands.shared.trainings import Budget
from vitlens.commands.train import record as record_module
from vitlens.commands.train.conclusions import findings, gap_of, verdicts
from vitlens.commands.train.gaps import gain, generalisation_gap, is_mixed
from vitlens.commands.train.options import TrainOptions
from vitlens.commands.train.plan import TrainPlan
from vitlens.commands.train.record import (
    ACCURACY,
    CLASSES,
    CONFUSION,
    DIFFERENCE,
    EPOCH_SECONDS,
    GAP,
    HISTORY,
    IMAGES,
    IMAGES_PER_SECOND,
    RECIPE,
    RECORD,
    SECONDS,
    TABLES,
    TEST_ACCURACIES,
    TRAININGS,
    WAYS,
    ConfusionArrays,
    ImagesRow,
    SettingRow,
    TrainedClassRow,
)
from vitlens.commands.train.report import report
from vitlens.records import Record
from vitlens.report.document import Finding
from vitlens.report.findings import ranked
from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate, difference_of, wilson

TESTED, TRAINED = 1000, 5000


def epochs(train: tuple[float, ...], test: tuple[float | None, ...]) -> list[EpochMetrics]:
    return [
        EpochMetrics(place, place, place * TRAINED, 0.1, 1.0, own, 1.0, other, 10.0 * (place + 1), 100.0)
        for place, (own, other) in enumerate(zip(train, test))
    ]


def record_of(
    folder: Path, train: tuple[float, ...], test: tuple[float | None, ...], *, mixup: str = "0.0", worst: int = 92
) -> Record:
    """A finished training of these accuracies, with ten classes of 100 test images each."""
    config = {
        "models": [{"alias": "m", "family": "vit"}],
        "options": asdict(TrainOptions("vit-mini")),
        "plan": asdict(TrainPlan("vit-mini")),
        "data": {"title": "planted", "part": "train", "images": TRAINED},
    }
    with RunFolder.create("train", title="planted", out=folder, config=config) as run_folder:
        for table in TABLES:
            run_folder.write(table, [])
        own = wilson(round((test[-1] or 0.0) * TESTED), TESTED)
        run_folder.metric(ACCURACY(model="m"), own)
        run_folder.metric(SECONDS(model="m"), Estimate(30.0, unit="s"))
        run_folder.metric(IMAGES_PER_SECOND(model="m"), Estimate(100.0, unit="images/s"))
        run_folder.write(HISTORY, epochs(train, test))
        run_folder.write(IMAGES, [ImagesRow(TRAINED, TESTED, 50, 0.1, 50, 0.1, True)])
        run_folder.write(RECIPE, [SettingRow("mixup", mixup)])
        shares = [wilson(worst if digit == 3 else 92, 100) for digit in range(10)]
        run_folder.write(
            CLASSES, [TrainedClassRow(f"<{digit}>", 100, *_ends(share)) for digit, share in enumerate(shares)]
        )
        run_folder.save(CONFUSION, ConfusionArrays(np.zeros((10, 10), np.int64)))
        run_folder.finish()
    return read_folder(folder)


def _ends(share: Estimate) -> tuple[float, float | None, float | None]:
    return share.value, share.low, share.high


def found_in(record: Record) -> tuple[Finding, ...]:
    assert list(unbacked(report(record))) == []
    return ranked(findings(record))


def test_an_overfitted_training_comes_first(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", (0.7, 0.9, 0.99), (0.6, 0.7, 0.7), worst=60)
    first = found_in(record)[0]
    expected = difference_of(wilson(4950, TRAINED), wilson(700, TESTED))
    assert first.effect == expected == gap_of(record, "m")
    assert first.effect.value == pytest.approx(29.0)
    assert first.claim.text.startswith("**m** overfits")


def test_a_training_that_had_not_converged(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", (0.5, 0.6, 0.7), (0.5, 0.62, 0.75))
    (first,) = found_in(record)
    assert first.effect == difference_of(wilson(750, TESTED), wilson(620, TESTED))
    assert "had not converged" in first.claim.text
    assert "from 62.0 % to 75.0 %" in first.claim.text


@pytest.mark.parametrize("test", [(0.8, 0.9, 0.905), (None, None, 0.9)])
def test_nothing_planted_nothing_found(tmp_path: Path, test: tuple[float | None, ...]) -> None:
    record = record_of(tmp_path / "run", (0.8, 0.85, 0.9), test)
    assert found_in(record) == ()
    assert [verdict.state for verdict in verdicts(record)] == ["not tested"]


def test_mixed_images_say_nothing_of_overfitting(tmp_path: Path) -> None:
    assert gap_of(record_of(tmp_path / "run", (0.99,), (0.7,), mixup="0.8"), "m") is None
    assert is_mixed({"mixup": 0.0, "cutmix": 1.0})
    assert not is_mixed({"mixup": 0, "cutmix": "0.0"})


def test_the_written_gap_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert GAP in RECORD.metrics
    history = epochs((0.9,), (0.8,))
    assert generalisation_gap(history, wilson(800, TESTED), images=TRAINED) == difference_of(
        wilson(4500, TRAINED), wilson(800, TESTED)
    )
    assert gain(history, tested=TESTED) is None
    assert generalisation_gap([], wilson(1, 2), images=10) is None


def test_the_worst_class_is_named_and_an_ordinary_one_is_not(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", (0.9, 0.9), (0.9, 0.9), worst=60)
    (first,) = found_in(record)
    assert first.effect.value == 0.6
    assert first.claim.rows[0] == record.rows(CLASSES)[3]


def compared(folder: Path, gap: Estimate, counts: tuple[int, int], p: float) -> Record:
    """Two ways of training, of which all weights have the lead that is planted."""
    config = {"plan": asdict(TrainPlan("m")), "options": asdict(TrainOptions("m"))}
    with RunFolder.create("train", title="planted", out=folder, config=config) as run_folder:
        for table in TABLES:
            run_folder.write(table, [])
        for way, share in zip(WAYS, (0.8, 0.8 + gap.value / 100)):
            run_folder.metric(ACCURACY(model=way), wilson(round(share * TESTED), TESTED))
            run_folder.metric(SECONDS(model=way), Estimate(30.0, unit="s"))
            run_folder.metric(EPOCH_SECONDS(model=way), Estimate(3.0, unit="s"))
        run_folder.metric(DIFFERENCE(first="full", second="frozen"), gap)
        run_folder.write(PAIRS, [PairRow("frozen", "full", 700, *counts, 100, p, p)])
        run_folder.write(TEST_ACCURACIES, [record_module.TestAccuracyRow(way, 10, 30.0, 0.8) for way in WAYS])
        run_folder.write(TRAININGS, [Budget("frozen", epochs=10, steps=100), Budget("full", epochs=5, steps=100)])
        run_folder.finish()
    return read_folder(folder)


def test_the_better_way_comes_first_and_budgets_are_told(tmp_path: Path) -> None:
    gap = Estimate(6.0, 4.0, 8.0, TESTED, "points")
    record = compared(tmp_path / "run", gap, (20, 80), 1e-9)
    (first,) = found_in(record)
    assert first.effect == gap
    assert first.p == 1e-9
    assert "training all weights" in first.claim.text.partition("than")[0]
    states = {verdict.subject: (verdict.state, verdict.value) for verdict in verdicts(record)}
    assert states["accuracy of full"][0] == "pass"
    assert states["accuracy of frozen"] == ("fail", Estimate(-6.0, -8.0, -4.0, TESTED, "points"))
    assert "epochs 10 (frozen), 5 (full)" in report(record).preface[0].text


def test_ways_that_do_not_differ_are_no_finding(tmp_path: Path) -> None:
    gap = Estimate(0.3, 0.1, 0.5, TESTED, "points")  # significant, and too small to matter
    assert found_in(compared(tmp_path / "run", gap, (1, 10), 0.01)) == ()


def test_the_interval_of_a_difference_of_fractions_is_newcombes() -> None:
    """Example of Newcombe (1998): 56/70 minus 48/80."""
    gap = difference_of(wilson(56, 70), wilson(48, 80))
    assert gap.value == pytest.approx(20.0)
    assert (gap.low, gap.high) == (pytest.approx(5.24, abs=0.01), pytest.approx(33.39, abs=0.01))
    assert difference_of(Estimate(0.5), wilson(1, 2)).low is None


@pytest.mark.slow
def test_over_twenty_seeds_nothing_is_invented(tmp_path: Path) -> None:
    """Train and test images of one distribution, an accuracy that has stopped rising."""
    found = 0
    for seed in range(20):
        drawn = np.random.default_rng(seed).binomial([TRAINED, TESTED, TESTED], 0.9) / [TRAINED, TESTED, TESTED]
        record = record_of(tmp_path / str(seed), (0.9, float(drawn[0])), (float(drawn[1]), float(drawn[2])))
        found += bool(found_in(record))
    assert found == 0
