"""Planted facts are found first, with their numbers; requirements decide the exit code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vitlens.analysis.answers.evaluate import calibration_error
from vitlens.cli.main import run
from vitlens.commands.evaluate.record import CONFIDENCE_GAP, DIFFERENCE
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.publish import read_folder
from vitlens.commands.scaffold.requirements import Requirement, outcomes, requirements_of
from vitlens.errors import InputError
from vitlens.records import Record
from vitlens.report.document import Document


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "run"
    assert run(["evaluate", "vit-digits", "cnn-digits", "--out", str(folder), "--quiet"]) == 0
    return folder


def document(folder: Path) -> tuple[Record, Document]:
    record = read_folder(folder)
    return record, COMMANDS["evaluate"].report(record)


def test_a_vit_that_loses_to_its_cnn_comes_first(pair: Path) -> None:
    record, report = document(pair)
    first = report.findings[0]
    measured = record.metric(DIFFERENCE(first="vit-digits", second="cnn-digits"))
    assert first.effect.value == -measured.value > 0
    assert (first.effect.low, first.effect.high) == (-measured.high, -measured.low)  # type: ignore[operator]
    assert first.p == first.claim.rows[0].p_holm < 0.05  # type: ignore[attr-defined]
    assert first.claim.text.startswith("**cnn-digits**")
    states = {verdict.subject: verdict.state for verdict in report.verdicts}
    assert states["accuracy of cnn-digits"] == "pass"
    assert states["accuracy of vit-digits"] != "pass"


def test_nothing_planted_nothing_found(tmp_path: Path) -> None:
    """The same model twice."""
    assert run(["evaluate", "a=vit-digits", "b=vit-digits", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    record, report = document(tmp_path / "run")
    for alias in "ab":
        gap = record.metric(CONFIDENCE_GAP(model=alias))
        assert gap.low is not None
        assert gap.high is not None
        assert gap.low < 0 < gap.high
    assert all("more images" not in each.claim.text and "confident" not in each.claim.text for each in report.findings)


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (["--at-least", "accuracy=0.9"], 0),
        (["--at-least", "accuracy=0.97"], 3),  # the CNN's holds, the ViT's does not
        (["--at-least", "accuracy/cnn-digits=0.97"], 0),
        (["--at-least", "accuracy/cnn-digits=0.97", "--at-most", "calibration_error=0.001"], 3),
        (["--at-least", "acuracy=0.1"], 3),
        (["--at-least", "accuracy"], 2),
        (["--at-most", "accuracy=much"], 2),
    ],
)
def test_exit_codes(typed: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run(["evaluate", "vit-digits", "cnn-digits", "--out", str(folder), "--quiet", *typed]) == code
    printed = capsys.readouterr()
    assert printed.out == (f"{folder / 'report.md'}\n" if code != 2 else "")
    assert (folder / "report.md").is_file() == (code != 2)
    assert ("does not hold" in printed.err) == (code == 3)


def test_requirements_are_judged_on_the_worse_end_of_every_model(pair: Path) -> None:
    record, _ = document(pair)
    judged = list(outcomes(requirements_of(["accuracy=0.95"], ["accuracy_difference/cnn-digits=1"]), record))
    assert {(each.metric, each.holds) for each in judged} == {
        ("accuracy/vit-digits", False),  # 0.96, but its interval begins below
        ("accuracy/cnn-digits", True),
        ("accuracy_difference/vit-digits/cnn-digits", True),
    }
    missing = list(outcomes([Requirement("accurcy", "at least", 0.1)], record))
    assert [each.holds for each in missing] == [False]
    assert "accuracy" in missing[0].because
    with pytest.raises(InputError, match="--at-least METRIC=VALUE"):
        requirements_of(["accuracy=nan"], [])


def test_the_interval_of_the_calibration_error_holds_it_and_the_truth() -> None:
    """Labels drawn with the stated probabilities: the calibration error of infinitely many images is 0."""
    generator, covered = torch.Generator().manual_seed(0), []
    for _ in range(40):
        confidence = torch.rand(400, generator=generator) / 2 + 0.5
        right = torch.rand(400, generator=generator) < confidence
        probabilities = torch.stack([confidence, 1 - confidence], 1)
        error = calibration_error(probabilities, (~right).long(), seed=0)
        assert error.low is not None
        assert error.high is not None
        assert error.low <= error.value <= error.high
        covered.append(error.low < 0.01)
    assert np.mean(covered) > 0.9


def test_an_overconfident_model_is_a_finding_of_the_right_size() -> None:
    confidence, right = torch.full((1000,), 0.95), torch.arange(1000) % 5 > 0  # accuracy 0.8
    probabilities = torch.stack([confidence, 1 - confidence], 1)
    error = calibration_error(probabilities, (~right).long())
    assert error.value == pytest.approx(0.15, abs=1e-6)
    assert error.low is not None
    assert error.low > 0.1
