"""A folder of an earlier schema: refused by `report` and --resume with what to type; as a MODEL it still serves."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import vitlens
from tests.kit.damage import refused
from tests.kit.training_runs import train
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.load import load_split
from vitlens.commands.run.options import RunOptions
from vitlens.commands.shared.trainings import Budget, budget_of

LINE = "vitlens train vit-micro --epochs 1 --dim 8"
OPTIONS = RunOptions(device="cpu", quiet=True, limit=20, command=LINE)
RESUMED = [word for word, command in COMMANDS.items() if "resume" in {field.name for field in fields(command.options)}]
BEFORE = {"train": [], "study": ["--kind", "pooling"]}  # what stands before --resume, for the others a model


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training, marked as one of schema 1."""
    place = tmp_path_factory.mktemp("older") / "older"
    shape = {"dim": 8, "depth": 1, "heads": 2, "patch_size": [8, 8]}
    train("vit-micro", shape=shape, recipe={"epochs": 1}, options=replace(OPTIONS, out=place))
    return marked(place, "train")


def marked(folder: Path, command: str) -> Path:
    """The same folder as one that an earlier version's command of that word wrote."""
    content = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(content | {"schema": 1, "command": command}))
    return folder


def test_the_report_is_refused_with_the_command_that_makes_it_again(older, capsys):
    assert run(["report", str(older)]) == 2
    said = capsys.readouterr().err
    assert refused(2, said)
    assert "found schema 1" in said
    assert said.endswith(f"make them again: {LINE}\n")


@pytest.mark.parametrize("word", RESUMED)
def test_no_command_goes_on_in_it(older, tmp_path, capsys, word, tiny_vit):
    folder = marked(Path(shutil.copytree(older, tmp_path / "run")), word)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    line = [word, *BEFORE.get(word, [str(tiny_vit), "--data", "digits", "--limit", "4"])]
    code, said = run([*line, "--device", "cpu", "--quiet", "--resume", str(folder)]), capsys.readouterr().err
    assert refused(code, said)
    assert "found schema 1" in said
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_as_a_model_it_still_serves(older, file):
    model = vitlens.load(str(older / file))
    assert model(torch.zeros(1, 3, *model.input_size)).shape == (1, 10)
    assert budget_of(model) == Budget(model.alias)
    assert len(load_split(model, options=OPTIONS, data="digits")) == 20


def test_commands_take_it_as_a_model(older, tmp_path):
    line = ["evaluate", str(older), "cnn-digits", "--data", "digits", "--limit", "4", "--device", "cpu", "--quiet"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0


def test_its_training_images_are_not_known_where_it_does_not_list_them(older, tmp_path, pictures):
    folder = Path(shutil.copytree(older, tmp_path / "run"))
    shutil.rmtree(folder / "arrays")
    data = tmp_path / "data"
    for name in "01":
        shutil.copytree(pictures, data / name)
    split = load_split(vitlens.load(str(folder)), options=OPTIONS, data=str(data))
    assert len(split)
    assert "not known" in split.notes[0]
