"""Weights kept while training: which epochs, what is in them, and that a resumed run has each once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_loop import InterruptedTrainingError, interrupting, state, trained
from tests.training.tiny import tiny_model, tiny_recipe
from vitlens.errors import InputError
from vitlens.models import loading, saved
from vitlens.training import account
from vitlens.training.kept import FOLDER, Kept, forget_after, keep_weights, read_kept, weights_over_training


@pytest.fixture(autouse=True)
def told_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "PROGRESS_INTERVAL", 0.0)


def epochs(folder: Path) -> list[int]:
    return [kept.epochs for kept in read_kept(folder)]


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (5, [0]), (None, [])])
def test_every_so_many_epochs_and_before_the_first(tmp_path: Path, every: int | None, expected: list[int]) -> None:
    trained(tmp_path, keep_every=every)
    assert epochs(tmp_path) == expected
    assert (tmp_path / FOLDER).exists() == bool(expected)
    assert len(weights_over_training(tmp_path)) == (len({*expected, 3}) if expected else 0)


def test_they_are_the_weights_that_the_run_would_have_ended_with(tmp_path: Path) -> None:
    """Epoch 0 the initial ones; the last those of model.safetensors, averaged as they are, in half precision."""
    initial = state(tiny_model())
    model, _ = trained(tmp_path, keep_every=1)
    for epoch, expected in ((0, initial), (3, state(model))):
        found = load_file(tmp_path / FOLDER / f"epoch-{epoch:04}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value.half()) for name, value in expected.items())
    second = load_file(tmp_path / FOLDER / "epoch-0002.safetensors")
    assert not torch.equal(second["head.weight"], state(model)["head.weight"].half())


def test_a_kept_file_is_a_model(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, keep_every=3)
    loaded = loading.load(str(read_kept(tmp_path)[-1].file))
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
    before = {path.name: path.read_bytes() for path in (tmp_path / "cut" / FOLDER).iterdir()}
    assert "epoch-0000.safetensors" in before
    (tmp_path / "cut" / FOLDER / ".epoch-0001-abc.safetensors").write_bytes(b"half-written")
    trained(tmp_path / "cut", tiny_model(seed=7), resume=True, keep_every=1)
    after, whole = ({p.name: p.read_bytes() for p in (tmp_path / name / FOLDER).iterdir()} for name in ("cut", "whole"))
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
    found = weights_over_training(tmp_path)
    assert [kept.epochs for kept in found] == [0, 2, 3]
    assert found[-1] == Kept(3, tmp_path / saved.WEIGHTS_FILE)
    trained(tmp_path / "b", keep_every=3)
    assert [kept.file.name for kept in weights_over_training(tmp_path / "b")] == [
        "epoch-0000.safetensors",
        "model.safetensors",
    ]


def test_other_files_are_let_be(tmp_path: Path) -> None:
    keep_weights(tmp_path, tiny_model(), epochs=12345)
    keep_weights(tmp_path, tiny_model(), epochs=4)
    (tmp_path / FOLDER / "mine.safetensors").write_bytes(b"mine")
    assert epochs(tmp_path) == [4, 12345]
    forget_after(tmp_path, 4)
    assert epochs(tmp_path) == [4]
    assert (tmp_path / FOLDER / "mine.safetensors").exists()


@pytest.mark.parametrize("every", [0, -1])
def test_no_less_than_an_epoch(tmp_path: Path, every: int) -> None:
    with pytest.raises(InputError, match=f"expected --keep-every at least 1, found {every}"):
        trained(tmp_path, keep_every=every)
    assert not list(tmp_path.iterdir())
