"""`report --compare`: every folder against its copy, the title as a decision, other images."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.contracts.test_report_folders import BY_HAND, NAMES
from tests.kit.commands import quick_attacks, ran
from tests.kit.first_page import check_first_page
from tests.kit.golden import LINES
from tests.kit.marks import slow_among
from tests.kit.select import select, select_one, values_of
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.cli.main import run
from vitlens.commands.report.record import ComparedRuns, MetricChange
from vitlens.commands.report.report import REPORT, compared_runs
from vitlens.commands.run.publish import read_folder
from vitlens.record import Record
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate


def comparison(before: Record, after: Record) -> Document:
    return REPORT(compared_runs(before, after, "vitlens report"))


# folders whose reports take seconds to write again; audit, a study in small, stays in the default
# suite
LONG = (
    *BY_HAND,
    "study",
    "study of points",
    "study of pretraining",
    "compare",
    "attack",
    "features",
)


@pytest.mark.parametrize("name", slow_among(NAMES, LONG))
def test_every_folder_is_compared_with_its_copy_and_with_another_run_of_its_command(
    name, golden, tmp_path
):
    original = golden(name)
    copy = Path(shutil.copytree(original.folder, tmp_path / "copy"))
    assert run(["report", "--compare", str(original.folder), str(copy)]) == 0
    assert not compared_runs(original.record, read_folder(copy), "").changed
    comparable = []
    for candidate in NAMES:
        if candidate not in (name, *BY_HAND) and command(candidate) == command(name):
            comparable.append(candidate)
    for other in comparable:
        # 2: more models
        assert run(["report", "--compare", str(golden(other).folder), str(copy)]) in (
            0,
            2,
            3,
        )


def command(name: str) -> str:
    return LINES.get(name, name).split()[0]


def test_metrics_with_numbers_in_their_names_are_found_under_another_alias(
    golden, tmp_path, tiny_vit
):
    before = golden("audit").record
    with quick_attacks(()):
        after = ran(
            tmp_path / "new",
            f"audit new={tiny_vit} --data digits --limit 4 --batch-size 4 --budget 60",
        )
    runs = compared_runs(before, after, "")
    changes = set(values_of(runs.changes, "metric"))
    assert {name for name in after.metrics if name.startswith("robust_accuracy/new/")} <= changes
    assert not [name for name in runs.alone if name.startswith("robust_accuracy/")]


def photographs(folder: Path, *, darker: bool) -> Path:
    """Write class folders of the same names and sizes; darker: of other images."""
    generator = np.random.default_rng(int(darker))
    for label in range(10):
        for number in range(3):
            path = folder / "test" / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 128 if darker else 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return folder / "test"


def test_other_images_of_the_same_names_are_not_paired_and_the_title_says_so(tmp_path):
    folders = [photographs(tmp_path / name, darker=name == "b") for name in ("a", "b")]
    first, second = (
        ran(tmp_path / f"run-{at}", f"evaluate cnn-digits --data {folder}")
        for at, folder in enumerate(folders)
    )
    accuracy = select_one(compared_runs(first, second, "").changes, metric="accuracy/cnn-digits")
    assert (accuracy.test, accuracy.difference.n) == ("independent", 30)
    fewer = ran(tmp_path / "fewer", f"evaluate cnn-digits --data {folders[1]} --limit 20")
    accuracy = select_one(compared_runs(first, fewer, "").changes, metric="accuracy/cnn-digits")
    assert (accuracy.test, accuracy.difference.n) == ("independent", None)
    document = comparison(first, second)
    assert "other images" in document.title
    assert "other images" in "\n".join(values_of(document.first.unknown, "text"))
    assert any("fingerprint" in row.setting for row in compared_runs(first, second, "").settings)
    moved = shutil.copytree(folders[0], tmp_path / "elsewhere" / "test")
    again = ran(tmp_path / "again", f"evaluate cnn-digits --data {moved}")
    accuracy = select_one(compared_runs(first, again, "").changes, metric="accuracy/cnn-digits")
    assert accuracy.test == "paired"


@pytest.mark.parametrize(
    "name", slow_among(["walkthrough", "explain", "features", "audit", "study"], LONG)
)
def test_folders_without_their_arrays_are_compared(golden, tmp_path, name):
    original = golden(name)
    copy = Path(shutil.copytree(original.folder, tmp_path / "copy"))
    for arrays in [*copy.rglob("arrays")]:
        shutil.rmtree(arrays)
    assert run(["report", "--compare", str(original.folder), str(copy)]) in (0, 3)
    (copy / "comparison.md").read_text()


def test_the_same_images_with_other_labels_are_not_the_same(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20) % 10
    records = []
    for name, these in (("before", labels), ("after", (labels + 1) % 10)):
        np.savez(tmp_path / f"{name}.npz", images=pixels, labels=these)
        records.append(ran(tmp_path / name, f"evaluate cnn-digits --data {tmp_path / name}.npz"))
    assert compared_runs(*records, "").same_images == "others"
    assert "or labels" in comparison(*records).title


def test_folders_without_fingerprints_are_read_and_not_paired(golden, tmp_path):
    original = golden("evaluate")
    old = Path(shutil.copytree(original.folder, tmp_path / "old"))
    config = json.loads((old / "config.json").read_text())
    assert config.pop("fingerprints").keys() == {"test", "test labels"}
    (old / "config.json").write_text(json.dumps(config))
    assert run(["report", str(old)]) == 0
    runs = compared_runs(read_folder(old), original.record, "")
    assert (runs.same_images, set(values_of(runs.tested, "test"))) == ("not known", {"independent"})
    assert "not known" in comparison(read_folder(old), original.record).title


def test_an_accuracy_is_corrected_for_accuracies_alone(tmp_path):
    records = [
        ran(tmp_path / name, f"evaluate m={name} --data digits --limit 60")
        for name in ("vit-digits", "cnn-digits")
    ]
    rows = compared_runs(*records, "").tested
    accuracy_row = select_one(rows, metric="accuracy/m")
    assert accuracy_row.p_holm == accuracy_row.p
    judged_rows = select(rows, family="judged")
    assert min(row.p_holm for row in judged_rows) == pytest.approx(
        min(1.0, len(judged_rows) * min(row.p for row in judged_rows))
    )


def test_what_got_worse_stands_before_what_only_differs():
    described = replace(
        cross_entropy(1e-9), metric="statistics/m/distance", words="distance", better=None
    )
    runs = ComparedRuns(
        earlier="old", later="new", same_images="the same", changes=(described, cross_entropy(0.01))
    )
    assert values_of(runs.changed, "words") == ["cross-entropy", "distance"]
    assert "cross-entropy" in REPORT(runs).first.glance.rows[0][0]


def rows_of_csv(path: Path) -> int:
    with path.open(encoding="utf-8", newline="") as file:
        return len(list(csv.DictReader(file)))


def test_every_csv_file_that_a_comparison_names_has_all_rows_and_no_table_of_the_run_changes(
    golden, tmp_path
):
    before = golden("stats").folder
    after = Path(shutil.copytree(before, tmp_path / "after"))
    results = json.loads((after / "results.json").read_text())
    for row in results["tables"]["heads"]:
        for estimate in row["statistics"].values():
            if isinstance(estimate, dict):
                estimate.update(
                    {
                        end: estimate[end] + 9
                        for end in ("value", "low", "high")
                        if estimate.get(end) is not None
                    }
                )
    (after / "results.json").write_text(json.dumps(results))
    tables = {path: path.read_bytes() for path in (after / "tables").iterdir()}
    assert run(["report", "--compare", str(before), str(after)]) in (0, 3)
    text = (after / "comparison.md").read_text(encoding="utf-8")
    named = re.findall(r"of ([\d,]+) rows \(all rows: ([^)]+)\)", text)
    assert "comparison/changes.csv" in {file for _, file in named}
    changed = compared_runs(read_folder(before), read_folder(after), "").changed
    assert changed
    assert rows_of_csv(after / "comparison" / "changed.csv") == len(changed)
    for count, file in named:
        assert rows_of_csv(after / file) == int(count.replace(",", ""))
    assert {path: path.read_bytes() for path in (after / "tables").iterdir()} == tables
    # without a change, no file of the earlier comparison stays
    same = Path(shutil.copytree(after, tmp_path / "same"))
    assert run(["report", "--compare", str(after), str(same)]) == 0
    assert not (same / "comparison" / "changed.csv").exists()


def with_options(folder: Path, **options: object) -> Path:
    """Write other options into a run's config.json; at_least and at_most go to those of `run`."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in options.items():
        part = config["options"]["run"] if name.startswith("at_") else config["options"]
        part[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("at_least", [[], ["accuracy=1"]])
def test_a_later_run_that_fails_is_not_praised_although_nothing_changed(golden, tmp_path, at_least):
    before, after = (
        Path(shutil.copytree(golden("audit").folder, tmp_path / name)) for name in ("old", "new")
    )
    for folder in (before, after):
        with_options(folder, at_least=at_least, junit=f"{folder.name}.xml")
    runs = compared_runs(read_folder(before), read_folder(after), "")
    assert not runs.settings
    required = [failure for failure in runs.failures if failure.startswith("accuracy")]
    assert required == (["accuracy at least 1"] if at_least else [])
    failed = select(REPORT(runs).claims, state="fail")
    assert bool(failed) == bool(runs.failures)
    assert run(["report", "--compare", str(before), str(after)]) == 0
    assert run(["report", "--compare", str(after), str(after)]) == 2


def test_a_requirement_of_one_run_is_a_setting_and_its_verdict_is_not_compared(golden, tmp_path):
    before, after = (
        Path(shutil.copytree(golden("audit").folder, tmp_path / name)) for name in ("old", "new")
    )
    with_options(before, at_least=["accuracy=1"])
    with_options(after, at_least=[], junit="new.xml")
    runs = compared_runs(read_folder(before), read_folder(after), "")
    (setting,) = runs.settings
    assert (setting.setting, setting.before) == ("--at-least", "accuracy=1")
    (alone,) = runs.judged_alone
    assert alone.startswith("accuracy of ")
    assert alone not in values_of(runs.judged, "judged")
    assert "accuracy at least 1" not in runs.failures


def test_no_p_value_of_a_comparison_is_zero_and_statistics_have_their_titles(golden, tmp_path):
    after = golden("stats").record
    changes = compared_runs(after, after, "").changes
    names = {statistic.title for statistic in STATISTICS.values()}
    assert {change.words.partition(" (L")[0] for change in changes} & names
    assert not {change.words for change in changes if "statistics" in change.words}
    tiny = REPORT(ComparedRuns(later="new", same_images="the same", changes=(cross_entropy(0.0),)))
    assert tiny.first.glance.rows[0][tiny.first.glance.columns.index("p (Holm)")] != 0


def accuracy(before: float, after: float, p: float, words: str = "accuracy") -> MetricChange:
    """Return the change of one accuracy on 60 images."""
    points = 100 * (after - before)
    was = Estimate(before, before - 0.1, before + 0.1, 60)
    now = Estimate(after, after - 0.1, after + 0.1, 60)
    difference = Estimate(points, points - 9, points + 9, 60, "points")
    return MetricChange("accuracy/m", words, was, now, difference, p, p, "paired", "higher")


def cross_entropy(p: float) -> MetricChange:
    was = Estimate(0.8, 0.8 - 0.1, 0.8 + 0.1, 60, "nats")
    now = Estimate(1.2, 1.2 - 0.1, 1.2 + 0.1, 60, "nats")
    more = Estimate(0.4, 0.4 - 0.1, 0.4 + 0.1, 60, "nats")
    return MetricChange(
        "cross_entropy/m", "cross-entropy", was, now, more, p, p, "independent", "lower"
    )


def quarter(number: int) -> MetricChange:
    was = Estimate(0.9, 0.8, 0.95, 15)
    now = Estimate(0.4, 0.3, 0.5, 15)
    less = Estimate(-50, -60, -40, 15, "points")
    metric = f"quarter_accuracy/m/mark/{number}"
    words = f"accuracy of quarter {number}"
    return MetricChange(metric, words, was, now, less, 1e-9, 1e-9, "independent", "higher")


def test_quarters_of_the_images_come_last_and_not_into_the_title_if_accuracy_fell():
    quarters = tuple(map(quarter, (1, 2, 3, 4)))
    with_fall = (*quarters, accuracy(0.78, 0.6, 0.001), cross_entropy(0.01))
    runs = ComparedRuns(earlier="old", later="new", same_images="the same", changes=with_fall)
    assert [row.metric.split("/")[0] for row in runs.changed] == [
        "accuracy",
        "cross_entropy",
        *4 * ["quarter_accuracy"],
    ]
    assert "quarter" not in REPORT(runs).title
    assert "and" not in REPORT(runs).title.split()  # no "and 4 more"
    only_quarters = replace(runs, changes=quarters)
    assert REPORT(only_quarters).title.startswith("Do not release new: accuracy of quarter 1")


@pytest.mark.parametrize(
    ("changes", "images", "verdict", "state"),
    [
        (
            [accuracy(0.78, 0.6, 0.001), cross_entropy(0.001)],
            "the same",
            "Do not release new: accuracy fell",
            "fail",
        ),
        (
            [accuracy(0.78, 0.667, 0.2), cross_entropy(0.001)],
            "the same",
            "Do not release new: accuracy fell",
            "fail",
        ),
        ([accuracy(0.78, 0.6, 0.001)], "others", "Do not release new yet: accuracy fell", "fail"),
        ([cross_entropy(0.001)], "the same", "Do not release new: cross-entropy got worse", "fail"),
        (
            [accuracy(0.78, 0.667, 0.2)],
            "the same",
            "Undecided whether to release new: accuracy fell",
            "inconclusive",
        ),
        ([accuracy(0.78, 0.79, 0.9)], "others", "Undecided whether to release new", "inconclusive"),
        (
            [accuracy(0.78, 0.79, 0.9)],
            "not known",
            "Undecided whether to release new",
            "inconclusive",
        ),
        ([], "the same", "Undecided whether to release new", "inconclusive"),
        (
            [accuracy(0.78, 0.79, 0.9), cross_entropy(0.5)],
            "the same",
            "Nothing in new got worse",
            "pass",
        ),
    ],
)
def test_the_title_decides_on_release_and_names_a_fall_of_accuracy_first(
    changes, images, verdict, state
):
    document = REPORT(
        ComparedRuns(earlier="old", later="new", same_images=images, changes=tuple(changes))
    )
    assert document.title.startswith(verdict)
    assert document.claims[0].state == state
    assert ("saw" in document.title) == (images != "the same")
    assert "_" not in document.title
    if changes and changes[0].is_accuracy:
        assert document.first.answer[1].text.startswith("**accuracy**")
    check_first_page(document)


def test_models_and_their_options_are_settings_that_a_reader_can_type(golden, tmp_path):
    before, after = (
        Path(shutil.copytree(golden("evaluate").folder, tmp_path / name)) for name in ("old", "new")
    )
    config = json.loads((after / "config.json").read_text())
    config["models"][0] |= {"name": "timm:another", "weights": "random"}
    config["options"] |= {"models": ["timm:another@random"]}
    config["options"]["model_options"] |= {"image_size": 64, "mean": [0.5, 0.4, 0.3]}
    (after / "config.json").write_text(json.dumps(config))
    settings = compared_runs(read_folder(before), read_folder(after), "").settings
    changed = {row.setting: row.after for row in settings}
    assert sorted(changed.values()) == ["0.5, 0.4, 0.3", "64", "random", "timm:another"]
    assert {row.before for row in settings} >= {"none"}
