"""Folders: classes and parts, Tiny ImageNet's, cue conflicts, and images without labels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.damage import refused
from vitlens.arrays import read_arrays
from vitlens.cli.main import run
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of, imagenet16, is_cue_conflict
from vitlens.data.digits import digits
from vitlens.data.folder import list_folder, list_images
from vitlens.errors import DataError
from vitlens.names import imagenet_classes, imagenet_indices
from vitlens.preprocessing import Preprocessing

SMALL = Preprocessing(size=(4, 4))


def put(folder: Path, *names: str, value: int = 100, size: tuple[int, int] = (5, 4)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", size, (value, value, value)).save(folder / name)


def test_train_and_test_inside_are_the_parts(tmp_path):
    put(tmp_path / "train/cat", "a.png", "b.png", value=1)
    put(tmp_path / "train/dog", "a.png", value=2)
    put(tmp_path / "test/dog", "c.png", value=3)
    train, test = (load_data(str(tmp_path), part=part, preprocessing=SMALL) for part in ("train", "test"))
    assert train.classes == test.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 1]
    assert test.labels.tolist() == [1]
    assert train.files == ("train/cat/a.png", "train/cat/b.png", "train/dog/a.png")
    assert test.source.read(torch.tensor([0]))[0, :, 0, 0].tolist() == [3, 3, 3]
    assert not test.notes


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_val_serves_as_test_and_alone_is_for_evaluation(tmp_path, name):
    put(tmp_path / name / "cat", "b.png")
    assert list_folder(tmp_path, part="test").paths == (tmp_path / name / "cat/b.png",)
    with pytest.raises(DataError, match="expected train/"):
        list_folder(tmp_path, part="train")
    put(tmp_path / "train/cat", "a.png")
    assert list_folder(tmp_path, part="test").paths == (tmp_path / name / "cat/b.png",)
    assert list_folder(tmp_path, part="train").paths == (tmp_path / "train/cat/a.png",)


@pytest.mark.parametrize("top", ["", "train"])
def test_without_a_test_part_a_fifth_of_each_class_is_held_out(tmp_path, top):
    for name in ("cat", "dog"):
        put(tmp_path / top / name, *(f"{index}.png" for index in range(10)))
    train, test = (list_folder(tmp_path, part=part, seed=1) for part in ("train", "test"))
    assert sorted(test.labels) == [0, 0, 1, 1]
    assert all(("cat", "dog")[label] in path.parts for path, label in zip(test.paths, test.labels))
    assert sorted(train.paths + test.paths) == sorted(tmp_path.rglob("*.png"))
    assert "seed 1" in test.notes[0]
    whole = list_folder(tmp_path, part="test", whole=True)
    assert (len(whole.paths), whole.notes) == (20, ())


def test_wnids_get_imagenets_indices_and_names(tmp_path):
    put(tmp_path / "n15075141", "a.png")
    put(tmp_path / "n01440764", "a.png")
    split = load_data(str(tmp_path), preprocessing=SMALL)
    assert split.labels.tolist() == [0, 999]
    assert split.classes == imagenet_classes()


def test_loose_images_have_no_labels_and_no_parts_and_may_share_a_size(tmp_path):
    put(tmp_path, "b.png", "a.JPG")
    (tmp_path / "notes.txt").write_text("hello")
    for part in ("train", "test"):
        split = load_data(str(tmp_path), part=part, preprocessing=SMALL)
        assert (split.files, split.labels, split.classes) == (("a.JPG", "b.png"), None, ())
    assert load_data(str(tmp_path)).size == (4, 5)
    put(tmp_path, "c.png", size=(9, 9))
    assert load_data(str(tmp_path)).size == (224, 224)
    put(tmp_path / "cat", "a.png", "b.png")  # images beside class folders are left out, and counted
    listing = list_folder(tmp_path, part="test", whole=True)
    assert len(listing.paths) == 2
    assert "3 images beside" in listing.notes[0]


def test_hidden_files_and_empty_folders_are_no_classes_and_unreadable_images_lose_their_label(tmp_path):
    put(tmp_path / "cat", "a.png", "c.png", "._a.png")
    put(tmp_path / "dog", "d.png")
    put(tmp_path / ".cache", "a.png")
    put(tmp_path / "__MACOSX", "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cat/b.png").write_text("no")
    split = load_data(str(tmp_path), preprocessing=SMALL, whole=True)
    assert split.classes == ("cat", "dog")
    assert split.files == ("cat/a.png", "cat/c.png", "dog/d.png")
    assert split.labels.tolist() == [0, 0, 1]
    assert [skipped.file for skipped in split.skipped] == [str(tmp_path / "cat/b.png")]


@pytest.mark.parametrize("inside", [(), ("cat",), ("train", "test")])
def test_a_folder_without_images_is_refused(tmp_path, inside):
    for name in inside:
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"expected images .* found none"):
        load_data(str(tmp_path))


def test_listed_images_keep_the_order_given(tmp_path):
    put(tmp_path / "photos/cat", "b.png", "a.png")
    put(tmp_path, "z.png")
    images = list_images([tmp_path / "z.png", tmp_path / "photos"])
    assert [path.name for path in images] == ["z.png", "a.png", "b.png"]
    with pytest.raises(DataError, match=r"found nothing at .*cat\.jpg"):
        list_images([tmp_path / "cat.jpg"])


def test_deit_sees_its_photographs_as_it_should(real_data):
    """The stored reference's files and labels are those that we list."""
    reference = read_arrays(real_data / "deit_tiny_reference.npz")
    listing = list_folder(real_data / "photos", part="test", whole=True)
    ours = {path.name: label for path, label in zip(listing.paths, listing.labels)}
    theirs = {str(name).split("/")[-1]: int(label) for name, label in zip(reference["files"], reference["labels"])}
    assert ours == theirs


