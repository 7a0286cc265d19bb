"""From a name or a path to a Split: embedded sets, torchvision's, and wrong names."""

import socket
import urllib.error

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from tests.kit.datasets import fitted, limited, pixels_of
from vitlens import load_data
from vitlens.data.registry import SETS
from vitlens.errors import DataError, UnknownNameError


@pytest.mark.parametrize("name", [name for name, entry in SETS.items() if not entry.download])
def test_the_registry_tells_the_truth_of_the_embedded_data(name):
    entry = SETS[name]
    split = load_data(name)
    assert (entry.name, entry.classes, entry.size) == (name, len(split.classes), split.size)
    assert (split.name, split.title) == (name, entry.title)


def test_a_canvas_and_scenes_are_for_digits_alone(tmp_path):
    for name in (str(tmp_path), "shapes"):
        for option in ({"canvas": 64}, {"scenes": 2}):
            with pytest.raises(DataError, match="data digits"):
                load_data(name, **option)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name):
    with pytest.raises(UnknownNameError, match=f"no data '{name}'"):
        load_data(name)


@pytest.mark.parametrize("name", [name for name, entry in SETS.items() if entry.torchvision])
def test_torchvision_has_the_class_and_takes_our_options(name, tmp_path, monkeypatch):
    """A wrong option is a TypeError or ValueError; a right one ends in our one line without a
    network.
    """

    def no_network(*_, **__):
        raise urllib.error.URLError(OSError("Name or service not known"))

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setattr("urllib.request.urlretrieve", no_network)
    for part in ("train", "test"):
        with pytest.raises(DataError, match="or a network") as caught:
            load_data(name, part=part, data_dir=tmp_path / "data")
        assert "\n" not in str(caught.value)


def test_a_server_that_says_nothing_is_given_up_on(tmp_path, monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
    address = f"http://127.0.0.1:{server.getsockname()[1]}/x.tar.gz"
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", address)
    with server, limited(TIMEOUT=0.3), pytest.raises(DataError, match="timed out"):
        load_data("cifar10", data_dir=tmp_path)
    assert socket.getdefaulttimeout() is None


class Arrays:
    """Like CIFAR10: all pixels as one array."""

    classes = ("plane", "car")

    def __init__(self, root, train, download):
        self.data = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
        self.targets = [0, 1, 1, 0] if train else [1, 1, 1, 1]


class Turned:
    """Like SVHN: channels first, no names of classes, and a part by name."""

    def __init__(self, root, split, download):
        self.data = np.arange(4 * 3 * 5 * 6, dtype=np.uint8).reshape(4, 3, 5, 6)
        self.labels = np.array([0, 9, 9, 0] if split == "train" else [9] * 4)


class Photographs:
    """Like EuroSAT, without parts, Food101 and the pets: images of many sizes, opened late."""

    classes = ("pie", "soup")

    def __init__(self, root, download, split="none"):
        self._labels = [0, 1, 0]
        self.split = split

    def __getitem__(self, index):
        return Image.new("RGB", (20 + index, 30), (index, len(self.split), 0)), self._labels[index]


def test_arrays_keep_their_size_and_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Arrays)
    monkeypatch.setattr(torchvision.datasets, "SVHN", Turned)
    split = load_data("cifar10", part="train", data_dir=tmp_path)
    assert (split.size, split.classes, split.labels.tolist(), split.notes) == (
        (5, 6),
        Arrays.classes,
        [0, 1, 1, 0],
        (),
    )
    assert np.array_equal(
        pixels_of(split)[2].numpy(), Arrays(None, True, False).data[2].transpose(2, 0, 1)
    )
    assert load_data("cifar10", data_dir=tmp_path).labels.tolist() == [1] * 4
    first = load_data("svhn", part="train", data_dir=tmp_path)
    assert (first.size, first.classes, first.labels.tolist()) == (
        (5, 6),
        tuple("0123456789"),
        [0, 9, 9, 0],
    )
    assert np.array_equal(pixels_of(first).numpy(), Turned(None, "train", False).data)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_photographs_are_resized_now_or_later_and_sets_without_parts_divided(
    tmp_path, monkeypatch, memory
):
    parts = {
        "food101": ("Food101", "train"),
        "eurosat": ("EuroSAT", "none"),
        "pets": ("OxfordIIITPet", "trainval"),
    }
    with limited(MEMORY_LIMIT=memory):
        for name, (title, part) in parts.items():
            monkeypatch.setattr(torchvision.datasets, title, Photographs)
            split = load_data(
                name,
                part="train",
                data_dir=tmp_path,
                preprocessing=fitted((8, 8), resize=10),
                whole=True,
            )
            assert (len(split), split.size) == (3, SETS[name].size or (8, 8))
            read = split.source.read(torch.tensor([2, 1]))
            assert read.shape == (2, 3, *split.size)
            assert read[:, :2, 0, 0].tolist() == [[2, len(part)], [1, len(part)]]
        assert load_data("food101").size == (224, 224)
        assert [load_data("eurosat", part=part).labels.tolist() for part in ("train", "test")] == [
            [0, 1],
            [0],
        ]
        assert "seed 3" in load_data("eurosat", seed=3).notes[0]
