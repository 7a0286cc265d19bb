"""`--images` and `--predicted` mean the same in every command that takes them."""

import json
from pathlib import Path

import pytest

from vitlens.cli.main import run


@pytest.mark.parametrize(
    "line",
    [
        "ablate vit-digits",
        "attack vit-digits",
        "study vit-digits",
        "study",  # presets, which are trained on labels
        "study vit-micro --predicted",
        "study --kind pooling --predicted",
        "study vit-digits --predicted --data digits",
    ],
)
def test_what_needs_labels_is_refused_in_one_line_before_anything_is_written(line, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    assert run([*line.split(), "--images", str(pictures), "--quiet", "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


def test_statistics_take_both(tiny_vit, pictures, tmp_path):
    line = ["stats", str(tiny_vit), "--images", str(pictures), "--predicted", "--quiet", "--device", "cpu"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["data"]["images"] == 3


@pytest.mark.slow  # every chapter that needs no labels
def test_a_study_of_own_images_leaves_out_what_needs_labels(pictures: Path, tmp_path: Path):
    line = ["study", "vit-digits", "--images", str(pictures), "--predicted", "--quiet", "--device", "cpu"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    words = [row["word"] for row in results["tables"]["chapters"]]
    assert words == ["attention", "rollout", "stats", "ablate", "explain", "attack", "profile"]
    assert [row["chapter"] for row in results["tables"]["left_out"]] == ["evaluate", "compare", "features"]
    assert not any(name.split("/")[0] == "accuracy" for name in results["metrics"])
