"""Folders: classes and parts, Tiny ImageNet's, cue conflicts, and images without labels."""

import json
from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.kit.attacked import linear
from tests.kit.datasets import fitted, limited, pixels_of, put
from tests.kit.select import values_of
from vitlens import load_data
from vitlens.errors import DataError
from vitlens.names import imagenet_classes, imagenet_indices

SMALL = fitted((4, 4))


def load(root: Path, part: str = "test", **more: object) -> vitlens.Split:
    return load_data(str(root), part=part, **{"preprocessing": SMALL, **more})


def test_train_and_test_inside_are_the_parts(tmp_path):
    put(tmp_path / "train/cat", "a.png", "b.png")
    put(tmp_path / "train/dog", "a.png")
    put(tmp_path / "test/dog", "c.png", value=3)
    train = load(tmp_path, "train")
    test = load(tmp_path, "test")
    assert train.classes == test.classes == ("cat", "dog")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 1], [1])
    assert train.files == ("train/cat/a.png", "train/cat/b.png", "train/dog/a.png")
    assert pixels_of(test)[0, :, 0, 0].tolist() == [3, 3, 3]
    assert (train.title, test.notes) == (tmp_path.name, ())


def test_of_several_training_parts_the_one_called_train_is_taken_whatever_is_in_it(tmp_path):
    put(tmp_path / "train/images/cat", "a.png")
    put(tmp_path / "train/images/dog", "b.png")
    put(tmp_path / "training/cat", "c.png")
    put(tmp_path / "training/dog", "d.png")
    put(tmp_path / "test/dog", "e.png")
    assert load(tmp_path, "train").files == ("train/images/cat/a.png", "train/images/dog/b.png")


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_val_serves_as_test_and_alone_is_for_evaluation(tmp_path, name):
    put(tmp_path / name / "cat", "b.png")
    assert load(tmp_path).files == (f"{name}/cat/b.png",)
    with pytest.raises(DataError, match="expected train/"):
        load(tmp_path, "train")
    put(tmp_path / "train/cat", "a.png")
    assert load(tmp_path).files == (f"{name}/cat/b.png",)
    assert load(tmp_path, "train").files == ("train/cat/a.png",)


@pytest.mark.parametrize("top", ["", "train", "training"])
def test_without_a_test_part_a_fifth_of_each_class_is_held_out(tmp_path, top):
    """A class of a single image is trained on; where each has a single one all are for test."""
    for name, count in (("cat", 10), ("dog", 10), ("elk", 2), ("fox", 1)):
        put(tmp_path / "many" / top / name, *(f"{index}.png" for index in range(count)))
        put(tmp_path / "few" / top / name, "a.png")
    many = tmp_path / "many"
    few = tmp_path / "few"
    train = load(many, "train", seed=1)
    test = load(many, "test", seed=1)
    assert test.labels.bincount(minlength=4).tolist() == [2, 2, 1, 0]
    for file, label in zip(test.files, test.labels):
        assert ("cat", "dog", "elk")[label] in file
    every = sorted(str(path.relative_to(many)) for path in many.rglob("*.png"))
    assert sorted(train.files + test.files) == every
    assert "seed 1" in test.notes[0]
    assert load(many, seed=2).files != test.files
    complete = load(many, whole=True)
    assert (len(complete), complete.notes) == (23, ())
    assert (len(load(few)), load(few).notes) == (4, ())
    with pytest.raises(DataError, match="at least two images of a class"):
        load(few, "train")


def test_wnids_get_imagenets_names_and_only_the_classes_that_occur(tmp_path):
    put(tmp_path / "n15075141", "a.png")
    put(tmp_path / "n01440764", "a.png")
    assert load(tmp_path).labels.tolist() == [0, 1]
    assert load(tmp_path).classes == (imagenet_classes()[0], imagenet_classes()[999])


