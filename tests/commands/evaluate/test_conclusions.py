"""Planted facts are found first, with their numbers; requirements decide the exit code."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backing import unbacked
from vitlens.analysis.answers.evaluate import Evaluation, calibration_error
from vitlens.cli.main import run
from vitlens.commands.evaluate.conclusions import misjudged
from vitlens.commands.evaluate.measure import _predicted_rows, write_metrics, write_tables
from vitlens.commands.evaluate.record import CONFIDENCE_GAP, DIFFERENCE, PREDICTED, PREDICTIONS, PredictionArrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.scaffold.budgets import write_trainings
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.publish import read_folder
from vitlens.commands.scaffold.requirements import Requirement, outcomes, requirements_of
from vitlens.errors import InputError
from vitlens.records import Record
from vitlens.report.document import Document
from vitlens.report.markdown import markdown
from vitlens.uncertainty import calibration_test


@pytest.fixture(scope="module")
def pair(weaker: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "run"
    assert run(["evaluate", weaker, "cnn-digits", "--out", str(folder), "--quiet"]) == 0
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
    assert (
        run(["evaluate", "a=vit-digits", "b=vit-digits", "--limit", "200", "--out", str(tmp_path / "run"), "--quiet"])
        == 0
    )
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
        (["--at-least", "accuracy=0.8", "--at-least", "accuracy/cnn-digits=0.85"], 0),
        (["--at-least", "accuracy=0.999"], 3),
        (["--at-least", "accuracy/cnn-digits=0.85", "--at-most", "calibration_error=0.001"], 3),
        (["--at-least", "acuracy=0.1"], 3),
        (["--at-least", "accuracy"], 2),
        (["--at-most", "accuracy=much"], 2),
    ],
)
def test_exit_codes(typed: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    line = ["evaluate", "vit-digits", "cnn-digits", "--limit", "100", "--out", str(folder), "--quiet"]
    assert run([*line, *typed]) == code
    printed = capsys.readouterr()
    assert printed.out == (f"{folder / 'report.md'}\n" if code != 2 else "")
    assert (folder / "report.md").is_file() == (code != 2)
    assert ("does not hold" in printed.err) == (code == 3)


def test_requirements_are_judged_on_the_worse_end_of_every_model(pair: Path) -> None:
    record, _ = document(pair)
    judged = list(outcomes(requirements_of(["accuracy=0.95"], ["accuracy_difference/cnn-digits=1"]), record))
    assert {(each.metric, each.holds) for each in judged} == {
        ("accuracy/vit-digits", False),
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


def answers(confidence: torch.Tensor, right: torch.Tensor, predicted: torch.Tensor, classes: int = 5) -> Evaluation:
    """An evaluation: image i is predicted as predicted[i] with confidence[i]; wrong ones are of the next class."""
    rest = ((1 - confidence) / (classes - 1)).unsqueeze(1).expand(-1, classes).clone()
    probabilities = rest.scatter(1, predicted[:, None], confidence[:, None])
    labels = torch.where(right, predicted, (predicted + 1) % classes)
    names = ("ant", "<b>*bee*</b>", "`cat`", "dog", "eel")
    return Evaluation("planted", names[:classes], probabilities.log(), labels)


def reported(folder: Path, *evaluations: Evaluation) -> tuple[Record, Document]:
    """The report of a run with these answers, written by the command's own functions."""
    config = {
        "models": [{"alias": each.alias} for each in evaluations],
        "data": {"title": "planted", "part": "test", "images": len(evaluations[0].labels)},
    }
    with RunFolder.create("evaluate", title="planted", out=folder, config=config) as run_folder:
        write_trainings(run_folder, [])
        write_metrics(run_folder, evaluations, seed=0)
        write_tables(run_folder, evaluations, classes=len(evaluations[0].classes), seed=0)
        for each in evaluations:
            none, pixels = np.zeros(0, np.int64), np.zeros((0, 3, 4, 4), np.uint8)  # no figure is drawn
            likely = each.probabilities.topk(2)
            confidence = each.probabilities.amax(1).numpy()
            run_folder.save(
                PREDICTIONS,
                PredictionArrays(
                    np.array(each.classes), each.labels.numpy(), each.predictions.numpy(), confidence,
                    likely.indices.numpy(), likely.values.numpy(), none, pixels, none, pixels,
                ),
                model=each.alias,
            )  # fmt: skip
        run_folder.finish()
    return document(folder)


