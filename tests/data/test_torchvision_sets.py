"""Without a network: torchvision's classes are stood in for by ones that hold a few images."""

import socket
import urllib.error

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from vitlens.data import torchvision_sets
from vitlens.data.catalogue import load_data
from vitlens.data.registry import SETS
from vitlens.data.torchvision_sets import options_of
from vitlens.errors import DataError
from vitlens.preprocessing import Preprocessing


@pytest.mark.parametrize("name", [name for name, known in SETS.items() if known.torchvision])
def test_torchvision_has_the_class_and_takes_our_options(name):
    """A wrong option is a TypeError or ValueError; a right one ends in "not found" or, later, in our DataError."""
    make = getattr(torchvision.datasets, SETS[name].torchvision)
    for part in ("train", "test"):
        options = options_of(SETS[name], part)
        with pytest.raises((RuntimeError, OSError)):
            make("/nowhere", download=False, **options)


def test_without_a_network_it_is_one_line(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise urllib.error.URLError(OSError("Name or service not known"))

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(DataError, match=r"expected CIFAR-10 in .* or a network .* found neither") as caught:
        load_data("cifar10", part="test", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_server_that_says_nothing_is_given_up_on(tmp_path, monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
    address = f"http://127.0.0.1:{server.getsockname()[1]}/x.tar.gz"
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", address)
    monkeypatch.setattr(torchvision_sets, "TIMEOUT", 0.3)
    with server, pytest.raises(DataError, match="timed out"):
        load_data("cifar10", part="test", data_dir=tmp_path)
    assert socket.getdefaulttimeout() is None


class Arrays:
    """Like CIFAR10: all pixels as one array."""

    classes = ("plane", "car")

    def __init__(self, root, train, download):
        self.data = np.arange(4 * 5 * 6 * 3, dtype=np.uint8).reshape(4, 5, 6, 3)
        self.targets = [0, 1, 1, 0] if train else [1, 1, 1, 1]


class Photographs:
    """Like Food101: images of many sizes, opened when asked for."""

    classes = ("pie", "soup")

    def __init__(self, root, split, download):
        self._labels = [0, 1, 0]

    def __getitem__(self, index):
        return Image.new("RGB", (20 + index, 30), (index, 0, 0)), self._labels[index]


def test_arrays_keep_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Arrays)
    split = load_data("cifar10", part="train", data_dir=tmp_path)
    assert split.size == (5, 6)
    assert split.labels.tolist() == [0, 1, 1, 0]
    assert split.classes == ("plane", "car")
    expected = Arrays(None, True, False).data[2].transpose(2, 0, 1)
    assert np.array_equal(split.source.read(torch.tensor([2]))[0].numpy(), expected)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_photographs_are_resized_now_or_later(tmp_path, monkeypatch, memory):
    monkeypatch.setattr(torchvision.datasets, "Food101", Photographs)
    monkeypatch.setattr(torchvision_sets, "MEMORY_LIMIT", memory)
    split = load_data("food101", part="test", data_dir=tmp_path, preprocessing=Preprocessing((8, 8), resize=10))
    assert split.size == (8, 8)
    assert len(split) == 3
    assert split.source.read(torch.tensor([2, 1]))[:, 0, 0, 0].tolist() == [2, 1]
