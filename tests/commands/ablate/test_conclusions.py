"""Facts planted in the weights of a model are found first, with their numbers; without them none is found."""

from math import exp, log1p
from pathlib import Path

import numpy as np
import pytest

from tests.commands.ablate.planted import write
from vitlens.cli.main import run
from vitlens.commands.ablate.conclusions import without_effect
from vitlens.commands.ablate.judgement import images_needed, judged, smallest_effect
from vitlens.commands.ablate.record import CROSS_ENTROPY, HEAD_LABELS, HIDDEN, NO_EFFECT, PAIRS
from vitlens.commands.ablate.record.rows import UnitRow
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold import publish
from vitlens.commands.scaffold.publish import read_folder
from vitlens.records import Record
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

PLAIN = [("red", 2.0), ("green", 2.0)]
DEAD = [("red", 2.0), ("red", 0.0), ("green", 2.0)]
REDUNDANT = [("red", 14.0), ("green", 2.0), ("red", 14.0)]
HIDDEN_HEAD = [("red", 11.0), ("red", 25.0), ("red", 11.0), ("green", 2.0)]
FAULTS = ("redundant", "no effect", "hides", "than the sum")


def ablated(folder: Path, heads: list[tuple[str, float]], *more: str, seed: int = 0) -> tuple[Record, Document]:
    typed = write(folder, heads, seed=seed)
    quick = ["--no-curves", "--no-patch", "--units", "head", *more, "--out", str(folder / "out")]
    assert run(["ablate", *typed, *quick]) == 0
    record = read_folder(folder / "out")
    return record, COMMANDS["ablate"].report(record)


def check_plain(folder: Path, seed: int = 0) -> None:
    record, report = ablated(folder, PLAIN, "--replace", "mean,resample", seed=seed)
    assert not [each for each in report.findings if any(word in each.claim.text for word in FAULTS)]
    assert len(report.findings) == 1
    assert without_effect(record) == []


def check_dead(folder: Path, seed: int = 0) -> None:
    record, report = ablated(folder, DEAD, seed=seed)
    first = report.findings[0]
    assert "1 of 3 heads has no effect: without **L0.H1**" in first.claim.text
    assert (first.effect.value, first.effect.high, first.effect.n) == (0.0, 0.0, 48)
    assert record.metric(NO_EFFECT(model="planted")).value == pytest.approx(1 / 3)
    assert [row.label for row in without_effect(record)] == ["L0.H1"]


def check_redundant(folder: Path, seed: int = 0) -> None:
    record, report = ablated(folder, REDUNDANT, "--pairs", "2", seed=seed)
    first = report.findings[0]
    assert first.claim.text.startswith("**L0.H0 and L0.H2** are redundant")
    [row] = [row for row in record.rows(PAIRS) if row.chosen == "similarity"]
    assert first.claim.rows == (row,)
    assert row.similarity == pytest.approx(1, abs=1e-4)
    red = np.load(folder / "data.npz")["images"][:, 0, 0, 0] / 127.5 - 1
    left = np.log1p(np.exp(-np.sign(red) * 28 * red.mean())).mean()  # both heads give their mean: about ln 2
    assert row.both == pytest.approx(left, abs=0.01)
    assert row.first_alone == pytest.approx(0, abs=1e-3)
    assert first.effect.value == row.synergy
    assert without_effect(record) == []  # neither of both is called dead


def check_hidden(folder: Path, seed: int = 0) -> None:
    record, report = ablated(folder, HIDDEN_HEAD, "--replace", "mean,resample", seed=seed)
    [first] = [each for each in report.findings if each.support == "methods disagree"]
    assert first.claim.text.startswith("**L0.H1** has no effect where its output is replaced by its mean")
    row = max(record.rows(HIDDEN), key=lambda row: row.difference)
    assert row.label == "L0.H1"
    assert first.effect == row.estimate
    assert first.p == row.p_holm
    assert [row.label for row in without_effect(record)] == ["L0.H0", "L0.H2"]  # each is spare, as is any two


CHECKS = (check_plain, check_dead, check_redundant, check_hidden)


@pytest.mark.parametrize("check", CHECKS)
def test_planted_facts(check, tmp_path):
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("check", CHECKS)
def test_planted_facts_over_seeds(check, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "save_figures", lambda *_, **__: None)  # the findings need none
    check(tmp_path, seed)


def test_the_loss_without_a_head_is_that_of_its_margin(tmp_path):
    """An oracle for the planted model: without its red head the red bit costs ln 2."""
    record, report = ablated(tmp_path, PLAIN)
    red = next(row for row in report.findings[0].claim.rows if isinstance(row, UnitRow) and row.label == "L0.H0")
    arrays = np.load(tmp_path / "data.npz")["images"][:, 0, 0, :2] / 127.5 - 1
    clean = [log1p(exp(-2.0 * abs(value))) for value in arrays[:, 0]]
    assert red.delta_loss == pytest.approx(np.log(2) - np.mean(clean), abs=5e-3)
    assert record.metric(CROSS_ENTROPY(model="planted")).value > np.mean(clean)
    assert {row.label for row in record.rows(HEAD_LABELS)} == {"uniform"}


def row(low: float, high: float, p: float = 0.001) -> UnitRow:
    value = (low + high) / 2
    return UnitRow("mean", "head/0/0", "head", 0, 0, value, low, high, p, p <= 0.05, 0.0, None, None, None, None)


def test_an_effect_is_judged_against_the_smallest_worth_reporting():
    small, large = smallest_effect(Estimate(0.2, unit="nats")), smallest_effect(Estimate(3.0, unit="nats"))
    assert (small.value, large.value) == (0.01, 0.03)
    assert judged(row(0.0005, 0.0015), small, 1) == "no effect"  # significant, and too small to report
    assert judged(row(0.011, 0.02), small, 1) == "effect"
    assert judged(row(0.011, 0.02), small, 100) == "undecided"  # not for a hundred looks
    assert judged(row(-0.02, 0.02, 0.9), small, 1) == "undecided"
    assert judged(row(-0.03, -0.02), small, 1) == "effect"
    needed = images_needed([row(-0.02, 0.02, 0.9)], small, 100)
    assert needed is not None
    assert needed.value == 400  # half the width needs four times the images


def test_too_few_images_say_how_many_would_decide(tmp_path):
    _, report = ablated(tmp_path, PLAIN, "--limit", "1")
    assert [verdict.state for verdict in report.verdicts] == ["inconclusive"]
    assert not report.findings
    _, report = ablated(tmp_path / "top", PLAIN, "--top", "1")
    assert [verdict.state for verdict in report.verdicts] == ["not tested"]