def test_loose_images_have_no_labels_and_no_parts_and_may_share_a_size(tmp_path):
    put(tmp_path, "b.png", "a.JPG")
    (tmp_path / "notes.txt").write_text("hello")
    for part in ("train", "test"):
        split = load(tmp_path, part)
        assert (split.files, split.labels, split.classes) == (("a.JPG", "b.png"), None, ())
    assert load_data(str(tmp_path)).size == (4, 5)
    put(tmp_path, "c.png", size=(9, 9))
    assert load_data(str(tmp_path)).size == (224, 224)
    # images next to class folders are left out, and counted
    put(tmp_path / "cat", "a.png", "b.png")
    complete = load(tmp_path, whole=True)
    assert (len(complete), "3 images" in complete.notes[0]) == (2, True)


def test_hidden_files_and_empty_folders_are_no_classes_and_unreadable_images_lose_their_label(
    tmp_path,
):
    put(tmp_path / "cat", "a.png", "c.png", "._a.png")
    for name in ("dog", ".cache", "__MACOSX"):
        put(tmp_path / name, "d.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cat/b.png").write_text("no")
    split = load(tmp_path, whole=True)
    assert split.classes == ("cat", "dog")
    assert (split.files, split.labels.tolist()) == (
        ("cat/a.png", "cat/c.png", "dog/d.png"),
        [0, 0, 1],
    )
    assert values_of(split.skipped, "file") == [str(tmp_path / "cat/b.png")]


@pytest.mark.parametrize("inside", [(), ("cat",), ("train", "test")])
def test_a_folder_without_images_is_refused(tmp_path, inside):
    for name in inside:
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"expected images .* found none"):
        load_data(str(tmp_path))


def test_a_folder_of_many_other_files_is_not_searched_to_its_end(tmp_path):
    """A home folder, or a whole disk, by mistake."""
    put(tmp_path / "cat", "z.png")
    for index in range(30):
        (tmp_path / "cat" / f"{index}.txt").touch()
    with limited(MANY=20):
        with pytest.raises(DataError, match="name the folder that holds them"):
            load(tmp_path)
        put(tmp_path / "cat", "a.png", "b.png", "c.png")  # more than a tenth are images
        assert len(load(tmp_path, whole=True)) == 4


def test_images_given_keep_their_order_and_what_is_not_there_is_named(tmp_path):
    for value, name in ((1, "photos/cat/b.png"), (2, "photos/cat/a.png"), (3, "z.png")):
        put((tmp_path / name).parent, Path(name).name, value=value)
    pixels = vitlens.images([tmp_path / "z.png", tmp_path / "photos"], linear((4, 4)))
    assert (255 * pixels[:, 0, 0, 0]).round().tolist() == [3, 2, 1]
    with pytest.raises(DataError, match=r"found nothing at .*cat\.jpg"):
        vitlens.images(tmp_path / "cat.jpg", linear((4, 4)))


