"""`vitlens train --check`: the folder, the report, the exit code, and what it has no use for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.backing import unbacked
from vitlens.cli.main import run as vitlens
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read, report
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import RecipeChanges, Shape, TeacherOptions, TrainOptions, Tuning
from vitlens.commands.train.record import BATCH_LOSSES, CHECKS, CONSTANT_LOSS, FAILED_CHECKS, INITIAL_LOSS, LAYERS
from vitlens.errors import InputError
from vitlens.files import read_run
from vitlens.training.check.rows import NAMES

TINY = Shape(patch_size=[8, 8], dim=16, depth=2, heads=2)
OPTIONS = RunOptions(device="cpu", limit=100, quiet=True)


def check(out: Path, **changes: object) -> Conclusion:
    options = TrainOptions("vit-micro", check=True, shape=TINY, recipe=RecipeChanges(learning_rate=1e-2), run=OPTIONS)
    ended = measure(replace(options, **{"run": replace(OPTIONS, out=out), **changes}))  # type: ignore[arg-type]
    assert isinstance(ended, Conclusion)
    return ended


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "check"
    ended = check(folder)
    assert (ended.path, ended.holds, ended.lines) == (folder / "report.md", True, ())
    return folder


def test_the_folder_is_whole_and_its_rows_are_typed(checked):
    record = read(read_run(checked))
    assert [row.name for row in record.rows(CHECKS)] == list(NAMES)
    assert {row.state for row in record.rows(CHECKS)} == {"pass"}
    assert len(record.rows(LAYERS)) == 2 * 6 + 3 + 2
    assert record.metric(FAILED_CHECKS(model="vit-micro")).value == 0
    assert record.metric(CONSTANT_LOSS(model="vit-micro")).value == pytest.approx(torch.tensor(8.0).log().item())
    first = record.rows(BATCH_LOSSES)[0]
    assert (first.learning_rate, first.step) == (0.01, 0)
    assert record.metric(INITIAL_LOSS(model="vit-micro")).n == 16
    for name in ("figures/layers.png", "figures/one_batch.png", "config.json"):
        assert (checked / name).is_file()
    assert not (checked / "model.safetensors").exists()
    assert json.loads((checked / "results.json").read_text())["status"] == "done"


def test_its_sentences_are_backed_and_it_is_written_again(checked):
    record = read(read_run(checked))
    assert not list(unbacked(COMMANDS["train"].report(record)))
    before = (checked / "report.md").read_text()
    assert report(checked) == checked / "report.md"
    assert (checked / "report.md").read_text() == before


def test_a_failed_check_is_said_and_is_exit_code_1(tmp_path, capsys):
    line = (
        "train vit-micro --check --learning-rate 10 --dim 16 --depth 2 --heads 2 --patch-size 8 --limit 100 "
        f"--device cpu --out {tmp_path / 'out'}"
    )
    assert vitlens(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "out" / "report.md")
    assert "learning rate: The rate is too high: try --learning-rate 0.01." in captured.err
    assert "blocks.1.attn.qkv" in captured.err
    record = read(read_run(tmp_path / "out"))
    assert [row.name for row in record.rows(CHECKS) if row.state == "fail"] == ["learning rate"]
    assert not list(unbacked(COMMANDS["train"].report(record)))
    assert "**Learning rate failed**" in (tmp_path / "out" / "report.md").read_text()


def test_a_requirement_that_does_not_hold_is_exit_code_3(tmp_path):
    ended = check(tmp_path / "out", run=replace(OPTIONS, out=tmp_path / "out", at_least=("accuracy=0.9",)))
    assert (ended.holds, ended.code) == (False, 3)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"resume": Path("runs/a")}, "--resume"),
        ({"tuning": Tuning(compare=True)}, "--compare-frozen"),
        ({"teaching": TeacherOptions("cnn-digits")}, "--distill-from"),
        ({"keep_every": 1}, "--keep-every"),
        ({"track": ("tensorboard",)}, "--track"),
        ({"recompute": True}, "--recompute"),
        ({"compiling": "on"}, "--compile on"),
    ],
)
def test_what_it_has_no_use_for_is_refused(changes, option, tmp_path):
    with pytest.raises(InputError, match=f"expected --check without {option}, found both; leave one out"):
        check(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_broken_photographs_of_a_folder_are_found(tmp_path):
    for name, shade in (("black", 0), ("white", 255)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (32, 32), (shade,) * 3).save(tmp_path / "data" / name / f"{index}.png")
    ended = check(tmp_path / "out", data=str(tmp_path / "data"), run=replace(OPTIONS, out=tmp_path / "out", limit=None))
    rows = {row.name: row for row in read(read_run(tmp_path / "out")).rows(CHECKS)}
    assert (ended.holds, ended.code) == (False, 1)
    assert rows["constant images"].state == rows["duplicate images"].state == "fail"


def test_only_the_head_of_a_trained_model_is_checked(tmp_path):
    check(tmp_path / "out", model="vit-digits", shape=Shape(), tuning=Tuning(freeze=True))
    rows = {row.name: row for row in read(read_run(tmp_path / "out")).rows(CHECKS)}
    assert rows["frozen parameters"].state == "pass"
    assert rows["gradients"].expected == "a gradient other than 0 for 2 parameter tensors"
