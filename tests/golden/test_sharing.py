"""A folder to send on holds the same numbers and no path of the machine that made it."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.report.escape import without_machine_paths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/photos/cat.jpg", "photos/cat.jpg"),
        ("/home/ann/my photos/cat 1.jpg", "my photos/cat 1.jpg"),
        ("vitlens look /home/ann/cat.jpg --model timm:deit@/srv/w/deit.pth --out=/tmp/x/y", None),
        ("~/photos/2026/cat.jpg", "2026/cat.jpg"),
        ("C:\\Users\\ann\\photos\\cat.jpg", "photos/cat.jpg"),
        ("https://arxiv.org/abs/2005.00928", "https://arxiv.org/abs/2005.00928"),
        ("accuracy/vit/L3.H7", "accuracy/vit/L3.H7"),
        ("photos/cat.jpg", "photos/cat.jpg"),
        ("8/255 and 1/255", "8/255 and 1/255"),
        ("insertion - deletion", "insertion - deletion"),
    ],
)
def test_paths_are_shortened_and_nothing_else(text: str, shown: str | None) -> None:
    expected = "vitlens look ann/cat.jpg --model timm:deit@w/deit.pth --out=x/y" if shown is None else shown
    assert without_machine_paths(text) == expected


def test_the_copy_has_the_numbers_and_no_path(tmp_path: Path) -> None:
    photos, own, copy = tmp_path / "my photos", tmp_path / "run", tmp_path / "copy"
    photos.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"photo {index}.png")
    line = ["rollout", "vit-digits", "--images", str(photos), "--out", str(own), "--quiet"]
    assert run(line) == 0
    assert str(tmp_path) in (own / "config.json").read_text()
    before = (own / "config.json").read_bytes()
    assert run(["report", str(own), "--share", str(copy), "--html"]) == 0
    assert (own / "config.json").read_bytes() == before
    assert (copy / "report.md").is_file()
    assert (copy / "report.html").is_file()
    assert list((copy / "figures").iterdir())
    assert read_folder(copy).tables.keys() == read_folder(own).tables.keys()
    names = (str(tmp_path), str(Path.home()), os.sep + "tmp" + os.sep)
    for path in copy.rglob("*"):
        if path.suffix in (".json", ".md", ".html", ".csv"):
            assert not [name for name in names if name in path.read_text()], path
    assert "photo 1.png" in (copy / "tables" / "shown.csv").read_text()


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "run"
    assert run(["predict", "vit-digits", "--limit", "2", "--out", str(own), "--quiet"]) == 0
    assert run(["report", str(own), "--share", str(own / "copy")]) == 2
    assert "outside" in capsys.readouterr().err
    assert run(["report", str(own), "--share", str(tmp_path)]) == 2  # it is not empty
    assert run(["report", str(tmp_path), "--share", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
