"""Two runs of one command: what changed beyond chance, on the same images by a paired test, and its exit code."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.kit.first_page import check_first_page
from tests.kit.pages import page_problems
from vitlens.cli.main import run
from vitlens.commands.report.report import REPORT, changes_between, compared_runs
from vitlens.commands.run.publish import read_folder
from vitlens.uncertainty import mcnemar


@pytest.fixture(scope="module")
def folders(weaker: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evaluations of the CNN, a worse ViT, and that ViT again, under another alias."""
    made = {}
    for name, model in (("cnn", "cnn-digits"), ("vit", weaker), ("new", weaker.replace("vit-digits=", "new="))):
        made[name] = tmp_path_factory.mktemp("runs") / name
        assert run(["evaluate", model, "--limit", "200", "--seed", "1", "--out", str(made[name]), "--quiet"]) == 0
    return made


def test_a_worse_model_fails_by_the_paired_test(folders, capsys):
    assert run(["report", "--compare", str(folders["cnn"]), str(folders["vit"])]) == 3
    printed = capsys.readouterr()
    assert printed.out.strip().endswith("comparison.md")
    assert "worse" in printed.err
    before, after = read_folder(folders["cnn"]), read_folder(folders["vit"])
    (accuracy,) = [change for change in changes_between(before, after) if change.metric == "accuracy/vit-digits"]
    was, now = (np.load(folders[name] / "arrays" / f"predictions-{name}-digits.npz") for name in ("cnn", "vit"))
    correct = [answers["prediction"] == answers["label"] for answers in (was, now)]
    lost, won = (correct[0] & ~correct[1]).sum(), (correct[1] & ~correct[0]).sum()
    assert (accuracy.test, accuracy.p) == ("paired", mcnemar(int(won), int(lost)))
    assert accuracy.difference.value == pytest.approx(100 * (won - lost) / 200)
    assert accuracy.direction == "worse"
    written = REPORT(compared_runs(before, after, "vitlens report"))
    assert accuracy.difference in [claim.effect for claim in written.claims]
    assert written.claims[0].state == "fail"
    check_first_page(written)
    assert run(["report", "--compare", str(folders["vit"]), str(folders["cnn"])]) == 0  # better is no regression


def test_a_comparison_is_repeated_by_its_own_command(folders, capsys):
    line = ["report", "--compare", str(folders["vit"]), str(folders["new"])]
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
    assert str(folders["new"].parent) not in written
    assert not (folders["new"] / "report.html").exists()


def test_the_same_is_no_change_and_models_are_matched_by_their_place(folders):
    before, after = read_folder(folders["vit"]), read_folder(folders["new"])
    same = changes_between(before, after)
    assert {change.metric for change in same} == set(after.metrics)
    assert {change.difference.value for change in same} == {0.0}
    assert not any(change.changed for change in same)
    assert [claim.state for claim in REPORT(compared_runs(before, after, "vitlens report")).claims] == ["pass"]


@pytest.mark.parametrize("before", ["profile", "evaluate", "missing"])
def test_folders_that_cannot_be_compared(before, folders, golden, tmp_path):
    """Of another command, of two models, and none."""
    folder = tmp_path / before if before == "missing" else golden(before).folder
    assert run(["report", "--compare", str(folder), str(folders["vit"])]) == 2