WNIDS = ("n02124075", "n01443537", "n02509815")  # Egyptian cat, goldfish, lesser panda


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Write a miniature of Tiny ImageNet as it is distributed."""
    root = tmp_path / "tiny-imagenet-200"
    size = (8, 8)
    lines = []
    for number, wnid in enumerate(WNIDS):
        put(
            root / "train" / wnid / "images",
            f"{wnid}_0.JPEG",
            f"{wnid}_1.JPEG",
            value=40 * number,
            size=size,
        )
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t7\t7\n")
        put(root / "val" / "images", f"val_{number}.JPEG", value=200 + 10 * number, size=size)
        lines.append(f"val_{number}.JPEG\t{WNIDS[2 - number]}\t0\t0\t7\t7\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    put(root / "test" / "images", "test_0.JPEG", size=size)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    words = {
        "n02124075": "Egyptian cat",
        "n01443537": "goldfish, Carassius auratus",
        "n00000001": "entity",
    }
    (root / "words.txt").write_text("".join(f"{wnid}\t{name}\n" for wnid, name in words.items()))
    return root


def test_train_and_val_of_tiny_imagenet_are_the_parts_and_words_name_the_classes(tiny):
    train = load_data(str(tiny), part="train")
    test = load_data(str(tiny), part="test")
    lesser_panda = imagenet_classes()[imagenet_indices()["n02509815"]]  # not in this words.txt
    assert train.classes == test.classes == ("goldfish", "Egyptian cat", lesser_panda)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.files == tuple(f"val/images/val_{number}.JPEG" for number in range(3))
    assert test.labels.tolist() == [2, 0, 1]
    assert pixels_of(test).float().mean((1, 2, 3)).round().tolist() == [200, 210, 220]
    put(tiny / "val" / "images", "val_9.JPEG", size=(8, 8))  # without a line
    (tiny / "words.txt").write_text("n02124075\tcat\nn01443537\tcat\n")
    split = load_data(str(tiny))
    assert len(split) == 3
    assert "1 images without a line" in split.notes[0]
    assert split.classes[:2] == ("cat (n01443537)", "cat (n02124075)")
    (tiny / "val" / "val_annotations.txt").write_text("other.JPEG\tn01443537\n")
    with pytest.raises(DataError, match="none of 4"):
        load_data(str(tiny))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("val_annotations.txt", b"val_0.JPEG n01443537\n"),
        ("val_annotations.txt", b"val_0.JPEG\tgoldfish\n"),
        ("val_annotations.txt", b"\xff\xfe\x00"),
        ("val_annotations.txt", b"../other.JPEG\tn01443537\n"),
        ("../wnids.txt", b"goldfish\n"),
    ],
)
def test_lines_that_are_not_so_are_refused_by_name(tiny, file, content):
    (tiny / "val" / file).write_bytes(content)
    with pytest.raises(DataError, match=Path(file).name):
        load_data(str(tiny))


def test_cue_conflicts_are_labelled_by_shape(tmp_path):
    """Five images of four sources, which are groups; dogs appear only as a texture."""
    for name in (
        "cat/cat1-dog2",
        "cat/cat1-bear3",
        "cat/cat2-cat1",
        "bear/bear4-cat10",
        "bear/bear5-dog1",
    ):
        put((tmp_path / name).parent, f"{Path(name).name}.png", size=(8, 8))
    split = load_data(str(tmp_path))
    assert split.classes == ("bear", "cat", "dog")
    assert [Path(file).stem for file in split.files] == [
        "bear4-cat10",
        "bear5-dog1",
        "cat1-bear3",
        "cat1-dog2",
        "cat2-cat1",
    ]
    assert split.labels.tolist() == [0, 0, 1, 1, 1]
    assert split.groups.tolist() == [0, 1, 2, 2, 3]
    assert split.notes[-1].endswith("its label is the shape.")
    with pytest.raises(DataError, match="vitlens compare"):
        load_data(str(tmp_path), part="train")
    put(tmp_path / "cat", "dog1-cat1.png")  # the shape is not the folder: class folders as others
    assert load(tmp_path, whole=True).groups is None


def test_the_published_stimuli_and_their_sixteen_classes(real_data):
    published = json.loads(
        (real_data / "cue_conflict" / "category_to_imagenet_index.json").read_text()
    )
    lines = [
        line.split(" ")
        for line in (Path(vitlens.__file__).parent / "imagenet16.txt").read_text().splitlines()
    ]
    for name, text in lines:  # "3,5-7" is 3, 5, 6, 7
        ends = [list(map(int, part.split("-"))) for part in text.split(",")]
        indices = []
        for pair in ends:
            indices += range(pair[0], pair[-1] + 1)
        assert indices == sorted(published.pop(name))
    assert not published
    split = load_data(str(real_data / "cue_conflict"))
    assert (len(split), set(split.classes)) == (64, {name for name, _ in lines})
    assert np.isin(split.labels.numpy(), np.arange(16)).all()
