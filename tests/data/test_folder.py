import json

import pytest
import torch
from PIL import Image

from vitlens.arrays import read_arrays
from vitlens.data.catalogue import load_data
from vitlens.data.folder import list_folder, list_images
from vitlens.errors import DataError
from vitlens.names import imagenet_classes
from vitlens.preprocessing import Preprocessing

SMALL = Preprocessing(size=(4, 4))


def put(folder, *names, value=100, size=(5, 4)):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", size, (value, 0, 0)).save(folder / name)


def test_train_and_test_inside_are_the_parts(tmp_path):
    put(tmp_path / "train/cat", "a.png", "b.png", value=1)
    put(tmp_path / "train/dog", "a.png", value=2)
    put(tmp_path / "test/dog", "c.png", value=3)
    train = load_data(str(tmp_path), part="train", preprocessing=SMALL)
    test = load_data(str(tmp_path), part="test", preprocessing=SMALL)
    assert train.classes == test.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 1]
    assert test.labels.tolist() == [1]
    assert train.files == ("train/cat/a.png", "train/cat/b.png", "train/dog/a.png")
    assert test.source.read(torch.tensor([0]))[0, :, 0, 0].tolist() == [3, 0, 0]
    assert not test.notes


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_val_serves_as_test(tmp_path, name):
    put(tmp_path / "train/cat", "a.png")
    put(tmp_path / name / "cat", "b.png")
    assert list_folder(tmp_path, part="test").paths == (tmp_path / name / "cat/b.png",)


def test_test_alone_is_for_evaluation(tmp_path):
    put(tmp_path / "test/cat", "a.png")
    assert len(list_folder(tmp_path, part="test").paths) == 1
    with pytest.raises(DataError, match="expected train/"):
        list_folder(tmp_path, part="train")


@pytest.mark.parametrize("top", ["", "train"])
def test_without_a_test_part_a_fifth_of_each_class_is_held_out(tmp_path, top):
    for name in ("cat", "dog"):
        put(tmp_path / top / name, *(f"{index}.png" for index in range(10)))
    train, test = (list_folder(tmp_path, part=part, seed=1) for part in ("train", "test"))
    assert sorted(test.labels) == [0, 0, 1, 1]
    assert sorted(train.paths + test.paths) == sorted(tmp_path.rglob("*.png"))
    assert "seed 1" in test.notes[0]
    assert list_folder(tmp_path, part="test", seed=1) == test
    assert any(list_folder(tmp_path, part="test", seed=seed).paths != test.paths for seed in range(2, 5))
    whole = list_folder(tmp_path, part="test", whole=True)
    assert len(whole.paths) == 20
    assert not whole.notes


def test_one_image_a_class_is_all_for_test(tmp_path):
    put(tmp_path / "cat", "a.png")
    put(tmp_path / "dog", "a.png")
    assert len(list_folder(tmp_path, part="test").paths) == 2
    with pytest.raises(DataError, match="at least two images of a class"):
        list_folder(tmp_path, part="train")


def test_wnids_get_imagenets_indices_and_names(tmp_path):
    put(tmp_path / "n15075141", "a.png")
    put(tmp_path / "n01440764", "a.png")
    split = load_data(str(tmp_path), part="test", preprocessing=SMALL)
    assert split.labels.tolist() == [0, 999]
    assert split.classes == imagenet_classes()


def test_loose_images_have_no_labels_and_no_parts(tmp_path):
    put(tmp_path, "b.png", "a.JPG")
    (tmp_path / "notes.txt").write_text("hello")
    for part in ("train", "test"):
        split = load_data(str(tmp_path), part=part, preprocessing=SMALL)
        assert split.files == ("a.JPG", "b.png")
        assert split.labels is None
        assert split.classes == ()


