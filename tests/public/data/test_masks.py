"""Images with masks: what fits, and what is left out by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.datasets import fitted, pixels_of, put
from tests.kit.select import values_of
from vitlens import load_data
from vitlens.errors import DataError

SIZE = (24, 32)  # height, width


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write images a to d, of which a and b have a mask, c one of another size, d none."""
    for place in ("images", "masks"):
        (tmp_path / place).mkdir()
    for seed, name in enumerate("abcd"):
        pixels = np.random.default_rng(seed).integers(0, 256, size=(*SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{name}.png")
    mask = np.zeros(SIZE, np.uint8)
    mask[4:12, 8:20] = 1
    # both ways of saying it
    for name, values in (
        ("a", 255 * mask),
        ("b", mask),
        ("c", np.ones((8, 8), np.uint8)),
    ):
        Image.fromarray(values).save(tmp_path / "masks" / f"{name}.png")
    return tmp_path


def load(root: Path, **changes: object):
    return load_data(str(root), **{"preprocessing": fitted(SIZE), **changes})


def test_masks_fit_their_images_and_the_rest_is_named(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    split = load(Path(folder.name), preprocessing=None)
    assert (split.name, split.title, split.files, split.labels) == (
        folder.name,
        folder.name,
        ("a.png", "b.png"),
        None,
    )
    assert (split.masks.sum((1, 2)) == split.masks[:, 4:12, 8:20].sum((1, 2))).all()
    assert split.masks[:, 4:12, 8:20].all()
    assert values_of(split.skipped, "file") == ["c.png", "d.png"]
    assert "32x24 px, found 8x8" in split.skipped[0].reason


def test_masks_are_cropped_and_resized_as_the_images(folder):
    """A picture of the mask itself, taken through the same door, is the mask; one of the model's
    size stays whole.
    """
    Image.open(folder / "masks" / "a.png").convert("RGB").save(folder / "images" / "a.png")
    for how, size in ((fitted((40, 40), resize=48), (40, 40)), (fitted(SIZE, resize=48), SIZE)):
        split = load(folder, preprocessing=how)
        pixels = pixels_of(split)[0]
        assert split.masks.shape[1:] == size
        assert torch.equal(split.masks[0], pixels[0] > 127)
        assert ("not cropped" in "\n".join(split.notes)) == (size == SIZE)
    assert np.array_equal(
        pixels.permute(1, 2, 0).numpy(), np.array(Image.open(folder / "images" / "a.png"))
    )


def test_a_border_around_the_image_is_no_object(folder):
    preprocessing = fitted((40, 40), box=(40, 40), crop_mode="border", fill=(200, 200, 200))
    split = load(folder, preprocessing=preprocessing)
    border = (pixels_of(split)[0] == 200).all(0)
    assert border[:5].all()
    assert border[-5:].all()
    assert not split.masks[:, border].any()
    assert split.masks.any((1, 2)).all()


def test_an_index_gives_classes(folder):
    entries = [
        {"file": f"{name}.png", "imagenet_class": number} for number, name in enumerate("ab", 5)
    ]
    (folder / "index.json").write_text(json.dumps(entries))
    split = load(folder)
    assert (split.labels.tolist(), len(split.classes)) == ([5, 6], 1000)
    for some in (entries[:1], {}, [{"file": "a.png"}]):  # only of some images: no labels
        (folder / "index.json").write_text(json.dumps(some))
        assert (load(folder).labels, load(folder).classes) == (None, ())


def test_boxes_in_cocos_form(folder):
    shutil.rmtree(folder / "masks")
    assert load(folder, whole=True).masks is None
    images = [
        {"id": n, "file_name": f"{name}.png", "height": 24, "width": 32}
        for n, name in enumerate("abc")
    ]
    boxes = ((0, [8, 4, 12, 8]), (1, [0, 0, 2, 2]), (1, [30, 22, 10, 10]))
    content = {
        "images": images,
        "annotations": [{"image_id": image, "bbox": box} for image, box in boxes],
    }
    (folder / "annotations.json").write_text(json.dumps(content))
    split = load(folder)
    assert split.files == ("a.png", "b.png")
    assert (split.masks[0, 4:12, 8:20].all(), split.masks[0].sum()) == (True, 96)
    assert split.masks[1].nonzero().tolist() == [
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
        [22, 30],
        [22, 31],
        [23, 30],
        [23, 31],
    ]
    assert set(values_of(split.skipped, "file")) == {"c.png", "d.png"}
    assert "box" in "\n".join(split.notes)
    images[0]["height"] = 25
    (folder / "annotations.json").write_text(json.dumps(content))
    assert load(folder).files == ("b.png",)
    put(folder / "test" / "cat", "a.png")  # a folder with parts is one of classes
    assert load(folder).masks is None


DAMAGES: dict[str, Any] = {
    "cut off": lambda file, content: file.write_bytes(content[:-30]),
    "no image": lambda file, _: file.write_bytes(b"hello"),
    "of fractions": lambda file, _: Image.fromarray(np.ones(SIZE, np.float32)).save(
        file.with_suffix(".tif")
    ),
    "a folder": lambda file, _: file.mkdir(),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_mask_is_left_out_and_named_and_none_that_fits_is_refused(folder, kind):
    def damage(file: Path) -> None:
        content = file.read_bytes()
        file.unlink()
        DAMAGES[kind](file, content)

    damage(folder / "masks" / "b.png")
    split = load(folder)
    assert (split.files, split.masks.shape) == (("a.png",), (1, *SIZE))
    assert values_of(split.skipped, "file") == ["b.png", "c.png", "d.png"]
    damage(folder / "masks" / "a.png")
    with pytest.raises(DataError, match=r"a\.png: .*try vitlens\.images\(.*images'"):
        load(folder)


IMAGE = {"id": 1, "file_name": "a.png", "height": 24, "width": 32}
WRONG = {
    "index.json": (
        "{",
        "[" * 100_000,
        '[{"imagenet_class": 7}]',
        '[{"file": "a.png", "imagenet_class": 1000}]',
    ),
    "annotations.json": (
        "",
        "3",
        "{}",
        json.dumps({"images": [IMAGE]}),
        json.dumps({"images": [{}], "annotations": []}),
        json.dumps({"images": [IMAGE], "annotations": [{"image_id": 1, "bbox": [2, 3, "x", 9]}]}),
        json.dumps({"images": [IMAGE | {"height": 2**33}], "annotations": []}),
        json.dumps({"images": [IMAGE | {"id": []}], "annotations": []}),
    ),
}


@pytest.mark.parametrize("file", WRONG)
def test_damaged_json_beside_images_is_refused_in_one_line(folder, file):
    if file == "annotations.json":
        shutil.rmtree(folder / "masks")
    for text in WRONG[file]:
        (folder / file).write_text(text)
        with pytest.raises(DataError) as raised:
            load(folder)
        assert "\n" not in str(raised.value)


def sorted_into_classes(folder: Path) -> Path:
    """Write the same images and masks into folders of two classes, with the same names in both."""
    for place in ("images", "masks"):
        for name in ("cat", "dog"):
            shutil.copytree(folder / place, folder / "sorted" / place / name)
    return folder / "sorted"


def test_class_folders_of_images_and_masks_give_both(folder):
    """Each image has the mask of its folder, and its label."""
    root = sorted_into_classes(folder)
    Image.fromarray(np.eye(*SIZE, dtype=np.uint8)).save(root / "masks" / "dog" / "a.png")
    split = load(root, whole=True)
    assert split.files == ("cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")
    assert (split.classes, split.labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    assert split.masks.sum((1, 2)).tolist() == [96, 96, 24, 96]
    assert values_of(split.skipped, "file") == [
        "cat/c.png",
        "cat/d.png",
        "dog/c.png",
        "dog/d.png",
    ]
    train = load(root, part="train")
    test = load(root, part="test")
    assert not set(train.files) & set(test.files)


def test_two_masks_of_one_image_are_refused_in_one_line(folder):
    shutil.copy(folder / "masks" / "a.png", folder / "masks" / "a.bmp")
    with pytest.raises(DataError, match=r"masks/a.bmp and masks/a.png"):
        load(folder)
    (folder / "images" / "a.png").unlink()
    assert load(folder).files == ("b.png",)  # the masks of no image do not matter


@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_folder_of_the_masks_is_not_one_of_images(folder, is_sorted):
    root = sorted_into_classes(folder) if is_sorted else folder
    with pytest.raises(DataError, match=f"name {root}$"):
        load(root / "masks")
