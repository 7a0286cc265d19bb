"""Damaged, foreign and older folders: `vitlens report` and --resume refuse them or go on.

A refusal is one line with exit code 2. Nothing is read or written outside.
tests/fuzz/test_damage.py has many more.
"""

import json
import random
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitlens
from tests.kit.damage import damage_bytes, damaged, every, refused, served_or_refused
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.study.options import StudyOptions

SETTINGS = ("config.json", "results.json")
STATE = "checkpoint/state.safetensors"
TRAIN = (
    "train vit-mini --data digits --epochs 1 --limit 20 --batch-size 10 --dim 16 --depth 1 "
    "--heads 2"
)
QUIET = ["--quiet", "--device", "cpu"]
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
    "ablate": [
        ("config.json", ("identity",), []),
        ("config.json", ("data",), 3),
        ("results.json", ("tables",), 1),
    ],
    "attack": [("config.json", ("identity",), None), ("results.json", ("status",), "gone")],
}


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path
) -> dict[str, tuple[list[str], Path]]:
    """Return each command's line and a folder with all that a run needs to resume."""
    place = tmp_path_factory.mktemp("stopped")
    lines = {
        "train": TRAIN,
        "ablate": f"ablate {tiny_vit} --data digits --limit 8 --units head --no-curves --pairs 0 "
        "--no-patch",
        "attack": f"attack {tiny_vit} --data digits --limit 4 --steps 2 --attack fgsm --epsilon "
        "0,8 --no-corruptions",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.commands.run.progress.ProgressStore.forget", lambda _: None)
        for name, line in lines.items():
            assert run([*line.split(), *QUIET, "--out", str(place / name)]) == 0
    again = {name: line.split() for name, line in lines.items()} | {"train": ["train"]}
    return {name: ([*again[name], *QUIET], place / name) for name in lines}


def resumed(
    stopped: dict[str, tuple[list[str], Path]], name: str, folder: Path
) -> tuple[list[str], Path]:
    """Copy the folder of a stopped run and return the line that resumes it."""
    line, source = stopped[name]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return [*line, "--resume", str(folder)], folder


@pytest.mark.parametrize("name", USED)
def test_damaged_settings_are_not_resumed(stopped, tmp_path, capsys, name):
    for file, at, value in USED[name]:
        line, folder = resumed(stopped, name, tmp_path / "x")
        (folder / file).write_text(damaged(json.loads((folder / file).read_text()), at, value))
        assert refused(run(line), capsys.readouterr().err), (file, at)


def test_a_damaged_checkpoint_is_refused(stopped, tmp_path, capsys):
    line, folder = resumed(stopped, "train", tmp_path / "x")
    with safe_open(str(folder / STATE), framework="pt") as stored:
        about = json.loads(stored.metadata()["vitlens"])
    state = load_file(folder / STATE)
    for at, value in (
        (("step",), 10**12),
        (("step",), "x"),
        (("step",), 0),
        (("identity",), []),
        (("history",), []),
        (("history", 0, "epoch"), "x"),
    ):
        save_file(state, folder / STATE, metadata={"vitlens": damaged(about, at, value)})
        assert refused(run(line), capsys.readouterr().err), (at, value)
    nan = torch.full_like(state["model/head.bias"], float("nan"))
    cases: list[tuple[str, torch.Tensor | None]] = [
        ("model/head.weight", None),
        ("model/head.weight", torch.zeros(())),
        ("model/head.bias", nan),
        ("optimiser/head.weight/exp_avg", torch.zeros(0)),
        ("optimiser/head.weight/step", None),
        ("sums", torch.zeros(7)),
    ]
    for name, odd in cases:
        tensors = {key: value for key, value in state.items() if key != name} | (
            {} if odd is None else {name: odd}
        )
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
def test_links_are_not_resumed(stopped, tmp_path, capsys, name):
    line, folder = resumed(stopped, "attack" if name == "progress" else "train", tmp_path / "x")
    shutil.move(folder / name, tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    assert refused(run(line), capsys.readouterr().err)


def marked(folder: Path, command: str) -> Path:
    """Mark a folder as written by the command of that name of an earlier version."""
    content = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(content | {"schema": 1, "command": command}))
    return folder


def test_a_folder_of_an_earlier_schema_is_refused_with_what_to_type(stopped, tmp_path, capsys):
    resumable = {
        word
        for word, command in COMMANDS.items()
        if "resume" in {one.name for one in fields(command.options)}
    }
    # whose points are tests/golden/study/test_kinds.py's
    assert resumable == {
        *stopped,
        *USED,
        "study",
    }
    lines = {"study": ["study", "--kind", "pooling", *QUIET]} | {
        word: line for word, (line, _) in stopped.items()
    }
    for word, line in lines.items():
        folder = marked(Path(shutil.copytree(stopped["train"][1], tmp_path / word)), word)
        before = everything(folder)
        for words in (["report", str(folder)], [*line, "--resume", str(folder)]):
            code = run(words)
            said = capsys.readouterr().err
            assert refused(code, said)
            assert (
                f"make them again: vitlens {TRAIN}" if words[0] == "report" else "found schema 1"
            ) in said
            assert everything(folder) == before


def test_as_a_model_it_still_serves_and_its_training_images_are_not_known(
    stopped, tmp_path, pictures, capsys
):
    older = marked(Path(shutil.copytree(stopped["train"][1], tmp_path / "run")), "train")
    assert len(vitlens.load(str(older / "model.safetensors")).classes) == 10
    line = ["evaluate", str(older), "--device", "cpu", "--data"]
    assert run([*line, "digits", "--limit", "4", "--out", str(tmp_path / "out")]) == 0
    assert "not known" not in capsys.readouterr().err
    shutil.rmtree(older / "arrays")  # where they are listed
    for name in "01":
        shutil.copytree(pictures, tmp_path / "data" / name)
    assert run([*line, str(tmp_path / "data"), "--out", str(tmp_path / "other")]) == 0
    assert "not known" in capsys.readouterr().err


@pytest.fixture(scope="module")
def original(golden) -> Path:
    """Return a finished run whose alias is part of its file names."""
    return golden("evaluate").folder


@pytest.fixture(scope="module")
def predicted(golden) -> Path:
    """Return a finished run whose report is written quickly."""
    return golden("predict").folder


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / "place" / "run"))


