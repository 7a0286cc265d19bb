"""The cache of features: what was written comes back, and what is half-written, foreign or old is built again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlens.analysis.features import features as module
from vitlens.analysis.features.features import FeatureCache
from vitlens.errors import InputError

VALUES = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
ABOUT = {"model": "a", "data": "b", "pool": "cls", "norm": True}


def written_cache(folder: Path, *, about: dict[str, object] = ABOUT, name: str = "block-0") -> FeatureCache:
    shelf = FeatureCache(folder, about)
    with shelf.writing(name, (10, 6)) as file:
        for part in VALUES.split(4):
            file.write(part.numpy().tobytes())
    return shelf


def recalled(shelf: FeatureCache) -> Tensor:
    found, notes = shelf.recall(["block-0"])
    assert notes == []
    return found["block-0"]


def assert_ignored(shelf: FeatureCache) -> None:
    found, (note,) = shelf.recall(["block-0"])
    assert found == {}
    assert note.endswith("block-0.npy ignored and built again: incomplete, damaged or of another version")


def test_what_is_written_comes_back_bit_by_bit(tmp_path):
    shelf = written_cache(tmp_path / "cache")
    assert torch.equal(recalled(shelf), VALUES)
    assert np.array_equal(np.load(shelf.file("block-0"), mmap_mode="r"), VALUES.numpy())  # numpy itself reads it
    assert [path.name for path in shelf.file("block-0").parent.iterdir()] == ["block-0.npy"]


def test_what_is_not_there_is_no_fault(tmp_path):
    shelf = written_cache(tmp_path)
    assert shelf.recall(["block-1"]) == ({}, [])
    assert FeatureCache(tmp_path, {**ABOUT, "data": "c"}).recall(["block-0"]) == ({}, [])


def test_changing_what_was_recalled_does_not_reach_the_file(tmp_path):
    shelf = written_cache(tmp_path)
    recalled(shelf).add_(1)
    assert torch.equal(recalled(shelf), VALUES)


def test_another_version_is_ignored(tmp_path, monkeypatch):
    shelf = written_cache(tmp_path)
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    assert_ignored(shelf)


@pytest.mark.parametrize("left", [0, 5, 100, 300])
def test_a_half_written_file_is_ignored(tmp_path, left):
    shelf = written_cache(tmp_path)
    file = shelf.file("block-0")
    file.write_bytes(file.read_bytes()[:left])
    assert_ignored(shelf)


@pytest.mark.parametrize("place", [0, 20, -4, -40])
def test_a_damaged_file_is_ignored(tmp_path, place):
    shelf = written_cache(tmp_path)
    whole = bytearray(shelf.file("block-0").read_bytes())
    whole[place] ^= 1
    shelf.file("block-0").write_bytes(whole)
    assert_ignored(shelf)


@pytest.mark.parametrize("other", [{"about": {**ABOUT, "model": "c"}}, {"name": "block-1"}])
def test_a_file_of_something_else_is_ignored(tmp_path, other):
    shelf = written_cache(tmp_path)
    foreign = written_cache(tmp_path, **other).file(other.get("name", "block-0"))
    shelf.file("block-0").write_bytes(foreign.read_bytes())
    assert_ignored(shelf)


def write_and_stop(shelf: FeatureCache) -> None:
    with shelf.writing("block-0", (10, 6)) as file:
        file.write(bytes(96))
        raise KeyboardInterrupt


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path):
    shelf = written_cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_and_stop(shelf)
    assert torch.equal(recalled(shelf), VALUES)  # the old file is as it was
    assert len(list(shelf.file("block-0").parent.iterdir())) == 1


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match=r"expected a folder for cached features at .*cache, found a file"):
        FeatureCache(tmp_path / "cache", ABOUT)


def test_two_that_write_the_same_do_not_disturb_a_third(tmp_path):
    shelf = written_cache(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(lambda: [written_cache(tmp_path) for _ in range(5)]) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            assert torch.equal(recalled(shelf), VALUES)
    assert all(len(writer.result()) == 5 for writer in writers)
