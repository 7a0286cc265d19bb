"""Planted facts are claimed first, with their numbers; requirements decide the exit code."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kit.first_page import check_first_page, judged
from vitlens.analysis.evaluation.evaluate import Evaluation, calibration_error
from vitlens.cli.main import run
from vitlens.commands.evaluate.measure import predicted_rows, recorded
from vitlens.commands.evaluate.record import EvaluateRecord
from vitlens.commands.evaluate.report import REPORT, misjudged
from vitlens.commands.run.publish import read_folder
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim
from vitlens.report.document import Document
from vitlens.report.markdown import markdown
from vitlens.uncertainty import calibration_test


@pytest.fixture(scope="module")
def pair(weaker: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "run"
    assert run(["evaluate", weaker, "cnn-digits", "--out", str(folder), "--quiet"]) == 0
    return folder


def shown(document: Document) -> list[Claim]:
    """The claims of the first page, in their order."""
    texts = [each.text for each in document.first.answer] if document.first else []
    return [next(claim for claim in document.claims if claim.says == text) for text in texts]


def states(document: Document, question: str) -> dict[str, str]:
    """The judgement of each model."""
    return {claim.subject: claim.state for claim in document.claims if claim.question == question}


def test_a_vit_that_loses_to_its_cnn_comes_first(pair: Path) -> None:
    record = read_folder(pair)
    report = REPORT(record)
    first, (row,) = shown(report)[0], record.pairs
    measured = record.metric("accuracy_difference/vit-digits/cnn-digits")
    assert first.effect.value == -measured.value > 0
    assert (first.effect.low, first.effect.high) == (-measured.high, -measured.low)
    assert first.p == row.p_holm < 0.05
    assert report.title == first.title
    assert report.title.startswith("cnn-digits")
    assert states(report, "accuracy") == {"vit-digits": "fail", "cnn-digits": "pass"}
    check_first_page(report)


def test_nothing_planted_nothing_found(tmp_path: Path) -> None:
    """The same model twice."""
    line = ["evaluate", "a=vit-digits", "b=vit-digits", "--limit", "200", "--out", str(tmp_path / "run"), "--quiet"]
    assert run(line) == 0
    record = read_folder(tmp_path / "run")
    for row in record.scores:
        assert row.confidence_gap.low < 0 < row.confidence_gap.high
    assert [claim.question for claim in shown(REPORT(record))] == ["no difference"]


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (["--at-least", "accuracy=0.8", "--at-most", "accuracy_difference/cnn-digits=5"], 0),
        (["--at-least", "accuracy/cnn-digits=0.85", "--at-least", "accuracy=0.999"], 3),
        (["--at-least", "acuracy=0.1"], 2),
        (["--at-least", "accuracy"], 2),
    ],
)
def test_exit_codes(typed: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    line = ["evaluate", "vit-digits", "cnn-digits", "--limit", "100", "--out", str(folder), "--quiet"]
    assert run([*line, *typed]) == code
    assert (folder / "report.md").is_file() == (code != 2)
    assert ("does not hold" in capsys.readouterr().err) == (code == 3)


def test_the_interval_of_the_calibration_error_holds_it_and_the_truth() -> None:
    """Labels drawn with the stated probabilities: the calibration error of infinitely many images is 0."""
    generator, covered = torch.Generator().manual_seed(0), []
    for _ in range(40):
        confidence = torch.rand(400, generator=generator) / 2 + 0.5
        right = torch.rand(400, generator=generator) < confidence
        error = calibration_error(torch.stack([confidence, 1 - confidence], 1), (~right).long(), seed=0)
        assert error.low <= error.value <= error.high
        covered.append(error.low < 0.01)
    assert np.mean(covered) > 0.9
    confidence, right = torch.full((1000,), 0.95), torch.arange(1000) % 5 > 0  # accuracy 0.8
    error = calibration_error(torch.stack([confidence, 1 - confidence], 1), (~right).long())
    assert error.value == pytest.approx(0.15, abs=1e-6)
    assert error.low > 0.1


def answers(confidence: torch.Tensor, right: torch.Tensor, predicted: torch.Tensor, classes: int = 5) -> Evaluation:
    """An evaluation: image i is predicted as predicted[i] with confidence[i]; wrong ones are of the next class."""
    rest = ((1 - confidence) / (classes - 1)).unsqueeze(1).expand(-1, classes).clone()
    probabilities = rest.scatter(1, predicted[:, None], confidence[:, None])
    labels = torch.where(right, predicted, (predicted + 1) % classes)
    names = ("ant", "<b>*bee*</b>", "`cat`", "dog", "eel")
    return Evaluation("planted", names[:classes], probabilities.log(), labels)


def reported(*evaluations: Evaluation) -> tuple[EvaluateRecord, Document]:
    """The record of a run with these answers, and its report, without arrays."""
    models, first = tuple(ModelEntry(each.alias) for each in evaluations), evaluations[0]
    config = Config(models=models, data=Data("planted", "test", len(first.labels)))
    record = replace(recorded(evaluations, classes=len(first.classes), seed=0), config=config)
    document = REPORT(record)
    check_first_page(document)
    return record, document


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


def test_an_overconfident_class_comes_first() -> None:
    record, report = reported(overconfident_in_one(0))
    found = next(claim for claim in shown(report) if claim.kind != "answer")
    row = next(each for each in record.by_prediction if "bee" in each.class_name)
    assert found.effect == row.gap
    assert row.gap.value == pytest.approx(row.confidence - row.accuracy)
    assert 0.2 < row.gap.value < 0.4
    assert found.question == "confidence by class"
    assert not any(claim.question == "confidence" for claim in report.claims)
    assert "<b>" not in markdown(report, record).replace("\\<b>", "")


def test_a_calibrated_model_has_no_finding() -> None:
    _, report = reported(answers(*calibrated(1)))
    assert [claim.question for claim in shown(report)] == ["top-1 accuracy"]


def test_a_model_that_is_overconfident_in_every_class_is_one_finding() -> None:
    confidence, _, predicted = calibrated(3)
    half = torch.rand(len(predicted), generator=torch.Generator().manual_seed(3)) < 0.5
    record, report = reported(answers(confidence, half, predicted))
    assert [(claim.question, claim.effect) for claim in shown(report) if claim.kind != "answer"] == [
        ("confidence", record.scores[0].confidence_gap)
    ]


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_class_is_found_and_no_other() -> None:
    invented = 0
    for seed in range(20):
        found = misjudged(predicted_rows(overconfident_in_one(seed), 0))
        assert found[0].class_name == "<b>*bee*</b>"
        invented += len(found) > 1
        invented += bool(misjudged(predicted_rows(answers(*calibrated(seed)), 0)))
    assert invented == 0


@pytest.mark.parametrize(
    ("confidence", "right", "classes"),
    [
        ([0.9], [True], 5),  # one image
        ([0.9] * 12, [True] * 12, 5),  # no failure: the bootstrap of the gap excludes 0, the exact test does not
        ([0.999] * 4, [False] * 4, 2),
    ],
)
def test_a_few_images_judge_nothing(confidence: list[float], right: list[bool], classes: int) -> None:
    few = answers(torch.tensor(confidence), torch.tensor(right), torch.zeros(len(right), dtype=torch.long), classes)
    _, report = reported(few, Evaluation("same", few.classes, few.logits, few.labels))
    assert {claim.state for claim in judged(report)} == {"inconclusive"}
    assert not shown(report)
    assert not {"calibration", "per_class"} & {figure.name for figure in report.figures}


def test_a_tiny_difference_is_significant_and_no_finding() -> None:
    """Of 4,000 images 12 more are right: 0.3 points."""
    confidence, right, predicted = calibrated(2, 4000)
    more = (~right).nonzero()[:12, 0]
    repaired, now = right.clone(), predicted.clone()
    repaired[more], now[more] = True, (predicted[more] + 1) % 5
    second = replace(answers(confidence, repaired, now), alias="more")
    record, report = reported(answers(confidence, right, predicted), second)
    assert record.metric("accuracy_difference/planted/more").value == pytest.approx(-0.3)
    assert record.pairs[0].p_holm < 0.05
    assert not any(claim.question == "which is better" for claim in report.claims)


def test_the_exact_test_is_the_binomial_test_of_equal_confidences() -> None:
    from scipy.stats import binom

    p = calibration_test([0.9] * 50, 40)
    chances = binom.pmf(np.arange(51), 50, 0.9)
    assert p == pytest.approx(chances[np.abs(np.arange(51) - 45) >= 5].sum(), abs=1e-12)
    normal = calibration_test(np.full(6000, 0.9), 5340)  # beyond the limit of the exact test
    assert normal == pytest.approx(2 * binom.cdf(5340, 6000, 0.9), rel=0.1)
