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
from vitlens.files import write_json


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
    for name in ("config.json", "results.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("vit-digits", alias))
    before = everything(tmp_path)
    code = run(["report", str(folder)])
    assert refused(code, capsys.readouterr().err)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["figures", "arrays", "report.md", "results.json", "config.json", "figures/one.png"])
def test_a_link_is_neither_read_nor_written_through(made, tmp_path, capsys, name):
    folder, outside = copied(made, tmp_path), tmp_path / "outside"
    place = folder / name
    if not place.exists():
        place = next((folder / "figures").iterdir())
    shutil.move(place, outside)
    place.symlink_to(outside)
    before = everything(tmp_path)
    for line in (
        ["report", str(folder)],
        ["predict", "vit-digits", "--limit", "2", "--out", str(folder), "--overwrite"],
    ):
        code = run([*line, "--debug"])
        assert code == 2, name
        assert "no link" in capsys.readouterr().err
        assert everything(tmp_path) == before


@pytest.mark.parametrize("formats", [["../../x"], ["pgf"], "png", [1], None])
def test_formats_are_those_of_figures(predicted, tmp_path, capsys, formats):
    folder = copied(predicted, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"formats": formats}))
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)


def study_of(source: Path, folder: Path, *chapters: object) -> Path:
    """A study's folder with these chapters, and a run in chapters/evaluate and outside it."""
    place = copied(source, folder)
    shutil.copytree(source, place / "chapters" / "evaluate")
    shutil.copytree(source, folder / "place" / "outside")
    config, results = (json.loads((place / name).read_text()) for name in ("config.json", "results.json"))
    tables = {name: [] for name in COMMANDS["study"].contents.tables} | {"chapters": chapters}
    write_json(place / "config.json", config | {"options": asdict(StudyOptions(("vit-digits",)))})
    write_json(place / "results.json", results | {"command": "study", "tables": tables})
    return place


def test_a_chapter_in_its_study_is_read(made, tmp_path, capsys):
    chapter = {"word": "evaluate", "alias": "", "folder": "chapters/evaluate"}
    assert run(["report", str(study_of(made, tmp_path, chapter))]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "chapter",
    [
        {"word": "evaluate", "alias": "", "folder": "../outside"},
        {"word": "evaluate", "alias": "", "folder": "."},
        {"word": "evaluate", "alias": "", "folder": "/etc"},
        {"word": "study", "alias": "", "folder": "chapters/evaluate"},
        {"word": "digests", "alias": "", "folder": "chapters/evaluate"},
        {"word": "evaluate", "alias": "", "folder": "chapters/link"},
        {"word": 3},
    ],
)
def test_a_chapter_lies_in_its_study(made, tmp_path, capsys, chapter):
    folder = study_of(made, tmp_path, chapter)
    if chapter.get("folder") == "chapters/link":
        (folder / "chapters" / "link").symlink_to(tmp_path / "place" / "outside")
    assert refused(run(["report", str(folder)]), capsys.readouterr().err)


def check_report(source: Path, folder: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    place = copied(source, folder)
    (place / name).write_text(text)
    beside = set(folder.parent.iterdir())
    code = run(["report", str(place)])
    assert served_or_refused(code, capsys.readouterr().err), text[:2000]
    assert set(folder.parent.iterdir()) == beside
    assert [path.name for path in (folder / "place").iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["config.json", "results.json"])
def test_damaged_words_and_numbers_are_told(predicted, tmp_path, capsys, name):
    content = json.loads((predicted / name).read_text())
    for at, value in random.Random(1).sample(every(content), 12):
        check_report(predicted, tmp_path / "x", name, damaged(content, at, value), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "results.json"])
@pytest.mark.parametrize("kind", ["predicted", "made"])
def test_many_damaged_words_and_numbers_are_told(kind, tmp_path, capsys, name, request):
    source = request.getfixturevalue(kind)
    content = json.loads((source / name).read_text())
    for at, value in random.Random(2).sample(every(content), 100):
        check_report(source, tmp_path / "x", name, damaged(content, at, value), capsys)


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


def test_a_fault_in_a_runs_own_report_is_no_fault_of_its_folder(tiny_vit, tmp_path, capsys, monkeypatch):
    import vitlens.commands.predict.report as module

    def failing(record):
        raise KeyError("ours")

    monkeypatch.setattr(module, "REPORT", failing)
    line = ["predict", str(tiny_vit), "--data", "digits", "--limit", "1", "--quiet", "--out", str(tmp_path / "x")]
    assert run(line) == 1
    assert "unexpected KeyError" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "x")]) == 2
