"""Two runs of one command: what changed beyond chance, on the same images by a paired test, and its exit code."""

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kit.first_page import check_first_page
from tests.kit.pages import page_problems
from vitlens.cli.main import run
from vitlens.commands.report.report import REPORT, changes_between, compared_runs
from vitlens.commands.run.publish import read_folder
from vitlens.uncertainty import mcnemar

Evaluated = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(weaker: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evaluations of the CNN, a worse ViT, that ViT again, and under another alias."""
    made = {}
    for name, model in (
        ("cnn", "cnn-digits"),
        ("vit", weaker),
        ("again", weaker),
        ("new", weaker.replace("vit-digits=", "new=")),
    ):
        made[name] = tmp_path_factory.mktemp("runs") / name
        line = ["evaluate", model, "--limit", "200", "--seed", "1", "--out", str(made[name]), "--quiet"]
        assert run(line) == 0
    return made


def test_a_worse_model_fails_by_the_paired_test(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--compare", str(folders["cnn"]), str(folders["vit"])]) == 3
    printed = capsys.readouterr()
    assert printed.out.strip().endswith("comparison.md")
    assert "worse" in printed.err
    before, after = read_folder(folders["cnn"]), read_folder(folders["vit"])
    (accuracy,) = [change for change in changes_between(before, after) if change.metric == "accuracy/vit-digits"]
    was, now = (np.load(folders[name] / "arrays" / f"predictions-{name}-digits.npz") for name in ("cnn", "vit"))
    correct = [answers["prediction"] == answers["label"] for answers in (was, now)]
    lost, won = (correct[0] & ~correct[1]).sum(), (correct[1] & ~correct[0]).sum()
    assert accuracy.test == "paired"
    assert accuracy.p == mcnemar(int(won), int(lost))
    assert accuracy.difference.value == pytest.approx(100 * (won - lost) / 200)
    assert accuracy.direction == "worse"
    written = REPORT(compared_runs(before, after, "vitlens report"))
    assert accuracy.difference in [claim.effect for claim in written.claims]
    assert written.claims[0].state == "fail"
    check_first_page(written)


def test_a_comparison_is_repeated_by_its_own_command(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["report", "--compare", str(folders["again"]), str(folders["new"])]
    page = folders["new"] / "comparison.html"
    for asked, printed in (([], "comparison.md"), (["--html"], "comparison.html"), ([], "comparison.html")):
        capsys.readouterr()
        assert run([*line, *asked]) == 0
        assert capsys.readouterr().out.strip() == str(folders["new"] / printed)
        assert page.is_file() == (printed == page.name)  # one that lies there is kept up to date
        whole = shlex.join(["vitlens", *line, *(["--html"] if page.is_file() else [])])
        text = (folders["new"] / "comparison.md").read_text(encoding="utf-8").partition("## Repeat it")[2]
        assert f"\n{whole}\n" in text
        assert "vitlens evaluate" not in text
    written = page.read_text(encoding="utf-8")
    assert page_problems(written) == []
    assert "vitlens report --compare" in written
    assert str(folders["new"].parent) not in written
    assert not (folders["new"] / "report.html").exists()


def test_better_is_no_regression_and_the_same_is_no_change(folders: dict[str, Path]) -> None:
    assert run(["report", "--compare", str(folders["vit"]), str(folders["cnn"])]) == 0
    assert run(["report", "--compare", str(folders["vit"]), str(folders["again"])]) == 0
    same = changes_between(read_folder(folders["vit"]), read_folder(folders["again"]))
    assert {change.difference.value for change in same} == {0.0}
    assert not any(change.changed for change in same)
    runs = compared_runs(read_folder(folders["vit"]), read_folder(folders["again"]), "vitlens report")
    assert [claim.state for claim in REPORT(runs).claims] == ["pass"]


def test_models_are_matched_by_their_place(folders: dict[str, Path]) -> None:
    renamed = changes_between(read_folder(folders["vit"]), read_folder(folders["new"]))
    assert {change.metric for change in renamed} == set(read_folder(folders["new"]).metrics)
    assert {change.difference.value for change in renamed} == {0.0}


@pytest.mark.parametrize("before", ["profile", "pair", "missing"])
def test_folders_that_cannot_be_compared(before: str, folders: dict[str, Path], tmp_path: Path) -> None:
    lines = {
        "profile": ["profile", "vit-digits", "--batch-sizes", "1"],
        "pair": ["evaluate", "vit-digits", "cnn-digits", "--limit", "20"],
    }
    if before in lines:
        assert run([*lines[before], "--out", str(tmp_path / before), "--quiet"]) == 0
    assert run(["report", "--compare", str(tmp_path / before), str(folders["vit"])]) == 2
