"""A report says so if its figures draw fewer images than were measured."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.saving import no_figures
from vitlens.cli.main import run

DATA = "--data digits --limit 9"
LINES = {  # a command, and how many of how many images its figures draw
    "rollout": (f"rollout vit-digits {DATA} --method attention", "6 of the 9"),
    "explain": (f"explain vit-digits cnn-digits {DATA} --method gradcam", "6 of the 9"),
    "explain, of images": (
        "explain vit-digits --method saliency --images {folder}",
        "24 of the 26",
    ),
    "compare": (
        f"compare vit-digits cnn-digits {DATA} --panels 3 --method gradcam --checked 0",
        "3 of 9 images",
    ),
    "look": ("look {files} --limit 26 --model vit-digits", "24 of the 26"),
    "attention": ("attention vit-digits --images {folder}", "24 of the 26"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write 26 pictures."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(26):
        Image.new("RGB", (32, 32), (9 * number, 90, 200)).save(root / f"{number}.png")
    return root


# several seconds each
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("compare", "look")]
QUICK = [name for name in LINES if name not in ("compare", "look")]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_report_says_how_many_images_its_figures_draw(name, folder, tmp_path):
    line, words = LINES[name]
    files = " ".join(map(str, sorted(folder.iterdir())))
    with no_figures():
        words_of_line = line.format(folder=folder, files=files).split()
        assert (
            run([*words_of_line, "--device", "cpu", "--quiet", "--out", str(tmp_path / "out")]) == 0
        )
    assert re.search(words, (tmp_path / "out" / "report.md").read_text())
