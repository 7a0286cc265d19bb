"""Every folder, table of labels and mask of docs/readable.md is read as the page says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.datasets import fitted, pixels_of
from tests.kit.models.files import one_line
from tests.kit.readable import FOLDERS, GREYS, MASKS, OBJECT, SIZE, TABLES, Example
from tests.kit.select import values_of
from vitlens.cli.main import run
from vitlens.errors import DataError

WHOLE = fitted((6, 8))


def named(examples: tuple[Example, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", examples, ids=values_of(examples, "what"))


def require_right_labels(split: vitlens.Split) -> None:
    """Check that the grey level of each image is that of its class."""
    greys = pixels_of(split).float().mean((1, 2, 3))
    expected = [GREYS[split.classes[label]] for label in split.labels.tolist()]
    assert torch.allclose(greys, torch.tensor(expected, dtype=torch.float32), atol=4)


@named(FOLDERS)
def test_a_folder_is_read_by_its_classes_or_refused(tmp_path, example):
    root = tmp_path / "data"
    example.make(root)
    if example.outcome == "refused":
        with one_line(DataError):
            vitlens.load_data(str(root), preprocessing=WHOLE)
        return
    split = vitlens.load_data(str(root), preprocessing=WHOLE, whole=True)
    assert len(split) > 0
    require_right_labels(split)
    assert bool(split.notes or split.skipped) == (example.outcome == "read, with a note")


@pytest.mark.parametrize(
    "names", [("Training", "Testing"), ("TRAIN", "VAL"), ("trn", "holdout"), ("train", "test1")]
)
def test_no_image_is_in_both_parts_and_none_is_lost(tmp_path, names):
    example = next(case for case in FOLDERS if "`Training/`" in case.what)
    example.make(tmp_path / "data")
    for old, new in zip(("Training", "Testing"), names):
        (tmp_path / "data" / old).rename(tmp_path / "data" / new)
    train = vitlens.load_data(str(tmp_path / "data"), part="train")
    test = vitlens.load_data(str(tmp_path / "data"), part="test")
    for file in train.files:
        assert file.startswith(names[0])
    for file in test.files:
        assert file.startswith(names[1])
    assert len(train) == len(test) == 4


@named(TABLES)
def test_a_table_labels_the_images_of_a_flat_folder(tmp_path, example):
    table = example.make(tmp_path)
    folder = str(tmp_path / "flat")
    if example.outcome == "refused":
        with one_line(DataError):
            vitlens.load_data(folder, preprocessing=WHOLE, labels=table)
        return
    split = vitlens.load_data(folder, preprocessing=WHOLE, labels=table, whole=True)
    greys = pixels_of(split)[:, 0, 0, 0].tolist()
    by_class = {split.classes[label]: grey for label, grey in zip(split.labels.tolist(), greys)}
    assert len(by_class) == 2
    assert list(by_class.values()) == [GREYS["cat"], GREYS["dog"]]  # a.png is the first class
    assert (len(split.notes) > 1) == (example.outcome == "read, with a note")


def test_the_command_line_takes_a_table_and_indices_are_those_of_the_model(tmp_path, capsys):
    example = next(case for case in TABLES if case.what == "class indices")
    table = example.make(tmp_path)
    words = [
        "--data",
        str(tmp_path / "flat"),
        "--labels",
        str(table),
        "--out",
        str(tmp_path / "out"),
        "--quiet",
    ]
    assert run(["evaluate", "vit-digits", *words]) == 0
    result = vitlens.read(str(tmp_path / "out"))
    assert result.metrics["accuracy/vit-digits"].n == 3
    assert run(["data", str(tmp_path / "flat"), "--labels", str(table)]) == 0
    assert "2 classes (0, 1)" in capsys.readouterr().out


def test_a_table_is_for_a_folder_of_images(tmp_path):
    for name in ("digits", str(tmp_path / "none")):
        with one_line(DataError):
            vitlens.load_data(name, labels=tmp_path / "labels.csv")


@named(MASKS)
def test_a_mask_is_the_object_or_refused(tmp_path, example):
    example.make(tmp_path / "data")
    if example.outcome == "refused":
        with one_line(DataError):
            vitlens.load_data(str(tmp_path / "data"))
        return
    split = vitlens.load_data(str(tmp_path / "data"))
    bright = pixels_of(split)[0, 0] > 127
    mask = split.masks[0]
    assert mask.shape in (SIZE, SIZE[::-1])
    assert bright.sum() == (OBJECT[0].stop - OBJECT[0].start) * (OBJECT[1].stop - OBJECT[1].start)
    assert (bright & mask).sum() / (bright | mask).sum() > 0.95


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_photograph_and_its_boxes_are_turned_together(tmp_path, orientation):
    """Boxes on the pixels as they are stored; where the turn does not change the size, a note says
    what is assumed.
    """
    example = next(case for case in MASKS if "as stored" in case.what)
    example.make(tmp_path / "data")
    root = tmp_path / "data"
    write_turned(root, orientation)
    split = vitlens.load_data(str(root))
    bright = pixels_of(split)[0, 0] > 127
    swapped = orientation >= 5
    assert split.size == (SIZE[::-1] if swapped else SIZE)
    assert (torch.equal(split.masks[0], bright)) == swapped
    assert ("rotated" in "\n".join(split.notes)) == (not swapped)


def write_turned(root: Path, orientation: int) -> None:
    """Store the image with another EXIF orientation, and its mask as a box on the stored pixels."""
    shutil.rmtree(root / "masks")
    exif = Image.Exif()
    exif[0x0112] = orientation
    with Image.open(root / "images" / "a.png") as image:
        image.load()
    Image.fromarray(np.array(image)).save(root / "images" / "a.png", exif=exif.tobytes())
    rows, columns = OBJECT
    box = [columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start]
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": SIZE[0], "width": SIZE[1]}],
        "annotations": [{"image_id": 1, "bbox": box}],
    }
    (root / "annotations.json").write_text(json.dumps(content))


def test_images_of_one_displayed_size_keep_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(2):
        Image.new("RGB", (40, 20)).save(tmp_path / f"{number}.jpg", exif=exif.tobytes())
    assert vitlens.load_data(str(tmp_path)).size == (40, 20)


def test_a_part_that_does_not_exist_is_refused():
    with one_line(vitlens.errors.InputError, "test"):
        vitlens.load_data("digits", part="tset")


SPLITS = {  # the title of a column, what it says of four images, and those of each part
    "split": (("train", "train", "test", "val"), "01", "2"),
    "Subset": (("training", "TRAIN", "validation", "val"), "01", "23"),
    "phase": (("test", "train", "Testing", "train"), "13", "02"),
}


@pytest.mark.parametrize("title", SPLITS)
def test_a_table_divides_the_images_into_parts(tmp_path, title):
    words, train, test = SPLITS[title]
    lines = [f"file,label,{title}"]
    for number, word in enumerate(words):
        Image.new("RGB", (8, 6)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'cat' if number % 2 else 'dog'},{word}")
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(lines))
    for part, numbers in (("train", train), ("test", test)):
        split = vitlens.load_data(str(tmp_path), labels=table, part=part)
        assert split.files == tuple(f"{number}.png" for number in numbers)
        assert title in "\n".join(split.notes)


def test_a_first_line_of_labels_first_that_names_no_image_is_counted_as_left_out(tmp_path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{name}.png")
    table = tmp_path / "labels.csv"
    table.write_text("cat,missing.png\ncat,a.png\ndog,b.png\ncat,c.png\ndog,d.png\n")
    split = vitlens.load_data(str(tmp_path / "images"), labels=table)
    (note,) = [note for note in split.notes if "name no image" in note]
    assert note.endswith(": 1")