@pytest.mark.parametrize(
    "alias", ["x/../../../../pwned", "../../pwned", "/tmp/pwned", "a/b", "..", "", "a\\u0000b"]
)
def test_an_alias_that_is_a_path_is_refused(original, tmp_path, capsys, alias):
    folder = copied(original, tmp_path)
    shutil.copy(folder / "arrays" / "predictions-vit-digits.npz", tmp_path / "pwned.npz")
    (folder / "arrays" / "predictions-x").mkdir()  # so that the path can be walked
    for name in SETTINGS:
        (folder / name).write_text((folder / name).read_text().replace("vit-digits", alias))
    before = everything(tmp_path)
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["figures", "arrays", "report.md", *SETTINGS, "figures/*"])
def test_a_link_is_neither_read_nor_written_through(original, tmp_path, capsys, name):
    folder = copied(original, tmp_path)
    outside = tmp_path / "outside"
    place = next(folder.glob(name))
    shutil.move(place, outside)
    place.symlink_to(outside)
    before = everything(tmp_path)
    again = ["predict", "vit-digits", "--limit", "2", "--out", str(folder), "--overwrite"]
    for line in (["report", str(folder)], again):
        assert run([*line, "--debug"]) == 2
        assert "no link" in capsys.readouterr().err
        assert everything(tmp_path) == before


