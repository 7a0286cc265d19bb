"""The first page of an attack's report: the verdicts follow the curves, and the largest difference comes first."""

from pathlib import Path

import pytest

from vitlens.cli.main import run
from vitlens.commands.attack.record import CURVES, ROBUST_PAIRS
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.publish import read_folder
from vitlens.records import Record
from vitlens.report.document import Document

QUICK = ["--data", "digits", "--attack", "fgsm", "--no-corruptions", "--quiet"]


def attacked(folder: Path, *words: str) -> tuple[Record, Document]:
    assert run(["attack", *words, *QUICK, "--out", str(folder)]) == 0
    record = read_folder(folder)
    return record, COMMANDS["attack"].report(record)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Document]:
    folder = tmp_path_factory.mktemp("attack") / "run"
    return attacked(folder, "vit-digits", "cnn-digits", "--limit", "30", "--epsilon", "0,1,8")


def test_the_verdict_is_that_of_the_strongest_attack_at_one(pair: tuple[Record, Document]) -> None:
    record, report = pair
    weakest = min(
        (row for row in record.rows(CURVES) if row.model == "vit-digits" and row.epsilon == 1),
        key=lambda row: row.accuracy,
    )
    verdict = next(each for each in report.verdicts if each.subject == "robustness of vit-digits")
    assert verdict.value == weakest.estimate
    assert weakest.low is not None
    assert verdict.state == ("pass" if weakest.low >= 0.5 else "warn" if weakest.low >= 0.1 else "fail")


def test_a_model_that_is_less_robust_comes_first(pair: tuple[Record, Document]) -> None:
    record, report = pair
    first = report.findings[0]
    row = max(record.rows(ROBUST_PAIRS), key=lambda row: abs(row.difference) if row.p_holm <= 0.05 else 0.0)
    assert first.claim.rows == (row,)
    assert first.effect.value == abs(row.difference) > 0
    assert first.p == row.p_holm


def test_what_could_not_fail_and_what_was_not_tried(tmp_path: Path) -> None:
    """At epsilon 0.01 of 255 nothing is fooled; without 1/255 nothing is judged."""
    _, report = attacked(tmp_path / "weak", "cnn-digits", "--limit", "10", "--epsilon", "0,0.01")
    assert [verdict.state for verdict in report.verdicts] == ["inconclusive"]
    assert not report.findings
    _, report = attacked(tmp_path / "far", "vit-digits", "--limit", "10", "--epsilon", "0,16")
    assert [verdict.state for verdict in report.verdicts] == ["not tested"]
