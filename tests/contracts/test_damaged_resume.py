"""--resume of folders whose files were damaged, or written by others: one line and exit code 2, or the run goes on.

Many more of them: tests/fuzz/test_damage.py."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.kit.damage import damaged, refused
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS

STATE = "checkpoint/state.safetensors"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path) -> dict[str, tuple[list[str], Path]]:
    """For each command its line and a folder with all that a run needs to go on."""
    place = tmp_path_factory.mktemp("stopped")
    lines = {
        "train": "train vit-mini --data digits --epochs 1 --limit 20 --batch-size 10 --dim 16 --depth 1 --heads 2",
        "ablate": f"ablate {tiny_vit} --data digits --limit 8 --units head --no-curves --pairs 0 --no-patch",
        "attack": f"attack {tiny_vit} --data digits --limit 4 --steps 2 --attack fgsm --epsilon 0,8 --no-corruptions",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.commands.run.progress.ProgressStore.forget", lambda _: None)
        for name, line in lines.items():
            assert run([*line.split(), "--quiet", "--device", "cpu", "--out", str(place / name)]) == 0
    again = {name: line.split() for name, line in lines.items()} | {"train": ["train"]}
    return {name: ([*again[name], "--quiet", "--device", "cpu"], place / name) for name in lines}


def resumed(stopped: dict[str, tuple[list[str], Path]], name: str, folder: Path) -> tuple[list[str], Path]:
    """A fresh copy, and the line that goes on in it."""
    line, source = stopped[name]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return [*line, "--resume", str(folder)], folder


def test_every_command_that_is_resumed_is_here(stopped):
    resumable = {
        word for word, command in COMMANDS.items() if "resume" in {one.name for one in fields(command.options)}
    }
    assert resumable == {*stopped, *USED, "study"}  # whose points are tests/golden/study/test_kinds.py's


# what is sure to be used, so that damage cannot be harmless
USED = {
    "train": [
        ("config.json", ("options", "model"), []),
        ("config.json", ("options", "shape", "image_size"), [0]),
        ("config.json", ("options", "run", "seed"), "x"),
        ("config.json", ("options", "tuning"), 3),
        ("config.json", ("options", "run", "data_dir"), None),
        ("config.json", ("recipe",), {}),
        ("config.json", ("models",), "MISSING!"),
        ("results.json", ("metrics",), []),
        ("results.json", ("seconds",), -1),
    ],
    "ablate": [("config.json", ("identity",), []), ("config.json", ("data",), 3), ("results.json", ("tables",), 1)],
    "attack": [("config.json", ("identity",), None), ("results.json", ("status",), "gone")],
}


@pytest.mark.parametrize("name", USED)
def test_damaged_settings_are_refused(stopped, tmp_path, capsys, name):
    for file, at, value in USED[name]:
        line, folder = resumed(stopped, name, tmp_path / "x")
        (folder / file).write_text(damaged(json.loads((folder / file).read_text()), at, value))
        assert refused(run(line), capsys.readouterr().err), (file, at)


def description(file: Path) -> dict:
    with safe_open(str(file), framework="pt") as stored:
        return json.loads(stored.metadata()["vitlens"])


def test_a_damaged_checkpoint_is_refused(stopped, tmp_path, capsys):
    line, folder = resumed(stopped, "train", tmp_path / "x")
    about, state = description(folder / STATE), load_file(folder / STATE)
    changes = [
        (("step",), 10**12), (("step",), "x"), (("step",), 0), (("identity",), []), (("history",), []),
        (("history", 0, "epoch"), "x"),
    ]  # fmt: skip
    for at, value in changes:
        save_file(state, folder / STATE, metadata={"vitlens": damaged(about, at, value)})
        assert refused(run(line), capsys.readouterr().err), (at, value)
    cases: list[tuple[str, torch.Tensor | None]] = [
        ("model/head.weight", None),
        ("model/head.weight", torch.zeros(())),
        ("model/head.bias", torch.full_like(state["model/head.bias"], float("nan"))),
        ("optimiser/head.weight/exp_avg", torch.zeros(0)),
        ("optimiser/head.weight/step", None),
        ("sums", torch.zeros(7)),
    ]
    for name, odd in cases:
        tensors = {key: value for key, value in state.items() if key != name}
        tensors |= {} if odd is None else {name: odd}
        save_file(tensors, folder / STATE, metadata={"vitlens": json.dumps(about)})
        assert refused(run(line), capsys.readouterr().err), (name, odd)


@pytest.mark.parametrize("name", ["ablate", "attack"])
def test_damaged_progress_is_refused(stopped, tmp_path, capsys, name):
    line, folder = resumed(stopped, name, tmp_path / "x")
    file = next((folder / "progress").iterdir())
    with np.load(file) as stored:
        good = dict(stored)
    odds = (None, np.array(1.0), np.zeros((2, 2), complex), np.zeros((1,) * 5), np.array(["x"] * 3))
    for key, odd in zip(good, odds):
        rest = {other: value for other, value in good.items() if other != key}
        np.savez(file, **rest if odd is None else rest | {key: odd})
        assert refused(run(line), capsys.readouterr().err), (key, odd)
    file.write_bytes(file.read_bytes()[:50])
    assert refused(run(line), capsys.readouterr().err)


@pytest.mark.parametrize("name", ["checkpoint", "progress", "arrays", "metrics.jsonl"])
def test_links_are_refused(stopped, tmp_path, capsys, name):
    line, folder = resumed(stopped, "attack" if name == "progress" else "train", tmp_path / "x")
    shutil.move(folder / name, tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    assert refused(run(line), capsys.readouterr().err)
