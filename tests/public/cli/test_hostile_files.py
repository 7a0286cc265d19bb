"""Files that would hang a reader or fill its memory are refused in one line, unread."""

import json
import os
import zipfile
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_labels", 1_000_000_000),  # before their names are made
        ("num_labels", "many"),
        ("hidden_size", -32),
        ("hidden_size", "32"),
        ("intermediate_size", 64.5),
        ("patch_size", 0),
        ("image_size", [32, -32]),
    ],
)
def test_a_configuration_with_wrong_sizes_is_refused_by_the_name_of_the_field(
    field, value, tmp_path, capsys
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
        field: value,
    }
    Path(tmp_path / "config.json").write_text(json.dumps(fields))
    message = refused(f"predict hf:{tmp_path}@random --data digits --limit 2", capsys)
    assert field in message
    assert str(value) in message


def test_thousands_of_tensors_are_counted_and_not_compared(tmp_path, capsys):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(30_000)}).encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    message = refused(f"predict {path} --arch vit-micro --image-size 32 --data digits", capsys)
    assert "30,000" in message


def test_a_damaged_header_of_an_array_is_refused_in_the_same_words_each_time(tmp_path, capsys):
    header = b"f(x)".ljust(63) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("images", "labels"):
            archive.writestr(f"{name}.npy", content)
    messages = [refused(f"predict vit-digits --data {tmp_path}/a.npz", capsys) for _ in range(2)]
    assert messages[0] == messages[1]
    assert " at 0x" not in messages[0]


def test_the_words_of_another_library_are_no_bytes_literal(tmp_path, capsys):
    (tmp_path / "a.ppm").write_bytes(b"P6 80000000000 3 255\n" + bytes(100))
    assert "b'" not in refused(f"predict vit-digits --images {tmp_path}/a.ppm", capsys)


def test_of_a_path_without_end_the_beginning_is_shown(capsys):
    assert len(refused(f"predict vit-digits --images {'a' * 5000}", capsys)) < 400
