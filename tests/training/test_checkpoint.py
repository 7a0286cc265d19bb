"""A checkpoint is read as it was written or refused; kept weights: which epochs, and each once in a resumed run."""

import errno
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_loop import InterruptedTrainingError, interrupting, state, trained
from tests.training.tiny import tiny_model, tiny_recipe
from vitlens.errors import InputError, StorageError
from vitlens.models import loading, saved
from vitlens.training import checkpoint as module
from vitlens.training import loop
from vitlens.training.checkpoint import (
    FOLDER,
    Checkpoint,
    Facts,
    KeptWeights,
    delete_kept_after,
    keep_weights,
    read_checkpoint,
    read_kept_weights,
    require_same,
    weights_over_training,
    write_checkpoint,
)
from vitlens.training.metrics import KEPT_FOLDER

FACTS = Facts({}, 1, 0.0, ())


def test_none_where_none_was_written(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None


def test_a_broken_checkpoint_is_a_one_line_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, FACTS))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match="expected a checkpoint in"):
        read_checkpoint(tmp_path)


def test_temporary_files_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, FACTS))
    (file,) = (tmp_path / FOLDER).iterdir()
    (file.parent / f".{file.stem}-0badcafe{file.suffix}").write_bytes(b"half")
    assert read_checkpoint(tmp_path) is not None
    assert list((tmp_path / FOLDER).iterdir()) == [file]


def test_a_refused_write_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, FACTS))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses the write, as a full disk does
    try:
        with pytest.raises(StorageError, match="expected room on the disk"):
            write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(30000)}, replace(FACTS, step=2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.facts == FACTS
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(StorageError, match="found it full"):
        write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, FACTS))


def test_the_first_difference_is_named() -> None:
    now = {"recipe": {"epochs": 3, "betas": (0.9, 0.99)}, "seed": 0}
    require_same({"recipe": {"epochs": 3, "betas": [0.9, 0.99]}, "seed": 0}, now, folder=Path("run"))
    with pytest.raises(InputError, match=r"resume run with its recipe\.epochs = 5, found 3"):
        require_same({"recipe": {"epochs": 5, "betas": [0.9, 0.99]}, "seed": 0}, now, folder=Path("run"))


@pytest.fixture(autouse=True)
def progress_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0.0)


def epochs(folder: Path) -> list[int]:
    return [kept.epochs for kept in read_kept_weights(folder)]


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (5, [0]), (None, [])])
def test_weights_are_kept_at_intervals_and_before_training(
    tmp_path: Path, every: int | None, expected: list[int]
) -> None:
    trained(tmp_path, keep_every=every)
    assert epochs(tmp_path) == expected
    assert (tmp_path / KEPT_FOLDER).exists() == bool(expected)
    assert len(weights_over_training(tmp_path)) == (len({*expected, 3}) if expected else 0)


def test_kept_weights_are_those_tested(tmp_path: Path) -> None:
    """Epoch 0 the initial ones; the last those of model.safetensors, averaged as they are, in half precision."""
    initial = state(tiny_model())
    model, _ = trained(tmp_path, keep_every=1)
    for epoch, expected in ((0, initial), (3, state(model))):
        saved_weights = load_file(tmp_path / KEPT_FOLDER / f"epoch-{epoch:04}.safetensors")
        assert saved_weights.keys() == expected.keys()
        assert all(torch.equal(saved_weights[name], value.half()) for name, value in expected.items())
    second = load_file(tmp_path / KEPT_FOLDER / "epoch-0002.safetensors")
    assert not torch.equal(second["head.weight"], state(model)["head.weight"].half())


def test_a_kept_file_is_a_model(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, keep_every=3)
    loaded = loading.load(str(read_kept_weights(tmp_path)[-1].file))
    images = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model.eval()(images), atol=5e-3, rtol=0)
    assert loaded.classes == model.classes


def test_keeping_changes_nothing_else(tmp_path: Path) -> None:
    with_them, _ = trained(tmp_path / "with", keep_every=1)
    without, _ = trained(tmp_path / "without")
    assert all(torch.equal(value, state(without)[name]) for name, value in state(with_them).items())


@pytest.mark.parametrize("at", [1, 5, 6, 11])
def test_a_resumed_run_has_each_once(tmp_path: Path, at: int) -> None:
    trained(tmp_path / "whole", keep_every=1)
    with pytest.raises(InterruptedTrainingError):
        trained(tmp_path / "cut", on_progress=interrupting(at), keep_every=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "cut" / KEPT_FOLDER).iterdir()}
    assert "epoch-0000.safetensors" in before
    (tmp_path / "cut" / KEPT_FOLDER / ".epoch-0001-abc.safetensors").write_bytes(b"half-written")
    trained(tmp_path / "cut", tiny_model(seed=7), resume=True, keep_every=1)
    after, whole = (
        {p.name: p.read_bytes() for p in (tmp_path / name / KEPT_FOLDER).iterdir()} for name in ("cut", "whole")
    )
    assert after == whole
    assert before.items() <= after.items()


def test_another_training_in_the_same_folder_starts_anew(tmp_path: Path) -> None:
    trained(tmp_path, keep_every=1)
    trained(tmp_path, recipe=tiny_recipe(epochs=1), keep_every=1)
    assert epochs(tmp_path) == [0, 1]
    trained(tmp_path, recipe=tiny_recipe(epochs=1))
    assert epochs(tmp_path) == []


def test_the_last_ones_are_the_model_in_full_precision(tmp_path: Path) -> None:
    trained(tmp_path, keep_every=2)
    weights = weights_over_training(tmp_path)
    assert [kept.epochs for kept in weights] == [0, 2, 3]
    assert weights[-1] == KeptWeights(3, tmp_path / saved.WEIGHTS_FILE)
    trained(tmp_path / "b", keep_every=3)
    assert [kept.file.name for kept in weights_over_training(tmp_path / "b")] == [
        "epoch-0000.safetensors",
        "model.safetensors",
    ]


def test_other_files_are_ignored(tmp_path: Path) -> None:
    keep_weights(tmp_path, tiny_model(), epochs=12345)
    keep_weights(tmp_path, tiny_model(), epochs=4)
    (tmp_path / KEPT_FOLDER / "mine.safetensors").write_bytes(b"mine")
    assert epochs(tmp_path) == [4, 12345]
    delete_kept_after(tmp_path, 4)
    assert epochs(tmp_path) == [4]
    assert (tmp_path / KEPT_FOLDER / "mine.safetensors").exists()


@pytest.mark.parametrize("every", [0, -1])
def test_intervals_below_one_epoch_are_refused(tmp_path: Path, every: int) -> None:
    with pytest.raises(InputError, match=f"expected --keep-every at least 1, found {every}"):
        trained(tmp_path, keep_every=every)
    assert not list(tmp_path.iterdir())
