"""`vitlens train --check`: its lines, exit codes and folder, and what it has no use for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.first_page import judged, states
from vitlens.cli.main import run as command
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder, report
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions, Tuning
from vitlens.commands.train.report import REPORT
from vitlens.training.check.rows import NAMES

TINY = Shape(patch_size=[8, 8], dim=16, depth=2, heads=2)
OPTIONS = RunOptions(device="cpu", limit=100, quiet=True)


def check(out: Path, **changes: object) -> Conclusion:
    options = TrainOptions("vit-micro", check=True, shape=TINY, recipe=RecipeChanges(learning_rate=1e-2), run=OPTIONS)
    ended = measure(replace(options, **{"run": replace(OPTIONS, out=out), **changes}))  # type: ignore[arg-type]
    assert isinstance(ended, Conclusion)
    return ended


def test_a_training_that_can_begin(tmp_path):
    folder = tmp_path / "check"
    ended = check(folder)
    assert (ended.path, ended.holds, ended.lines) == (folder / "report.md", True, ())
    found, record = vitlens.read(folder), read_folder(folder)
    assert [row.name for row in found.table("checks")] == list(NAMES)
    assert {row.state for row in found.table("checks")} == {"pass"}
    assert len(found.table("layers")) == 2 * 6 + 3 + 2
    assert found.metrics["failed_checks/vit-micro"].value == 0
    assert found.metrics["constant_loss/vit-micro"].value == pytest.approx(torch.tensor(8.0).log().item())
    assert found.metrics["initial_loss/vit-micro"].n == 16
    first = record.batch_losses[0]
    assert (first.learning_rate, first.step) == (0.01, 0)
    assert not (folder / "model.safetensors").exists()
    assert len(judged(REPORT(record))) == len(NAMES)
    before = (folder / "report.md").read_text()
    assert "can begin" in before.partition("\n")[0]
    assert report(folder).read_text() == before


def test_a_failed_check_is_said_and_is_exit_code_1(tmp_path, capsys):
    line = (
        "train vit-micro --check --learning-rate 10 --dim 16 --depth 2 --heads 2 --patch-size 8 --limit 100 "
        f"--device cpu --out {tmp_path / 'out'}"
    )
    assert command(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "out" / "report.md")
    for name in NAMES:
        assert f"  {name}: " in captured.err
    assert "The rate is too high: try --learning-rate 0.01." in captured.err
    assert "blocks.1.attn.qkv" in captured.err
    record = read_folder(tmp_path / "out")
    assert [row.name for row in record.checks if row.state == "fail"] == ["learning rate"]
    assert [name for name, state in states(REPORT(record)).items() if state == "fail"] == ["learning rate of vit-micro"]
    assert "learning rate" in (tmp_path / "out" / "report.md").read_text().partition("\n")[0]


def test_a_requirement_that_does_not_hold_is_exit_code_3(tmp_path):
    ended = check(tmp_path / "out", run=replace(OPTIONS, out=tmp_path / "out", at_least=("accuracy=0.9",)))
    assert (ended.holds, ended.code) == (False, 3)


def test_broken_photographs_of_a_folder_are_found(tmp_path):
    for name, shade in (("black", 0), ("white", 255)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (32, 32), (shade,) * 3).save(tmp_path / "data" / name / f"{index}.png")
    ended = check(tmp_path / "out", data=str(tmp_path / "data"), run=replace(OPTIONS, out=tmp_path / "out", limit=None))
    states = {row.name: row.state for row in read_folder(tmp_path / "out").checks}
    assert (ended.holds, ended.code) == (False, 1)
    assert states["constant images"] == states["duplicate images"] == "fail"


def test_only_the_head_of_a_trained_model_is_checked(tmp_path):
    check(tmp_path / "out", model="vit-digits", shape=Shape(), tuning=Tuning(freeze=True))
    rows = {row.name: row for row in read_folder(tmp_path / "out").checks}
    assert rows["frozen parameters"].state == "pass"
    assert rows["gradients"].expected == "a gradient other than 0 for 2 parameter tensors"
