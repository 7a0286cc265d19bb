"""A folder of an earlier schema: refused by `report` and --resume with what to type; as a MODEL it still serves."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

import vitlens
from tests.kit.damage import refused
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS

TRAIN = "train vit-micro --epochs 1 --dim 8 --depth 1 --heads 2 --patch-size 8 --limit 20 --device cpu --quiet"
RESUMED = [word for word, command in COMMANDS.items() if "resume" in {field.name for field in fields(command.options)}]
BEFORE = {"train": [], "study": ["--kind", "pooling"]}  # what stands before --resume, for the others a model


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training, marked as one of schema 1."""
    place = tmp_path_factory.mktemp("older") / "older"
    assert run([*TRAIN.split(), "--out", str(place)]) == 0
    return marked(place, "train")


def marked(folder: Path, command: str) -> Path:
    """The same folder as one that an earlier version's command of that word wrote."""
    content = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(content | {"schema": 1, "command": command}))
    return folder


def test_the_report_is_refused_with_the_command_that_makes_it_again(older, capsys):
    code, said = run(["report", str(older)]), capsys.readouterr().err
    assert refused(code, said)
    assert f"make them again: vitlens {TRAIN}" in said


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
def test_as_a_model_it_still_serves(older, tmp_path, file):
    assert len(vitlens.load(str(older / file)).classes) == 10
    line = ["evaluate", str(older / file), "--data", "digits", "--limit", "4", "--device", "cpu", "--quiet"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0


def test_its_training_images_are_not_known_where_it_does_not_list_them(older, tmp_path, pictures, capsys):
    folder = Path(shutil.copytree(older, tmp_path / "run"))
    shutil.rmtree(folder / "arrays")
    for name in "01":
        shutil.copytree(pictures, tmp_path / "data" / name)
    assert run(["evaluate", str(folder), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]) == 0
    assert "not known" in capsys.readouterr().err
