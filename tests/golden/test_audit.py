"""An audit from beginning to end on tiny models: chapters, verdicts, what is said without labels, JUnit, exit codes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.kit.first_page import check_first_page, judged
from vitlens.cli.main import run
from vitlens.commands.audit import measure
from vitlens.commands.audit.record import AuditRecord, CandidateRow
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.report.document import Document

SUBJECTS = ("accuracy", "calibration", "maps", "robustness", "common corruptions", "attention health")
OPTIONS = ["--quiet", "--device", "cpu", "--batch-size", "4"]
TINY = ["--budget", "0.001"]  # FGSM alone


def audited(folder: Path, *words: str, code: int = 0) -> tuple[AuditRecord, Document]:
    assert run(["audit", *words, *OPTIONS, "--out", str(folder)]) == code
    record = read_folder(folder)
    return record, COMMANDS["audit"].report(record)


def states(document: Document) -> dict[str, str]:
    found = {claim.question: claim.state for claim in judged(document)}
    assert set(SUBJECTS) <= set(found)
    return found


@pytest.fixture(scope="module")
def labelled(golden) -> Path:
    """An audit of 4 images of digits under a requirement that does not hold."""
    return golden("audit").folder.parent


def test_all_chapters_are_run_and_all_subjects_judged(labelled):
    record = read_folder(labelled / "run")
    document = COMMANDS["audit"].report(record)
    done = {(row.word, row.part) for row in record.chapters}
    assert done == {("evaluate", ""), ("explain", ""), ("stats", ""), ("attack", "corruptions")}
    assert all(row.seconds > 0 for row in record.chapters)
    found = states(document)
    assert found["accuracy"] == "fail"  # as --at-least asks
    assert found["calibration"] == "inconclusive"
    assert "robust_accuracy/mine/fgsm-linf/1" in record.metrics
    assert record.metric("accuracy/mine").n == 4
    check_first_page(document)


def test_a_budget_too_small_for_any_attack_is_said(labelled):
    record = read_folder(labelled / "run")
    document = COMMANDS["audit"].report(record)
    [budget] = record.budget
    assert budget.left == pytest.approx(max(0.2 * budget.minutes, budget.minutes - budget.others))
    assert budget.others > budget.minutes
    assert record.attacks_considered[-1].state == "chosen"
    assert states(document)["robustness"] in ("inconclusive", "fail")


def test_the_checks_of_maps_are_kept_within_the_budget(labelled, tiny_cnn, tmp_path, monkeypatch):
    """With next to no time the preferred method alone, which the report says; with more, all of them."""
    monkeypatch.setattr(measure, "CANDIDATES", ())  # FGSM alone, however long the budget
    record = read_folder(labelled / "run")
    little = record, COMMANDS["audit"].report(record)
    much = audited(tmp_path / "run", str(tiny_cnn), "--data", "digits", "--limit", "4", "--budget", "60")
    for (record, document), is_cut in ((little, True), (much, False)):
        said = any("do not fit the budget" in each.text for each in document.first.unknown)
        assert said == ("explain" in {row.part for row in record.untested}) == is_cut
        assert (len(record.named["explain"].record.methods) == 1) == is_cut
        assert sum(claim.question == "maps" for claim in judged(document)) == 1


def test_the_file_for_continuous_integration_is_there_though_the_requirement_is_unmet(labelled):
    [suite] = ElementTree.parse(labelled / "junit.xml").getroot()
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    unmet = cases["vitlens audit.requirement", "accuracy at least 0.999 (accuracy/mine)"]
    assert unmet.find("failure") is not None
    assert cases["vitlens audit.verdict", "accuracy of mine"].find("failure") is not None
    assert cases["vitlens audit.verdict", "calibration of mine"].find("skipped") is not None
    assert {path.name for path in labelled.iterdir()} == {"run", "junit.xml"}  # no temporary file


def test_a_second_audit_repeats_nothing(labelled, tiny_vit, tmp_path):
    words = [f"mine={tiny_vit}", "--data", "digits", "--limit", "4", *TINY]
    record, document = audited(tmp_path / "run", *words)
    assert all(row.cached for row in record.chapters)
    first = read_folder(labelled / "run")
    assert [row.seconds for row in record.chapters] == [row.seconds for row in first.chapters]
    assert record.metrics == first.metrics
    assert states(document)["accuracy"] == "not tested"  # nothing to judge it by


@pytest.mark.slow
def test_a_cnn_on_one_image_without_a_label_and_an_attack_that_fits(tiny_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure, "CANDIDATES", (CandidateRow(("pgd",), 1, (1.0, 8.0), 2, None, "too long"),)
    )  # whatever the time of a pass is here
    image = str(pictures / "0.png")
    record, document = audited(tmp_path / "run", str(tiny_cnn), "--images", image, "--budget", "9")
    found = states(document)
    assert (found["accuracy"], found["calibration"], found["attention health"]) == ("not tested",) * 3
    assert found["common corruptions"] == "inconclusive"  # one image shows little
    assert {row.part for row in record.untested} == {"evaluate", "stats"}
    assert "accuracy/tiny-cnn" not in record.metrics  # 1 by construction
    assert [(row.attacks, row.state) for row in record.attacks_considered] == [
        (("pgd",), "chosen"),
        (("fgsm",), "weaker"),
    ]
    attack = next(row for row in record.chapters if (row.word, row.part) == ("attack", ""))
    chapter = read_folder(tmp_path / "run" / attack.folder)
    assert chapter.metric("accuracy/tiny-cnn").value == 1  # of its predictions
    corruptions = next(each for each in judged(document) if each.question == "common corruptions")
    assert corruptions.effect.value == pytest.approx(1 - record.metric("mean_error_on_corruptions/tiny-cnn").value)


@pytest.mark.slow
def test_a_few_images_of_one_class_and_a_class_that_the_model_does_not_know(tiny_vit, tmp_path):
    for name in ("3", "<b>|*x*"):
        (tmp_path / name / name).mkdir(parents=True)
        for index, colour in enumerate(("red", "blue")):
            Image.new("RGB", (32, 32), colour).save(tmp_path / name / name / f"{index}.png")
    _, document = audited(tmp_path / "run", str(tiny_vit), "--data", str(tmp_path / "3"), *TINY)
    assert set(states(document).values()) <= {"inconclusive", "not tested", "fail"}
    odd = str(tmp_path / "<b>|*x*")
    assert run(["audit", str(tiny_vit), "--data", odd, *OPTIONS, "--out", str(tmp_path / "o")]) == 2
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--junit", "missing/file.xml"], "expected a folder that is there for --junit"),
        (["--junit", "."], "expected a file for --junit"),
        (["--budget", "0"], "expected --budget in minutes, above 0"),
        (["--budget", "nan"], "expected --budget in minutes, above 0"),
        (["--at-least", "accuracy"], "expected --at-least METRIC=VALUE"),
    ],
)
def test_a_wrong_call_is_one_line_before_anything_is_measured(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["audit", "vit-digits", *words, "--quiet", "--out", "out"]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_audit_of_the_bundled_vit(tmp_path):
    """It ends in time on a quiet machine, with an attack of many steps; the verdicts are those of these weights."""
    record, document = audited(tmp_path / "run", "vit-digits", "--no-cache", "--at-least", "accuracy=0.9")
    found = states(document)
    assert found["accuracy"] == "pass"
    assert found["calibration"] in ("pass", "warn")
    [taken] = [row for row in record.attacks_considered if row.state == "chosen"]
    assert taken.minutes <= record.budget[0].left
