"""`vitlens report` on folders of others: nothing is read or written outside, damage is one line, exit 2."""

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.kit.damage import damage_bytes, damaged, every, refused, served_or_refused
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.study.options import StudyOptions

SETTINGS = ("config.json", "results.json")


@pytest.fixture(scope="module")
def made(golden) -> Path:
    """A finished run whose alias stands in names of files."""
    return golden("evaluate").folder


@pytest.fixture(scope="module")
def predicted(golden) -> Path:
    """A finished run that is quick to tell again."""
    return golden("predict").folder


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / "place" / "run"))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("alias", ["x/../../../../pwned", "../../pwned", "/tmp/pwned", "a/b", "..", "", "a\\u0000b"])
def test_an_alias_that_is_a_path_is_refused(made, tmp_path, capsys, alias):
    folder = copied(made, tmp_path)
    shutil.copy(folder / "arrays" / "predictions-vit-digits.npz", tmp_path / "pwned.npz")
    (folder / "arrays" / "predictions-x").mkdir()  # so that the path can be walked
    for name in SETTINGS:
        (folder / name).write_text((folder / name).read_text().replace("vit-digits", alias))
    before = everything(tmp_path)
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["figures", "arrays", "report.md", *SETTINGS, "figures/*"])
def test_a_link_is_neither_read_nor_written_through(made, tmp_path, capsys, name):
    folder, outside = copied(made, tmp_path), tmp_path / "outside"
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


CHAPTER = {"word": "evaluate", "alias": "", "folder": "chapters/evaluate"}


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, True),
        ({"folder": "../outside"}, False),
        ({"folder": "."}, False),
        ({"folder": "/etc"}, False),
        ({"folder": "chapters/link"}, False),
        ({"word": "study"}, False),
        ({"word": "digests"}, False),
        ({"word": 3}, False),
    ],
)
def test_a_chapter_lies_in_its_study(made, tmp_path, capsys, changes, read):
    """A study's folder with a chapter of these fields, and a run in chapters/evaluate and outside it."""
    folder = copied(made, tmp_path)
    shutil.copytree(made, folder / "chapters" / "evaluate")
    outside = shutil.copytree(made, tmp_path / "place" / "outside")
    (folder / "chapters" / "link").symlink_to(outside)
    config, results = (json.loads((folder / name).read_text()) for name in SETTINGS)
    tables = {name: [] for name in COMMANDS["study"].contents.tables} | {"chapters": [CHAPTER | changes]}
    options = json.loads(json.dumps(asdict(StudyOptions(("vit-digits",))), default=str))
    (folder / "config.json").write_text(json.dumps(config | {"options": options}))
    (folder / "results.json").write_text(json.dumps(results | {"command": "study", "tables": tables}))
    if read:
        (folder / "chapters" / "link").unlink()
    code, said = run(["report", str(folder)]), capsys.readouterr().err
    assert code == 0 if read else refused(code, said), said


@pytest.mark.parametrize("name", SETTINGS)
def test_damaged_words_and_numbers_are_told(predicted, tmp_path, capsys, name):
    """Many more: tests/fuzz/test_damage.py."""
    content = json.loads((predicted / name).read_text())
    for at, value in random.Random(1).sample(every(content), 12):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        folder = copied(predicted, tmp_path / "x")
        (folder / name).write_text(text := damaged(content, at, value))
        assert served_or_refused(run(["report", str(folder)]), capsys.readouterr().err), text[:2000]
        assert {path.name for path in (*tmp_path.iterdir(), *folder.parent.iterdir())} == {"x", "run"}


@pytest.mark.filterwarnings("ignore")  # numpy casts the damaged arrays, complex ones too
def test_damaged_arrays_are_told(predicted, tmp_path, capsys):
    folder = copied(predicted, tmp_path)
    file = folder / "arrays" / "images.npz"
    odd = (np.zeros(0), np.array(1.0), np.zeros((2, 2), complex), np.array(["x"]), np.full((2, 3, 4, 4), np.nan))
    for pixels in odd:
        np.savez(file, pixels=pixels)
        assert served_or_refused(run(["report", str(folder)]), capsys.readouterr().err)
    np.savez(file, other=np.zeros(1))
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)
    for seed in range(4):
        shutil.copy(predicted / "arrays" / "images.npz", file)
        damage_bytes(file, random.Random(seed))
        assert served_or_refused(run(["report", str(folder)]), capsys.readouterr().err)


def test_a_fault_in_a_runs_own_report_is_no_fault_of_its_folder(tiny_vit, tmp_path, capsys, monkeypatch):
    def failing(record):
        raise KeyError("ours")

    monkeypatch.setattr("vitlens.commands.predict.report.REPORT", failing)
    line = ["predict", str(tiny_vit), "--data", "digits", "--limit", "1", "--quiet", "--out", str(tmp_path / "x")]
    assert run(line) == 1
    assert "unexpected KeyError" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "x")]) == 2
