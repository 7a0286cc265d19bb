"""Tiny ImageNet as it is distributed, in miniature."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.cli.main import run
from vitlens.data.catalogue import load_data
from vitlens.errors import DataError
from vitlens.names import imagenet_classes, imagenet_indices

WNIDS = ("n02124075", "n01443537", "n02509815")  # Egyptian cat, goldfish, lesser panda


def picture(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path, quality=100)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-imagenet-200"
    for number, wnid in enumerate(WNIDS):
        for index in range(2):
            picture(root / "train" / wnid / "images" / f"{wnid}_{index}.JPEG", 40 * number + index)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t7\t7\n")
    lines = []
    for number, wnid in enumerate(reversed(WNIDS)):
        picture(root / "val" / "images" / f"val_{number}.JPEG", 200 + 10 * number)
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t7\t7\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    picture(root / "test" / "images" / "test_0.JPEG", 9)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    words = {"n02124075": "Egyptian cat", "n01443537": "goldfish, Carassius auratus", "n00000001": "entity"}
    (root / "words.txt").write_text("".join(f"{wnid}\t{name}\n" for wnid, name in words.items()))
    return root


def test_train_and_val_are_the_parts_and_words_name_the_classes(tiny):
    train, test = (load_data(str(tiny), part=part) for part in ("train", "test"))
    lesser_panda = imagenet_classes()[imagenet_indices()["n02509815"]]  # not in this words.txt
    assert train.classes == test.classes == ("goldfish", "Egyptian cat", lesser_panda)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.files == tuple(f"val/images/val_{number}.JPEG" for number in range(3))
    assert test.labels.tolist() == [2, 0, 1]
    assert test.size == (8, 8)
    assert test.source.read(torch.arange(3)).float().mean((1, 2, 3)).round().tolist() == [200, 210, 220]
    assert "val/" in test.notes[0]
    assert "train/" in train.notes[0]


def test_an_image_without_a_line_is_left_out_and_counted(tiny):
    picture(tiny / "val" / "images" / "val_9.JPEG", 1)
    split = load_data(str(tiny), part="test")
    assert len(split) == 3
    assert "1 images without a line" in split.notes[0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("val/val_annotations.txt", "val_0.JPEG n01443537\n"),
        ("val/val_annotations.txt", "val_0.JPEG\tgoldfish\n"),
        ("val/val_annotations.txt", b"\xff\xfe\x00"),
        ("val/val_annotations.txt", "../other.JPEG\tn01443537\n"),
        ("wnids.txt", "goldfish\n"),
    ],
)
def test_lines_that_are_not_so_are_refused_by_name(tiny, file, content, capsys):
    (tiny / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=Path(file).name):
        load_data(str(tiny), part="test")
    assert run(["evaluate", "vit-digits", "--data", str(tiny)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_names_that_two_classes_share_are_told_apart(tiny):
    (tiny / "words.txt").write_text("n02124075\tcat\nn01443537\tcat\n")
    assert load_data(str(tiny), part="test").classes[:2] == ("cat (n01443537)", "cat (n02124075)")