WNIDS = ("n02124075", "n01443537", "n02509815")  # Egyptian cat, goldfish, lesser panda


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Tiny ImageNet as it is distributed, in miniature."""
    root, size = tmp_path / "tiny-imagenet-200", (8, 8)
    lines = []
    for number, wnid in enumerate(WNIDS):
        put(root / "train" / wnid / "images", f"{wnid}_0.JPEG", f"{wnid}_1.JPEG", value=40 * number, size=size)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t7\t7\n")
        put(root / "val" / "images", f"val_{number}.JPEG", value=200 + 10 * number, size=size)
        lines.append(f"val_{number}.JPEG\t{WNIDS[2 - number]}\t0\t0\t7\t7\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    put(root / "test" / "images", "test_0.JPEG", size=size)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    words = {"n02124075": "Egyptian cat", "n01443537": "goldfish, Carassius auratus", "n00000001": "entity"}
    (root / "words.txt").write_text("".join(f"{wnid}\t{name}\n" for wnid, name in words.items()))
    return root


def test_train_and_val_of_tiny_imagenet_are_the_parts_and_words_name_the_classes(tiny):
    train, test = (load_data(str(tiny), part=part) for part in ("train", "test"))
    lesser_panda = imagenet_classes()[imagenet_indices()["n02509815"]]  # not in this words.txt
    assert train.classes == test.classes == ("goldfish", "Egyptian cat", lesser_panda)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.files == tuple(f"val/images/val_{number}.JPEG" for number in range(3))
    assert test.labels.tolist() == [2, 0, 1]
    assert test.source.read(torch.arange(3)).float().mean((1, 2, 3)).round().tolist() == [200, 210, 220]
    assert "val/" in test.notes[0]
    assert "train/" in train.notes[0]
    put(tiny / "val" / "images", "val_9.JPEG", size=(8, 8))  # without a line
    (tiny / "words.txt").write_text("n02124075\tcat\nn01443537\tcat\n")
    split = load_data(str(tiny))
    assert len(split) == 3
    assert "1 images without a line" in split.notes[0]
    assert split.classes[:2] == ("cat (n01443537)", "cat (n02124075)")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("val/val_annotations.txt", b"val_0.JPEG n01443537\n"),
        ("val/val_annotations.txt", b"val_0.JPEG\tgoldfish\n"),
        ("val/val_annotations.txt", b"\xff\xfe\x00"),
        ("val/val_annotations.txt", b"../other.JPEG\tn01443537\n"),
        ("wnids.txt", b"goldfish\n"),
    ],
)
def test_lines_that_are_not_so_are_refused_by_name(tiny, file, content, capsys):
    (tiny / file).write_bytes(content)
    with pytest.raises(DataError, match=Path(file).name):
        load_data(str(tiny))
    assert refused(run(["evaluate", "vit-digits", "--data", str(tiny)]), capsys.readouterr().err)


def test_cue_conflicts_are_labelled_by_shape(tmp_path):
    """Five images of four sources; dogs appear as a texture alone."""
    for name in ("cat/cat1-dog2", "cat/cat1-bear3", "cat/cat2-cat1", "bear/bear4-cat10", "bear/bear5-dog1"):
        put((tmp_path / name).parent, f"{Path(name).name}.png", size=(8, 8))
    split = load_data(str(tmp_path))
    assert split.classes == ("bear", "cat", "dog")
    assert [Path(file).stem for file in split.files] == [
        "bear4-cat10", "bear5-dog1", "cat1-bear3", "cat1-dog2", "cat2-cat1",
    ]  # fmt: skip
    cues = cues_of(split)
    assert cues.shape.tolist() == split.labels.tolist() == [0, 0, 1, 1, 1]
    assert cues.texture.tolist() == [1, 2, 0, 2, 1]
    assert cues.conflict.tolist() == [True, True, True, True, False]
    assert cues.source.tolist() == split.groups.tolist() == [0, 1, 2, 2, 3]
    assert split.notes[-1].endswith("its label is the shape.")
    assert cues_of(digits("test").limit(3)) is None
    with pytest.raises(DataError, match="they are for vitlens compare"):
        load_data(str(tmp_path), part="train")
    put(tmp_path / "cat", "dog1-cat1.png")
    assert not is_cue_conflict(tmp_path)


def test_the_published_stimuli_and_their_sixteen_classes(real_data):
    published = json.loads((real_data / "cue_conflict" / "category_to_imagenet_index.json").read_text())
    assert {name: list(indices) for name, indices in imagenet16().items()} == {
        name: sorted(indices) for name, indices in published.items()
    }
    every = [index for indices in imagenet16().values() for index in indices]
    assert (len(every), len(set(every)), len(imagenet16())) == (207, 207, 16)
    split = load_data(str(real_data / "cue_conflict"))
    assert (len(split), set(split.classes)) == (64, set(imagenet16()))
    assert cues_of(split) is not None
    assert np.isin(split.labels.numpy(), np.arange(16)).all()