def calibrated(seed: int, n: int = 1000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Confidences, whether each is right with that probability, and predictions of five classes."""
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.6 + 0.39 * torch.rand(n, generator=generator)
    right = torch.rand(n, generator=generator) < confidence
    return confidence, right, torch.randint(0, 5, (n,), generator=generator)


def overconfident_in_one(seed: int) -> Evaluation:
    """Calibrated but for the predictions of class 1: of these half are right."""
    confidence, right, predicted = calibrated(seed)
    half = torch.rand(len(right), generator=torch.Generator().manual_seed(100 + seed)) < 0.5
    return answers(confidence, torch.where(predicted == 1, half, right), predicted)


def test_an_overconfident_class_comes_first(tmp_path: Path) -> None:
    record, report = reported(tmp_path / "run", overconfident_in_one(0))
    first = report.findings[0]
    row = first.claim.rows[0]
    assert row == next(each for each in record.rows(PREDICTED) if "bee" in each.class_name)
    assert first.effect.value == row.gap == pytest.approx(row.confidence - row.accuracy)  # type: ignore[attr-defined]
    assert 0.2 < row.gap < 0.4  # type: ignore[attr-defined]
    assert "overconfident where it predicts class" in first.claim.text
    assert not any(each.effect == record.metric(CONFIDENCE_GAP(model="planted")) for each in report.findings)
    assert list(unbacked(report)) == []
    assert "<b>" not in markdown(report, record).replace("\\<b>", "")


def test_a_calibrated_model_has_no_finding(tmp_path: Path) -> None:
    confidence, right, predicted = calibrated(1)
    _, report = reported(tmp_path / "run", answers(confidence, right, predicted))
    assert not report.findings
    assert list(unbacked(report)) == []


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_class_is_found_and_no_other() -> None:
    invented = 0
    for seed in range(20):
        found = misjudged(_predicted_rows(overconfident_in_one(seed), 0))
        assert found[0].class_name == "<b>*bee*</b>"
        invented += len(found) > 1
        invented += bool(misjudged(_predicted_rows(answers(*calibrated(seed)), 0)))
    assert invented == 0


@pytest.mark.parametrize(
    ("confidence", "right", "classes"),
    [
        ([0.9], [True], 5),  # one image
        ([0.9] * 12, [True] * 12, 5),  # no failure: the bootstrap of the gap excludes 0, the exact test does not
        ([0.999] * 4, [False] * 4, 2),
    ],
)
def test_a_few_images_judge_nothing(tmp_path: Path, confidence: list[float], right: list[bool], classes: int) -> None:
    few = answers(torch.tensor(confidence), torch.tensor(right), torch.zeros(len(right), dtype=torch.long), classes)
    _, report = reported(tmp_path / "run", few, Evaluation("same", few.classes, few.logits, few.labels))
    assert {verdict.state for verdict in report.verdicts} == {"inconclusive"}
    assert all("confident" in each.claim.text for each in report.findings)
    assert bool(report.findings) == (not right[0])
    assert list(unbacked(report)) == []
    assert "calibration" not in {figure.name for figure in report.figures}


def test_a_tiny_difference_is_significant_and_no_finding(tmp_path: Path) -> None:
    """Of 4,000 images 12 more are right: 0.3 points."""
    confidence, right, predicted = calibrated(2, 4000)
    more = (~right).nonzero()[:12, 0]
    repaired, now = right.clone(), predicted.clone()
    repaired[more], now[more] = True, (predicted[more] + 1) % 5
    second = replace(answers(confidence, repaired, now), alias="more")
    record, report = reported(tmp_path / "run", answers(confidence, right, predicted), second)
    assert record.metric(DIFFERENCE(first="planted", second="more")).value == pytest.approx(-0.3)
    assert not any(each.p is not None for each in report.findings)
    assert any("too small to matter" in sentence.text for sentence in report.sections[0].sentences)


def test_the_exact_test_is_the_binomial_test_of_equal_confidences() -> None:
    from scipy.stats import binom

    p = calibration_test([0.9] * 50, 40)
    chances = binom.pmf(np.arange(51), 50, 0.9)
    assert p == pytest.approx(chances[np.abs(np.arange(51) - 45) >= 5].sum(), abs=1e-12)
    normal = calibration_test(np.full(6000, 0.9), 5340)  # beyond the limit of the exact test
    assert normal == pytest.approx(2 * binom.cdf(5340, 6000, 0.9), rel=0.1)
