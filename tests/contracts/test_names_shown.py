"""Folders, files and classes of any name: reports, figures and the terminal only show them."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.kit.making import little_vit, save
from tests.kit.marks import slow_except
from tests.kit.nasty import NASTY, cells, problems
from tests.kit.pages import page_problems
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.record import read_run


def on_disk(name: str) -> bool:
    """Return True if a folder and a file can have the name without being hidden."""
    return (
        bool(name)
        and "/" not in name
        and name[0] not in "._"
        and len(os.fsencode(f"{name}.png")) < 256
    )


CLASSES = tuple(sorted({name for name in NASTY if on_disk(name)}))
QUICK = ("look", "predict", "evaluate", "attention", "explain")
SMALL = {  # what makes a command short; another one is given four images
    "look": "--limit 20",
    "predict": "--limit 20",
    "evaluate": "--limit 20",
    "attention": "--limit 2",
    "explain": "--method gradcam --limit 2",
    "rollout": "--limit 5",
    "attack": "--attack fgsm --epsilon 4 --limit 8",
    "ablate": "--limit 8",
    "compare": "--method gradcam --limit 8",
    "features": "--limit 20 --no-tsne --no-cache --k 1",
    "profile": "--batch-sizes 1 --sizes 16,32",
    "audit": "--limit 8 --budget 0.2",
    "head": "L0.H0 --limit 8",
    "sae": "--expansion 1 --k 4 --tokens 200",
    "explain --auto": "--method gradcam,saliency --limit 24",
    "explain --verify": "--method gradcam,rollout --limit 4",
}
# take more than one trained model (a study shows what the others do); the page of the demo is
# tests/ui/demo's
APART = (
    "train",
    "study",
    "reversal",
    *(word for word, command in COMMANDS.items() if command.serves),
)
WORDS = [word for word, command in COMMANDS.items() if command.reports and word not in APART]
LINES = {
    word: SMALL.get(word, "--limit 4") for word in (*WORDS, "explain --auto", "explain --verify")
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model with such class names and a folder with a test image of each class."""
    folder = tmp_path_factory.mktemp("odd")
    model = folder / "[a](b) <i>m`$"
    data = folder / "da|ta ![x](y)\x1b[31m"
    save(little_vit(CLASSES), model / "model.safetensors")
    pixels = np.random.default_rng(0).integers(0, 255, (len(CLASSES), 32, 32, 3), np.uint8)
    for name, image in zip(CLASSES, pixels):
        place = data / "test" / name
        place.mkdir(parents=True)
        Image.fromarray(image).save(place / f"{name}.png")
    return model, data


@pytest.mark.parametrize(
    "command",
    slow_except(LINES, QUICK),
)
def test_a_command_only_shows_names(command, odd, tmp_path, capsys):
    model, data = odd
    word, *options = f"{command} {LINES[command]}".split()
    models = [str(model), f"other={model}@random"] if word == "compare" else [str(model)]
    images = () if word == "profile" else ("--data", str(data))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        line = [str(data), "--model", *models] if word == "look" else [*models, *images]
        code = run([word, *line, *options, "--out", str(tmp_path / "out"), "--quiet", "--html"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert not warned
    assert all(
        line.isprintable() or "\u200d" in line for line in (output.out + output.err).splitlines()
    )
    if word == "predict":
        assert len(output.out.splitlines()) == 20  # each image is one line
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    # an audit links the reports of its chapters, in folders that vitlens names
    faults = [line for line in (*problems(text), *page_problems(page)) if "hapters/" not in line]
    assert faults == []
    for table in (tmp_path / "out" / "tables").iterdir():
        lines = table.read_text(encoding="utf-8").replace("\u200d", "").splitlines()
        assert all(line.isprintable() for line in lines)
    assert {path.suffix for path in (tmp_path / "out" / "figures").iterdir()} == {".png"}


@pytest.mark.parametrize("part", range(5))
def test_a_table_shows_the_names_and_json_keeps_them(part, odd, tmp_path):
    model, data = odd
    images = sorted(data.glob("test/*/*.png"))[8 * part : 8 * part + 8]  # as many as a table shows
    assert (
        run(["predict", str(model), "--images", *map(str, images), "--out", str(tmp_path / "out")])
        == 0
    )
    rows = read_run(tmp_path / "out").results["tables"]["predictions"]
    assert [row["image"] for row in rows] == [str(path) for path in images]
    assert {row["class_1"] for row in rows} <= set(CLASSES)
    read = [row[0] for row in cells((tmp_path / "out" / "report.md").read_text(encoding="utf-8"))]
    assert len(read) == 1 + len(images)
    # what can be shown of it is shown, to the end of a line
    for path, cell in zip(images, read[1:], strict=True):
        if path.name.isascii() and path.name.isprintable() and len(path.name) < 60:
            assert cell == path.name.strip()
