"""An audit from beginning to end: chapters, verdicts, missing labels, JUnit, exit codes."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.kit.commands import quick_attacks, ran, report, said_first
from tests.kit.first_page import check_first_page, judged
from tests.kit.select import names_in, select_one, values_of
from tests.kit.whole_folder import check_consistent
from vitlens.cli.main import run
from vitlens.commands.audit.record import CandidateRow
from vitlens.commands.run.publish import read_folder
from vitlens.record import Record

SUBJECTS = {
    "accuracy",
    "calibration",
    "maps",
    "robustness",
    "common corruptions",
    "attention health",
}
WHOLE = "--batch-size 4 --budget 60"  # with quick_attacks(()) FGSM is the only attack


def states(record: Record) -> dict[str, str]:
    by_subject = {claim.question: claim.state for claim in judged(report(record))}
    assert set(by_subject) >= SUBJECTS
    return by_subject


@pytest.fixture(scope="module")
def labelled(golden) -> Path:
    """Return an audit of 4 images of digits with a requirement that does not hold."""
    return golden("audit").folder.parent


def test_all_chapters_are_run_and_all_subjects_judged(labelled):
    record = read_folder(labelled / "run")
    done = set(values_of(record.chapters, "word", "part"))
    assert done == {("evaluate", ""), ("explain", ""), ("stats", ""), ("attack", "corruptions")}
    for row in record.chapters:
        assert row.seconds > 0
    by_subject = states(record)
    assert by_subject["accuracy"] == "fail"  # as --at-least asks
    assert by_subject["calibration"] == "inconclusive"
    assert "robust_accuracy/mine/fgsm-linf/1" in record.metrics
    assert record.metric("accuracy/mine").n == 4
    check_first_page(report(record))
    unknown = "\n".join(values_of(report(record).first.unknown, "text"))
    # for shifts, which an audit does not check
    assert re.search(r"`vitlens explain .* --verify`", unknown)
    (budget,) = record.budget
    assert budget.left == pytest.approx(0.9 * budget.minutes - budget.others)
    assert budget.others <= budget.total <= budget.minutes
    assert record.attacks_considered[-1].state == "chosen"
    assert by_subject["robustness"] in ("inconclusive", "fail")
    for row in record.chapters:  # a metric of the audit is that of its chapter
        chapter = read_folder(labelled / "run" / row.folder)
        shared = chapter.metrics.keys() & record.metrics.keys()
        assert {name: record.metrics[name] for name in shared} == {
            name: chapter.metrics[name] for name in shared
        }


def test_what_does_not_fit_the_budget_is_left_out_and_the_report_says_so(
    labelled, tiny_vit, tmp_path
):
    """With next to no time only accuracy; with more, all chapters."""
    little = ran(
        tmp_path / "run",
        f"audit mine={tiny_vit} --data digits --limit 4 --batch-size 4 --budget 1e-6",
    )
    assert set(little.chapters_by_name) == {"evaluate"}
    assert set(values_of(little.untested, "part")) == {
        "stats",
        "corruptions",
        "explain",
        "failures",
        "reliance",
    }
    by_subject = states(little)
    for subject in SUBJECTS - {"accuracy", "calibration"}:
        assert by_subject[subject] == "not tested"
    assert little.attacks_considered == ()
    assert "budget" in said_first(report(little))
    check_first_page(report(little))
    assert read_folder(labelled / "run").untested == ()


def test_the_numbers_of_images_of_the_parts_are_said_if_they_differ(labelled):
    record = read_folder(labelled / "run")
    assert set(record.images_of_parts.values()) == {4}
    assert "Numbers of images" not in str(report(record).preface)
    data = replace(record.config.data, images=2)
    shorter = report(replace(record, config=replace(record.config, data=data)))
    assert re.search(r"attention\s4\b", shorter.preface[0].text)
    unknown = "\n".join(values_of(shorter.first.unknown, "text"))
    assert re.search(r"like these\s4\b", unknown)


def test_the_title_says_first_whether_the_requirement_holds(labelled):
    record = read_folder(labelled / "run")
    assert report(record).title.startswith(
        "Do not release mine: accuracy at least 0.999 does not hold"
    )
    run = {**record.config.options["run"], "at_least": ["accuracy=0.0"]}
    config = replace(record.config, options={**record.config.options, "run": run})
    assert report(replace(record, config=config)).title.startswith("mine meets accuracy at least 0")
    config = replace(config, options={**config.options, "run": {**run, "at_least": []}})
    assert "accuracy" not in report(replace(record, config=config)).title


def test_the_file_for_continuous_integration_is_there_though_the_requirement_is_unmet(labelled):
    [suite] = ElementTree.parse(labelled / "junit.xml").getroot()
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    unmet = cases["vitlens audit.requirement", "accuracy at least 0.999 (accuracy/mine)"]
    assert unmet.find("failure") is not None
    assert (
        "vitlens audit.verdict",
        "accuracy of mine",
    ) not in cases  # the requirement is the verdict, and one failure
    assert suite.get("failures") == str(len(suite.findall("testcase/failure")))
    assert cases["vitlens audit.verdict", "calibration of mine"].find("skipped") is not None
    assert names_in(labelled) == {"run", "junit.xml"}  # no temporary file


def test_the_table_of_attacks_begins_with_the_one_that_was_run(labelled):
    record = read_folder(labelled / "run")
    (chosen,) = record.attacks_considered
    stronger = replace(chosen, attacks=("auto",), minutes=9.0, state="too long")
    record = replace(record, attacks_considered=(stronger, chosen))
    section = select_one(report(record).sections, title="Which attack was run?")
    (table,) = section.tables
    assert [cells[-1] for cells in table.rows] == ["chosen", "too long"]


def test_a_requirement_is_the_limit_of_the_verdict_on_accuracy(labelled):
    table = report(read_folder(labelled / "run")).first.glance
    cells = next(cells for cells in table.rows if cells[0] == "accuracy")
    row = dict(zip(table.columns, cells, strict=True))
    assert "0.999" in row["limit"]
    assert "0.999" not in row["because"]


def test_a_second_audit_repeats_nothing_and_a_chapter_is_made_again_by_its_command(
    labelled, tiny_vit, tmp_path
):
    with quick_attacks(()):
        line = f"audit mine={tiny_vit} --data digits --limit 4 {WHOLE}"
        record = ran(tmp_path / "run", f"{line} --junit {tmp_path / 'junit.xml'}")
    for row in record.chapters:
        assert row.cached
    first = read_folder(labelled / "run")
    assert values_of(record.chapters, "seconds") == values_of(first.chapters, "seconds")
    assert record.metrics == first.metrics
    assert states(record)["accuracy"] == "not tested"  # nothing to judge it by
    assert not re.search(r"`|\*\*", (tmp_path / "junit.xml").read_text())  # no Markdown
    record = read_folder(labelled / "run")
    place = select_one(record.chapters, word="explain").folder
    options = json.loads((labelled / "run" / place / "config.json").read_text())["options"]
    again = ran(tmp_path / "again", options["run"]["command"].removeprefix("vitlens "))
    before = read_folder(labelled / "run" / place).metrics
    assert again.metrics.keys() == before.keys()
    assert {name for name, value in again.metrics.items() if value != before[name]} <= {
        name for name in before if "seconds" in name
    }
    repeated = json.loads((tmp_path / "again" / "config.json").read_text())["options"]
    assert {**repeated, "run": None} == {**options, "run": None}


@pytest.mark.usefixtures("undrawn")
def test_a_note_on_the_images_is_printed_once_not_once_a_chapter(pictures, tmp_path, capsys):
    """Ten named classes, which are those of a model only by their position."""
    for name in "abcdefghij":
        (tmp_path / "letters" / name).mkdir(parents=True)
        shutil.copy(pictures / "0.png", tmp_path / "letters" / name / f"{name}.png")
    line = f"audit vit-digits --data {tmp_path / 'letters'} --budget 1e-6 --out {tmp_path / 'run'}"
    assert run(line.split()) == 0
    (note,) = read_folder(tmp_path / "run").config.data.notes
    assert capsys.readouterr().err.count(note) == 1


def test_the_metric_of_the_strongest_attack_is_the_number_that_the_verdict_judges(
    labelled, tmp_path
):
    """Plant a second chapter, an attack that breaks one image more than FGSM."""
    folder = tmp_path / "run"
    shutil.copytree(labelled / "run", folder)
    weak = read_folder(folder).metric("robust_accuracy/mine/strongest/1")
    stronger = {**asdict(weak), "value": weak.value - 0.25, "low": 0.0}
    audit = json.loads((folder / "results.json").read_text())
    row = next(row for row in audit["tables"]["chapters"] if row["part"] == "corruptions")
    attack = folder / "chapters" / "attack-mine"
    shutil.copytree(folder / row["folder"], attack)
    audit["tables"]["chapters"].append({**row, "folder": "chapters/attack-mine", "part": ""})
    chapter = json.loads((attack / "results.json").read_text())
    chapter["tables"]["overall"][0]["robust"] = stronger
    chapter["tables"]["attacks"][0]["title"] = "PGD"
    for curve in chapter["tables"]["curves"]:
        if curve["epsilon"] == 1:
            curve.update(attack="pgd-linf", accuracy=stronger)
    (attack / "results.json").write_text(json.dumps(chapter))
    (folder / "results.json").write_text(json.dumps(audit))
    record = read_folder(folder)
    verdict = select_one(judged(report(record)), question="robustness")
    assert verdict.effect == record.metric("robust_accuracy/mine/strongest/1")
    assert verdict.effect.value == weak.value - 0.25
    check_consistent(record)
    self_checks = [
        claim.question for claim in report(record).claims if "self-checks" in claim.question
    ]
    assert len(self_checks) == len(set(self_checks)) == 2  # each named by its attacks
    assert any("PGD" in question for question in self_checks)
    verdicts = [claim for claim in judged(report(record)) if claim.question not in self_checks]
    release = select_one(report(record).claims, question="release")
    assert f" of {len(verdicts)} judgements" in release.says


@pytest.mark.slow
def test_a_cnn_on_one_image_without_a_label_and_an_attack_that_fits(tiny_cnn, pictures, tmp_path):
    # whatever a pass takes here
    with quick_attacks([CandidateRow(("pgd",), 1, (1.0, 8.0), 2, None, "too long")]):
        record = ran(tmp_path / "run", f"audit {tiny_cnn} --images {pictures / '0.png'} --budget 9")
    by_subject = states(record)
    assert (by_subject["accuracy"], by_subject["calibration"], by_subject["attention health"]) == (
        "not tested",
    ) * 3
    assert by_subject["common corruptions"] == "inconclusive"  # one image shows little
    assert set(values_of(record.untested, "part")) == {"evaluate", "stats"}
    assert "accuracy/tiny-cnn" not in record.metrics  # 1 by construction
    chosen = values_of(record.attacks_considered, "attacks", "state")
    assert chosen == [(("pgd",), "chosen"), (("fgsm",), "weaker")]
    attack = next(row for row in record.chapters if (row.word, row.part) == ("attack", ""))
    chapter = read_folder(tmp_path / "run" / attack.folder)
    assert chapter.metric("accuracy/tiny-cnn").value == 1  # of its predictions
    strongest = chapter.metric("robust_accuracy/tiny-cnn/strongest/1")
    assert record.metric("robust_accuracy/tiny-cnn/strongest/1") == strongest
    corruptions = select_one(judged(report(record)), question="common corruptions")
    assert corruptions.effect.value == pytest.approx(
        1 - record.metric("mean_error_on_corruptions/tiny-cnn").value
    )
