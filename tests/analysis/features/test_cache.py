"""The cache of features: what was written comes back, and what is half-written, foreign or old is built again."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlens.analysis.features import cache as feature_cache
from vitlens.analysis.features.cache import FeatureCache
from vitlens.errors import InputError

VALUES = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
ABOUT = {"model": "a", "data": "b", "pool": "cls", "norm": True}


def written_cache(
    folder: Path, values: Tensor = VALUES, *, about: dict[str, object] = ABOUT, name: str = "block-0"
) -> FeatureCache:
    shelf = FeatureCache(folder, about)
    with shelf.writing(name, rows=len(values), width=values.shape[1]) as writer:
        for part in values.split(4):
            writer.add(part)
    return shelf


def test_what_is_written_comes_back_bit_by_bit(tmp_path):
    shelf = written_cache(tmp_path / "cache")
    found = shelf.recall("block-0", rows=10, width=6)
    assert found.reason == ""
    assert torch.equal(found.values, VALUES)
    assert torch.equal(load_file(shelf.file("block-0"))["features"], VALUES)  # safetensors itself reads it
    assert [path.name for path in shelf.file("block-0").parent.iterdir()] == ["block-0.safetensors"]


def test_what_is_not_there_is_no_fault(tmp_path):
    shelf = written_cache(tmp_path)
    assert shelf.recall("block-1", rows=10, width=6) == (None, "")
    assert FeatureCache(tmp_path, {**ABOUT, "data": "c"}).recall("block-0", rows=10, width=6) == (None, "")


def test_changing_what_was_recalled_does_not_reach_the_file(tmp_path):
    shelf = written_cache(tmp_path)
    found = shelf.recall("block-0", rows=10, width=6).values
    found += 1
    assert torch.equal(shelf.recall("block-0", rows=10, width=6).values, VALUES)


def reason(shelf: FeatureCache) -> str:
    found = shelf.recall("block-0", rows=10, width=6)
    assert found.values is None
    return found.reason


def test_another_version_is_ignored(tmp_path, monkeypatch):
    shelf = written_cache(tmp_path)
    monkeypatch.setattr(feature_cache, "VERSION", feature_cache.VERSION + 1)
    assert reason(shelf) == "of version 1, not 2"


@pytest.mark.parametrize("left", [0, 5, 100, 400])
def test_a_half_written_file_is_ignored(tmp_path, left):
    shelf = written_cache(tmp_path)
    whole = shelf.file("block-0").read_bytes()
    shelf.file("block-0").write_bytes(whole[:left])
    assert reason(shelf).startswith("half-written or damaged")


def test_a_damaged_file_is_ignored(tmp_path):
    shelf = written_cache(tmp_path)
    whole = bytearray(shelf.file("block-0").read_bytes())
    whole[-4] ^= 1
    shelf.file("block-0").write_bytes(whole)
    assert reason(shelf) == "damaged (its content is not what was written)"


def test_a_file_of_something_else_is_ignored(tmp_path):
    shelf = written_cache(tmp_path)
    shelf.file("block-0").write_bytes(
        written_cache(tmp_path, about={**ABOUT, "model": "c"}).file("block-0").read_bytes()
    )
    assert reason(shelf) == "of another model, data or layer"
    shelf.file("block-0").write_bytes(written_cache(tmp_path, name="block-1").file("block-1").read_bytes())
    assert reason(shelf) == "of another model, data or layer"
    header = json.dumps({"other": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    shelf.file("block-0").write_bytes(len(header).to_bytes(8, "little") + header)
    assert reason(shelf) == "of something else than features"


def test_another_shape_is_ignored(tmp_path):
    written_cache(tmp_path, VALUES[:9])
    assert reason(FeatureCache(tmp_path, ABOUT)) == "of another shape, (9, 6)"


def write_and_stop(shelf: FeatureCache) -> None:
    with shelf.writing("block-0", rows=10, width=6) as writer:
        writer.add(VALUES[:4] + 1)
        raise KeyboardInterrupt


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path):
    shelf = written_cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_and_stop(shelf)
    assert torch.equal(shelf.recall("block-0", rows=10, width=6).values, VALUES)  # the old file is as it was
    assert len(list(shelf.file("block-0").parent.iterdir())) == 1


def test_rows_too_few_too_many_or_too_wide(tmp_path):
    shelf = FeatureCache(tmp_path, ABOUT)
    with pytest.raises(InputError, match="expected 10 rows, found 4"), shelf.writing("a", rows=10, width=6) as writer:
        writer.add(VALUES[:4])
    for wrong in (VALUES, VALUES[:4, :5]):
        with (
            pytest.raises(InputError, match="expected 4 more rows of 6"),
            shelf.writing("a", rows=4, width=6) as writer,
        ):
            writer.add(wrong)
    assert not shelf.file("a").exists()


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match=r"expected a folder for cached features at .*cache, found a file"):
        FeatureCache(tmp_path / "cache", ABOUT)


def test_two_that_write_the_same_do_not_disturb_a_third(tmp_path):
    shelf = written_cache(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(lambda: [written_cache(tmp_path) for _ in range(5)]) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            found = shelf.recall("block-0", rows=10, width=6)
            assert found.reason == ""
            assert torch.equal(found.values, VALUES)
    assert all(len(writer.result()) == 5 for writer in writers)


@pytest.mark.parametrize(
    "odd", [torch.tensor(1.0), torch.zeros(0), torch.zeros(3, 2, 1), torch.zeros(3, 2, dtype=torch.complex64)]
)
def test_a_file_of_another_form_is_not_used(tmp_path, odd):
    shelf = FeatureCache(tmp_path, {"model": "m"})
    file = shelf.file("a")
    file.parent.mkdir(parents=True)
    digest = "0" * 64
    about = json.dumps({"model": "m", "layer": "a"}, sort_keys=True)
    for _ in range(2):  # once to know the digest
        save_file({"features": odd}, file, metadata={"about": about, "version": "1", "sha256": digest})
        content = file.read_bytes()
        digest = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    found = shelf.recall("a", rows=3)
    assert found.values is None
    assert "shape" in found.reason
