import errno
import resource
from pathlib import Path

import pytest
import torch

from tests.training.tiny import tiny_model
from vitlens.errors import InputError, StorageError
from vitlens.training import checkpoint as module
from vitlens.training.average import Average
from vitlens.training.checkpoint import (
    FOLDER,
    Checkpoint,
    collect,
    read_checkpoint,
    require_same,
    restore,
    write_checkpoint,
)
from vitlens.training.optimiser import Optimiser


def trained(seed: int, steps: int) -> tuple[torch.nn.Module, Optimiser, Average]:
    model = tiny_model(seed=seed)
    model.train().requires_grad_(True)
    optimiser = Optimiser(model.module, weight_decay=0.1, betas=(0.9, 0.99))
    optimiser.set_rate(0.01)
    average = Average(model.module, decay=0.9)
    for _ in range(steps):
        model(torch.rand(4, 3, 8, 12)).square().sum().backward()
        optimiser.step()
        average.update(model.module)
    return model.module, optimiser, average


@pytest.mark.parametrize("steps", [0, 3])
def test_everything_comes_back(tmp_path: Path, steps: int) -> None:
    saved = trained(0, steps)
    write_checkpoint(tmp_path, Checkpoint(collect(*saved), {"step": steps}))
    found = read_checkpoint(tmp_path)
    assert found is not None
    assert found.facts == {"step": steps}
    other = trained(1, 0)
    restore(found, *other)
    before, after = collect(*saved), collect(*other)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(name.startswith("optimiser/") for name in before) == bool(steps)


def test_none_where_none_was_written(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None


def test_a_broken_one_is_one_line(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, {}))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match="expected a checkpoint in"):
        read_checkpoint(tmp_path)


def test_what_a_kill_left_is_cleared(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, {}))
    (file,) = (tmp_path / FOLDER).iterdir()
    (file.parent / f".{file.stem}-0badcafe{file.suffix}").write_bytes(b"half")
    assert read_checkpoint(tmp_path) is not None
    assert list((tmp_path / FOLDER).iterdir()) == [file]


def test_a_file_that_may_not_grow_keeps_the_previous_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, {"step": 1}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses the write, as a full disk does
    try:
        with pytest.raises(StorageError, match="expected room on the disk"):
            write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(30000)}, {"step": 2}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = read_checkpoint(tmp_path)
    assert found is not None
    assert found.facts == {"step": 1}
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_full_disk_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(StorageError, match="found it full"):
        write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, {}))


def test_the_first_difference_is_named() -> None:
    now = {"recipe": {"epochs": 3, "betas": (0.9, 0.99)}, "seed": 0}
    require_same({"recipe": {"epochs": 3, "betas": [0.9, 0.99]}, "seed": 0}, now, folder=Path("run"))
    with pytest.raises(InputError, match=r"resume run with its recipe\.epochs = 5, found 3"):
        require_same({"recipe": {"epochs": 5, "betas": [0.9, 0.99]}, "seed": 0}, now, folder=Path("run"))
