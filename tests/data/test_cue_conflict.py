import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of, imagenet16, is_cue_conflict
from vitlens.data.digits import digits
from vitlens.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images of three shapes, two of them of one source; dogs appear as a texture alone."""
    for name in ("cat/cat1-dog2", "cat/cat1-bear3", "cat/cat2-cat1", "bear/bear4-cat10", "bear/bear5-dog1"):
        place = tmp_path / f"{name}.png"
        place.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (10, 20, 30)).save(place)
    return tmp_path


def test_the_layout_is_read(folder):
    split = load_data(str(folder), part="test")
    assert split.classes == ("bear", "cat", "dog")
    assert split.files == (
        "bear/bear4-cat10.png", "bear/bear5-dog1.png", "cat/cat1-bear3.png", "cat/cat1-dog2.png", "cat/cat2-cat1.png",
    )  # fmt: skip
    cues = cues_of(split)
    assert cues.shape.tolist() == split.labels.tolist() == [0, 0, 1, 1, 1]
    assert cues.texture.tolist() == [1, 2, 0, 2, 1]
    assert split.notes[-1].endswith("its label is the shape.")
    assert cues.conflict.tolist() == [True, True, True, True, False]
    assert cues.source.tolist() == split.groups.tolist() == [0, 1, 2, 2, 3]


def test_other_folders_are_not_taken_for_one(folder):
    assert is_cue_conflict(folder)
    assert cues_of(load_data(str(folder), part="test").pick(torch.arange(3))) is not None
    Image.new("RGB", (8, 8)).save(folder / "cat" / "dog1-cat1.png")
    assert not is_cue_conflict(folder)
    assert cues_of(digits("test").limit(3)) is None


def test_nobody_trains_on_it(folder):
    with pytest.raises(DataError, match="they are for vitlens compare"):
        load_data(str(folder), part="train")


def test_the_sixteen_are_those_of_the_authors(real_data):
    published = json.loads((real_data / "cue_conflict" / "category_to_imagenet_index.json").read_text())
    assert {name: list(indices) for name, indices in imagenet16().items()} == {
        name: sorted(indices) for name, indices in published.items()
    }


def test_no_class_of_imagenet_stands_for_two():
    every = [index for indices in imagenet16().values() for index in indices]
    assert len(every) == len(set(every)) == 207
    assert len(imagenet16()) == 16


def test_the_published_stimuli(real_data):
    root = real_data / "cue_conflict"
    assert is_cue_conflict(root)
    split = load_data(str(root), part="test")
    assert len(split) == 64
    assert set(split.classes) == set(imagenet16())
    assert cues_of(split).conflict.sum() <= 64
