"""Files that would hang a reader or fill its memory are refused in one line, unread."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from vitlens.cli.main import run


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line that must be refused, and return its one line."""
    assert run([*line.split(), "--device", "cpu", "--quiet"]) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    return message


@pytest.mark.parametrize(
    "line",
    [
        "predict vit-digits --data {folder}",
        "predict vit-digits --images {folder}/pipe.png",
        "predict {folder}/pipe.safetensors --arch vit-micro --image-size 32 --data digits",
        "predict vit-micro --weights {folder}/pipe.safetensors --data digits",
    ],
)
def test_a_named_pipe_is_no_file_to_wait_for(line, tmp_path, capsys):
    for name in ("pipe.png", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
    assert "no plain file" in refused(line.format(folder=tmp_path), capsys)


def test_a_strip_of_few_pixels_but_endless_length_is_no_image(tmp_path, capsys):
    Image.new("1", (1, 70_000)).save(tmp_path / "strip.png")
    message = refused(f"predict vit-digits --images {tmp_path / 'strip.png'}", capsys)
    assert "1x70000" in message


@pytest.mark.parametrize("classes", [1_000_000_000, "many"])
def test_a_configuration_with_endless_classes_is_refused_before_their_names_are_made(
    classes, tmp_path, capsys
):
    pytest.importorskip("transformers")
    fields = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": classes,
    }
    Path(tmp_path / "config.json").write_text(json.dumps(fields))
    message = refused(f"predict hf:{tmp_path}@random --data digits --limit 2", capsys)
    assert str(classes) in message
