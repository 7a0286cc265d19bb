"""--model-file FILE.py:FUNCTION: the user's code runs only where the option names it."""

import json
import sys
from pathlib import Path

import pytest
import torch

import vitlens
from tests.kit.models.files import one_line, written
from vitlens.cli.main import run
from vitlens.errors import InputError

CODE = (Path(__file__).parents[2] / "kit" / "models" / "code_file.py").read_text()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change into a folder with my.py and a module that it imports."""
    (tmp_path / "my.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("NAME = 'vit-digits'\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("neighbour", None)


def load(name, **more):
    return vitlens.load(name, code_files=(name,), **more)


def state(model):
    return model.module.state_dict()


def test_the_function_s_model_under_its_own_name(here, capsys):
    model = load("my.py:vit")
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(model(images), vitlens.load("vit-digits")(images))
    assert (model.alias, model.provenance.name, model.provenance.weights) == (
        "vit",
        "my.py:vit",
        "my.py",
    )
    assert "code was run" in "\n".join(model.provenance.notes)
    assert str(here) not in sys.path
    # the code runs once, and is read again when it changes
    assert load("./my.py:cnn").alias == "cnn"
    assert capsys.readouterr() == ("", "to stderr\n")
    (here / "my.py").write_text(CODE + "NAME = 1\n")
    load("my.py:vit")
    assert capsys.readouterr().err == "to stderr\n"


def test_the_hash_is_that_of_the_weights_and_not_of_the_code(here):
    first = load("my.py:small", seed=0)
    again = load("my.py:small", seed=0)
    other = load("my.py:small", seed=1)
    assert first.provenance.sha256 == again.provenance.sha256
    assert first.provenance.sha256 != other.provenance.sha256
    code = first.architecture["overrides"]["code_sha256"]
    assert code == other.architecture["overrides"]["code_sha256"]


def test_random_weights_follow_the_seed_and_the_callers_random_state_is_kept(here):
    before = torch.random.get_rng_state()
    first = load("my.py:small", seed=0).module.head.weight
    second = load("my.py:small", seed=1).module.head.weight
    again = load("my.py:small", seed=0).module.head.weight
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


ERRORS = {
    "none.py:vit": "none.py",
    "my.py:vti": "it has vit",
    "my.py:number": "a function number",
    "my.py:needs": "'argument'",
    "my.py:raises": "KeyError: 'two",
    "my.py:exits": "SystemExit: 0",
    "my.py:module": r"return vitlens\.wrap",
    "my.py:unfit": r"30x30 px.* \(in my\.py:unfit\)",
    "my.py:unknown": "'vit-digits'",
    "my.py": "FILE.py:FUNCTION",
    "broken.py:vit": "SyntaxError",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line(here, name):
    (here / "broken.py").write_text("def vit(:\n")
    with one_line(InputError, ERRORS[name]):
        load(name)


def test_code_is_run_only_where_the_option_names_it_and_decides_weights_and_size(here):
    (here / "my.py").write_text("raise SystemError('run')")
    for allowed in ((), ("my.py:other",), ("your.py:vit",)):
        with pytest.raises(InputError, match=r"code_files=\('my\.py:vit',\)"):
            vitlens.load("my.py:vit", code_files=allowed)
    for more in (
        {"weights": "w.safetensors"},
        {"random_weights": True},
        {"image_size": 64},
        {"mean": (0.5,) * 3},
    ):
        with pytest.raises(InputError, match="leave"):
            load("my.py:vit", **more)


def test_the_option_names_the_model(here, capsys):
    for line in ("--model-file my.py:vit", "own=my.py:vit --model-file=own=my.py:vit"):
        assert run(["predict", *line.split(), "--limit", "2", "--quiet"]) == 0
        assert capsys.readouterr().out.startswith("image 0: ")


REFUSED = {
    "predict my.py:vit": "--model-file my.py:vit",
    "predict vit-digits --model-file my.py:vit": "expected MODEL my.py:vit",
    "predict --model-file my.py:vit --model-file my.py:cnn": "found 2",
    "train --model-file my.py:headless": "a linear layer",
}


@pytest.mark.parametrize("line", REFUSED)
def test_lines_that_are_refused(here, line, capsys):
    assert run(line.split()) == 2
    error = capsys.readouterr().err
    assert REFUSED[line] in error
    assert error.removeprefix("to stderr\n").count("\n") == 1


def trained(line, here, name):
    assert (
        run(
            [
                "train",
                "--model-file",
                "my.py:small",
                *line.split(),
                "--batch-size",
                "32",
                "--out",
                name,
            ]
        )
        == 0
    )
    return vitlens.load(str(here / name), code_files=("my.py:small",))


def test_a_module_is_trained_and_its_folder_is_a_model(here, capsys):
    model = trained("--epochs 1 --limit 16 --quiet", here, "run")
    images = torch.rand(3, 3, 32, 32)
    assert (model.classes, model.anatomy.family) == (tuple("0123456789"), "vit")
    assert "code was run" in "\n".join(model.provenance.notes)
    folder = str(written(model, here / "again"))
    assert torch.equal(
        model(images), vitlens.load(folder, code_files=("no/none.py:x", "./my.py:small"))(images)
    )
    (here / "in").mkdir()
    (here / "in" / "my.py").write_text(CODE)
    renamed = vitlens.load(folder, code_files=("m=in/my.py:small",))
    assert torch.equal(model(images), renamed(images))
    for more in ({"image_size": 64}, {"random_weights": True}):
        with pytest.raises(InputError):
            vitlens.load(folder, code_files=("my.py:small",), **more)
    line = "evaluate run cnn-digits --model-file my.py:small --limit 16 --out judged --quiet"
    assert run(line.split()) == 0
    before = json.loads((here / "run" / "results.json").read_text())["metrics"]
    after = json.loads((here / "judged" / "results.json").read_text())["metrics"]
    assert after["accuracy/run"]["value"] == before["accuracy/small"]["value"]
    config = json.loads((here / "judged" / "config.json").read_text())
    assert config["options"]["model_options"]["model_file"] == ["my.py:small"]
    assert [model["alias"] for model in config["models"]] == ["run", "cnn-digits"]
    capsys.readouterr()
    assert run(["evaluate", "run", "--limit", "9"]) == 2
    assert "--model-file with my.py:small" in capsys.readouterr().err
    for note in model.provenance.notes:
        assert "has changed" not in note
    (here / "my.py").write_text(CODE + "\n# changed\n")
    changed = vitlens.load(str(here / "run"), code_files=("my.py:small",))
    assert "has changed since the weights were saved" in "\n".join(changed.provenance.notes)


def test_a_part_of_a_module_is_trained_and_the_training_resumed(here):
    complete = trained("--epochs 2 --limit 16 --quiet --train-last 1", here, "whole")
    trained_state = state(complete)
    original_state = state(load("my.py:small"))
    changed = {
        name
        for name, value in trained_state.items()
        if not torch.equal(value, original_state.get(name, value))
    }
    assert trained_state["head.weight"].any()
    for name in changed:
        assert name.startswith(("head.", "blocks.1.")) or name == "again.weight"
    assert run(["train", "--resume", "whole", "--model-file", "my.py:small", "--quiet"]) == 0
    again = vitlens.load(str(here / "whole"), code_files=("my.py:small",))
    for name, value in state(again).items():
        assert torch.equal(trained_state[name], value)
