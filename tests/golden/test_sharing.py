"""A folder to send on holds the same numbers and no path of the machine that made it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.kit.commands import refusal
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder

TEXTS = {  # what a note of a run may say, and what the copy says
    "/home/ann/photos/cat.jpg": "photos/cat.jpg",
    "/home/ann/my photos/cat 1.jpg": "my photos/cat 1.jpg",
    "vitlens look /home/ann/cat.jpg --model timm:deit@/srv/w/deit.pth --out=/tmp/x/y":
        "vitlens look ann/cat.jpg --model timm:deit@w/deit.pth --out=x/y",
    "~/photos/2026/cat.jpg": "2026/cat.jpg",
    "C:\\Users\\ann\\photos\\cat.jpg": "photos/cat.jpg",
    **{text: text for text in (
        "https://arxiv.org/abs/2005.00928", "accuracy/vit/L3.H7", "photos/cat.jpg", "8/255 and 1/255",
        "insertion - deletion",
    )},
}  # fmt: skip


@pytest.fixture(scope="module")
def own(pictures: Path, tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on photographs in a folder whose name has a space."""
    root = tmp_path_factory.mktemp("sharing")
    photos = Path(shutil.copytree(pictures, root / "my photos"))
    line = ["rollout", str(tiny_vit), "--images", str(photos), "--fusion", "mean", "--quiet", "--device", "cpu"]
    assert run([*line, "--out", str(root / "run")]) == 0
    return root / "run"


def test_the_copy_has_the_numbers_and_no_path(own, tmp_path):
    copy, place = tmp_path / "copy", str(own.parent)
    assert place in (own / "config.json").read_text()
    before = (own / "config.json").read_bytes()
    assert run(["report", str(own), "--share", str(copy), "--html"]) == 0
    assert (own / "config.json").read_bytes() == before
    assert (copy / "report.md").is_file()
    assert (copy / "report.html").is_file()
    assert list((copy / "figures").iterdir())
    assert read_folder(copy).tables.keys() == read_folder(own).tables.keys()
    assert read_folder(copy).metrics == read_folder(own).metrics
    names = (place, str(Path.home()), os.sep + "tmp" + os.sep)
    for path in copy.rglob("*"):
        if path.suffix in (".json", ".md", ".html", ".csv"):
            assert not [name for name in names if name in path.read_text()], path
    assert "my photos/1.png" in (copy / "tables" / "shown.csv").read_text()


def test_paths_are_shortened_and_nothing_else(own, tmp_path):
    changed = Path(shutil.copytree(own, tmp_path / "run"))
    config = json.loads((changed / "config.json").read_text())
    config["data"]["notes"] = list(TEXTS)
    (changed / "config.json").write_text(json.dumps(config))
    assert run(["report", str(changed), "--share", str(tmp_path / "copy")]) == 0
    shown = json.loads((tmp_path / "copy" / "config.json").read_text())["data"]["notes"]
    assert shown == list(TEXTS.values())


def test_a_copy_goes_outside_into_a_new_folder(own, tmp_path, capsys):
    (tmp_path / "full" / "there").mkdir(parents=True)
    assert "outside" in refusal(capsys, f"report {own} --share {own / 'copy'}")
    refusal(capsys, f"report {own} --share {tmp_path / 'full'}")
    refusal(capsys, f"report {tmp_path} --share {tmp_path / 'new'}")
    assert not (tmp_path / "new").exists()
