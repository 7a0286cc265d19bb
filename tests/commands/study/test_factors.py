"""Which factor of a controlled comparison mattered: by the command's own tests over seeds; one seed decides nothing."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.backing import unbacked
from vitlens.analysis.answers.seeds import accuracy_over_seeds
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.measure.points import write_comparisons
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import (
    ACCURACY,
    DESIGN,
    DIFFERENCE,
    DIFFERENCES,
    POINTS,
    STEP,
    STEPS,
    TABLES,
    TRIALS,
    DesignRow,
    PointRow,
    TrialRow,
)
from vitlens.commands.study.report import report
from vitlens.commands.study.report.factors import findings, verdicts
from vitlens.records import Record
from vitlens.report.document import Finding
from vitlens.report.findings import ranked

LABELS = ("cls", "mean", "both")


Correct = dict[str, NDArray[np.bool_]]


def trained(shares: tuple[float, ...], *, seeds: int, seed: int = 0, spread: float = 0.01) -> Correct:
    """Predictions (seeds, images) of each point, whose accuracy varies between seeds by this much."""
    generator = np.random.default_rng(seed)
    own = {label: share + spread * generator.standard_normal(seeds) for label, share in zip(LABELS, shares)}
    return {label: generator.random((seeds, 450)) < values[:, None] for label, values in own.items()}


def record_of(folder: Path, correct: Correct, *, steps: bool = True) -> Record:
    seeds = len(correct[LABELS[0]])
    config = {"options": asdict(StudyOptions()), "data": {"title": "planted", "images": 450, "classes": 10}}
    with RunFolder.create("study", title="planted", out=folder, config=config) as run_folder:
        for table in TABLES:
            run_folder.write(table, [])
        for label, table in correct.items():
            run_folder.metric(ACCURACY(model=label), accuracy_over_seeds(table))
        trials = [
            TrialRow(label, seed, float(share), 9.5, 3.0)
            for label, table in correct.items()
            for seed, share in enumerate(table.mean(1))
        ]
        run_folder.write(TRIALS, trials)
        run_folder.write(DESIGN, [DesignRow("pooling", 6, seeds, 5000, 10)])
        rows = [PointRow(label, f"point {label}", "vit-mini", None, 10, 20, 30, 5000, 9.5, 3.0) for label in correct]
        run_folder.write(POINTS, rows)
        write_comparisons(run_folder, DIFFERENCES, DIFFERENCE, [(label, LABELS[0]) for label in LABELS[1:]], correct)
        if steps:
            write_comparisons(run_folder, STEPS, STEP, list(zip(LABELS[1:], LABELS[:-1])), correct)
        run_folder.finish()
    return read_folder(folder)


def found_in(record: Record) -> tuple[Finding, ...]:
    return ranked(findings(record))


def test_the_factor_that_matters_comes_first(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", trained((0.6, 0.6, 0.85), seeds=4))
    found = found_in(record)
    assert {each.claim.rows[0] for each in found} == {record.rows(STEPS)[1], record.rows(DIFFERENCES)[1]}
    assert {each.effect for each in found} == {
        record.metric(STEP(model="both", against="mean")), record.metric(DIFFERENCE(model="both", against="cls"))
    }  # fmt: skip
    assert all("beyond the spread of 4 seeds" in each.claim.text for each in found)
    assert list(verdicts(record)) == []
    assert list(unbacked(report(record))) == []


def test_one_seed_is_inconclusive(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", trained((0.5, 0.5, 0.9), seeds=1), steps=False)
    assert found_in(record) == ()
    assert [verdict.state for verdict in verdicts(record)] == ["inconclusive"]


def test_differences_within_the_spread_of_seeds_are_inconclusive(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", trained((0.7, 0.7, 0.7), seeds=3, spread=0.05))
    assert found_in(record) == ()
    assert [verdict.state for verdict in verdicts(record)] == ["inconclusive"]


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_factor_is_found_and_over_150_hardly_ever_another(tmp_path: Path) -> None:
    for seed in range(20):
        planted = record_of(tmp_path / f"planted-{seed}", trained((0.6, 0.6, 0.85), seeds=4, seed=seed))
        assert found_in(planted)[0].claim.rows[1].label == "both"  # type: ignore[attr-defined]
    invented = 0
    for seed in range(150):
        same = record_of(tmp_path / f"same-{seed}", trained((0.7, 0.7, 0.7), seeds=3, seed=seed, spread=0.03))
        invented += bool(found_in(same))
    assert invented <= 1  # three seeds can agree by chance; the interval of seeds and images alone: 7