@pytest.mark.parametrize("formats", [["../../x"], ["pgf"], "png", [1], None])
def test_formats_are_those_of_figures(predicted, tmp_path, capsys, formats):
    folder = copied(predicted, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"formats": formats}))
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alias", ""),  # as it is: read
        ("folder", "../outside"),
        ("folder", "."),
        ("folder", "/etc"),
        ("folder", "chapters/link"),
        ("word", "study"),
        ("word", "digests"),
        ("word", 3),
    ],
)
def test_a_chapter_lies_in_its_study(original, tmp_path, capsys, field, value):
    """A study's folder with a chapter whose field is this, and a run in chapters/evaluate and
    outside it.
    """
    folder = copied(original, tmp_path)
    read = field == "alias"
    shutil.copytree(original, folder / "chapters" / "evaluate")
    outside = shutil.copytree(original, tmp_path / "place" / "outside")
    if not read:
        (folder / "chapters" / "link").symlink_to(outside)
    config, results = (json.loads((folder / name).read_text()) for name in SETTINGS)
    chapter = {"word": "evaluate", "alias": "", "folder": "chapters/evaluate"} | {field: value}
    tables = {name: [] for name in COMMANDS["study"].contents.tables} | {"chapters": [chapter]}
    options = json.loads(json.dumps(asdict(StudyOptions(("vit-digits",))), default=str))
    (folder / "config.json").write_text(json.dumps(config | {"options": options}))
    (folder / "results.json").write_text(
        json.dumps(results | {"command": "study", "tables": tables})
    )
    code = run(["report", str(folder)])
    said = capsys.readouterr().err
    assert code == 0 if read else refused(code, said), said


@pytest.mark.parametrize("name", SETTINGS)
def test_damaged_words_and_numbers_are_told(predicted, tmp_path, capsys, name):
    content = json.loads((predicted / name).read_text())
    for at, value in random.Random(1).sample(every(content), 12):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        folder = copied(predicted, tmp_path / "x")
        (folder / name).write_text(text := damaged(content, at, value))
        assert served_or_refused(run(["report", str(folder)]), capsys.readouterr().err), text[:2000]
        assert {path.name for path in (*tmp_path.iterdir(), *folder.parent.iterdir())} == {
            "x",
            "run",
        }


@pytest.mark.filterwarnings("ignore")  # numpy casts the damaged arrays, complex ones too
def test_damaged_arrays_are_told(predicted, tmp_path, capsys):
    folder = copied(predicted, tmp_path)
    file = folder / "arrays" / "images.npz"
    for pixels in (
        np.zeros(0),
        np.array(1.0),
        np.zeros((2, 2), complex),
        np.array(["x"]),
        np.full((2, 3, 4, 4), np.nan),
    ):
        np.savez(file, pixels=pixels)
        assert served_or_refused(run(["report", str(folder)]), capsys.readouterr().err)
    np.savez(file, other=np.zeros(1))
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)
    for seed in range(4):
        shutil.copy(predicted / "arrays" / "images.npz", file)
        damage_bytes(file, random.Random(seed))
        assert served_or_refused(run(["report", str(folder)]), capsys.readouterr().err)


def test_a_fault_in_a_runs_own_report_is_no_fault_of_its_folder(
    tiny_vit, tmp_path, capsys, monkeypatch
):
    def failing(record):
        raise KeyError("ours")

    monkeypatch.setattr("vitlens.commands.predict.report.REPORT", failing)
    line = [
        "predict",
        str(tiny_vit),
        "--data",
        "digits",
        "--limit",
        "1",
        "--quiet",
        "--out",
        str(tmp_path / "x"),
    ]
    assert run(line) == 1
    assert "unexpected KeyError" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "x")]) == 2


def test_a_folder_in_the_place_of_the_report_is_named_as_such(golden, tmp_path, capsys):
    folder = Path(shutil.copytree(golden("ablate").folder, tmp_path / "run"))
    (folder / "report.md").unlink()
    (folder / "report.md").mkdir()
    assert run(["report", str(folder)]) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert "--out" not in message  # which `report` does not have


def test_contents_of_another_command_are_refused_without_an_error_of_python(
    golden, tmp_path, capsys
):
    folder = Path(shutil.copytree(golden("ablate").folder, tmp_path / "run"))
    results = json.loads((folder / "results.json").read_text())
    tables = json.loads((golden("evaluate").folder / "results.json").read_text())["tables"]
    (folder / "results.json").write_text(json.dumps({**results, "tables": tables}))
    assert run(["report", str(folder)]) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert "Error" not in message.removeprefix("error: ")