@pytest.mark.parametrize("preprocessing", [SMALL, None])
def test_images_beside_masks_are_loose_and_have_them(tmp_path, monkeypatch, preprocessing):
    put(tmp_path / "seen/images", "a.png", "b.png", "c.png")
    put(tmp_path / "seen/masks", "a.png")
    put(tmp_path / "seen/masks", "b.png", size=(9, 9))
    monkeypatch.chdir(tmp_path)
    split = load_data("seen", part="test", preprocessing=preprocessing)
    assert split.files == ("a.png",)
    assert (split.name, split.title) == ("seen", "seen")
    assert split.labels is None
    assert split.masks.shape == (1, *((4, 4) if preprocessing else (4, 5)))
    assert split.masks.all()
    assert [(one.file, one.reason[:15]) for one in split.skipped] == [
        ("b.png", "expected a mask"), ("c.png", "expected a read"),
    ]  # fmt: skip


def test_images_beside_cocos_boxes_have_them(tmp_path):
    put(tmp_path / "images", "a.png")
    content = {
        "images": [{"id": 7, "file_name": "a.png", "height": 4, "width": 5}],
        "annotations": [{"image_id": 7, "bbox": [0, 0, 2, 1]}],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    split = load_data(str(tmp_path), part="test")
    assert split.masks.nonzero().tolist() == [[0, 0, 0], [0, 0, 1]]


def test_no_mask_that_fits_says_how_to_do_without(tmp_path):
    put(tmp_path / "images", "a.png")
    put(tmp_path / "masks", "b.png")
    with pytest.raises(DataError, match=r"found none \(a\.png: .*try --images .*images to do without"):
        load_data(str(tmp_path), part="test", preprocessing=SMALL)


def test_images_beside_class_folders_are_left_out_and_counted(tmp_path):
    put(tmp_path, "a.png")
    put(tmp_path / "cat", "a.png", "b.png")
    listing = list_folder(tmp_path, part="test", whole=True)
    assert len(listing.paths) == 2
    assert "1 images beside" in listing.notes[0]


def test_hidden_files_and_empty_folders_are_no_classes(tmp_path):
    put(tmp_path / "cat", "a.png", "._a.png")
    put(tmp_path / ".cache", "a.png")
    put(tmp_path / "__MACOSX", "a.png")
    (tmp_path / "empty").mkdir()
    listing = list_folder(tmp_path, part="test")
    assert listing.classes == ("cat",)
    assert listing.paths == (tmp_path / "cat/a.png",)


def test_unreadable_images_lose_their_label_too(tmp_path):
    put(tmp_path / "cat", "a.png", "c.png")
    put(tmp_path / "dog", "d.png")
    (tmp_path / "cat/b.png").write_text("no")
    split = load_data(str(tmp_path), part="test", preprocessing=SMALL, whole=True)
    assert split.files == ("cat/a.png", "cat/c.png", "dog/d.png")
    assert split.labels.tolist() == [0, 0, 1]
    assert [skipped.file for skipped in split.skipped] == [str(tmp_path / "cat/b.png")]


def test_without_preprocessing_a_common_size_is_kept(tmp_path):
    put(tmp_path, "a.png", "b.png")
    assert load_data(str(tmp_path), part="test").size == (4, 5)
    put(tmp_path, "c.png", size=(9, 9))
    assert load_data(str(tmp_path), part="test").size == (224, 224)


@pytest.mark.parametrize("inside", [(), ("cat",), ("train", "test")])
def test_a_folder_without_images_is_refused(tmp_path, inside):
    for name in inside:
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"expected images .* found none"):
        load_data(str(tmp_path), part="test")


def test_listed_images_keep_the_order_given(tmp_path):
    put(tmp_path / "photos/cat", "b.png", "a.png")
    put(tmp_path, "z.png")
    images = list_images([tmp_path / "z.png", tmp_path / "photos"])
    assert [path.name for path in images] == ["z.png", "a.png", "b.png"]


def test_listing_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"found nothing at .*cat\.jpg"):
        list_images([tmp_path / "cat.jpg"])
    with pytest.raises(DataError, match="found none"):
        list_images([tmp_path])


def test_deit_sees_its_photographs_as_it_should(real_data):
    """The stored reference's files and labels are those that we list."""
    reference = read_arrays(real_data / "deit_tiny_reference.npz")
    listing = list_folder(real_data / "photos", part="test", whole=True)
    ours = {path.name: label for path, label in zip(listing.paths, listing.labels)}
    theirs = {str(name).split("/")[-1]: int(label) for name, label in zip(reference["files"], reference["labels"])}
    assert ours == theirs
