"""Checkpoints and metrics are read as they were written or refused; kept weights: which epochs, and each once."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.trainings import (
    InterruptedTrainingError,
    interrupting,
    same,
    state,
    tiny_model,
    tiny_recipe,
    trained,
)
from vitlens.errors import InputError, StorageError
from vitlens.models import loading, saved
from vitlens.training import loop
from vitlens.training.checkpoint import (
    FOLDER,
    Facts,
    keep_weights,
    read_checkpoint,
    read_kept_weights,
    weights_over_training,
    write_checkpoint,
)
from vitlens.training.metrics import KEPT_FOLDER, METRICS_FILE, EpochMetrics, best_of, read_metrics, write_metrics

FACTS = Facts({"recipe": {"epochs": 5, "betas": [0.9, 0.99]}}, 1, 0.0, ())


@pytest.fixture(autouse=True)
def progress_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0.0)


def test_a_checkpoint_is_read_as_written_and_a_broken_one_refused(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path, FACTS, {"a": torch.ones(3)})
    (file,) = (tmp_path / FOLDER).iterdir()
    (file.parent / f".{file.stem}-0badcafe{file.suffix}").write_bytes(b"half")  # of a killed run
    facts, tensors = read_checkpoint(tmp_path) or (None, {})
    assert (facts, tensors["a"].tolist()) == (FACTS, [1, 1, 1])
    assert list((tmp_path / FOLDER).iterdir()) == [file]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match="expected a checkpoint in"):
        read_checkpoint(tmp_path)


def test_a_refused_write_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FACTS, {"a": torch.ones(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses the write, as a full disk does
    try:
        with pytest.raises(StorageError, match="expected room on the disk"):
            write_checkpoint(tmp_path, replace(FACTS, step=2), {"a": torch.ones(30000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = read_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == FACTS
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_the_first_difference_is_named() -> None:
    FACTS.require_same({"recipe": {"epochs": 5, "betas": (0.9, 0.99)}}, Path("run"))
    with pytest.raises(InputError, match=r"resume run with its recipe\.epochs = 5, found 3"):
        FACTS.require_same({"recipe": {"epochs": 3, "betas": (0.9, 0.99)}}, Path("run"))


def metrics(epoch: int, accuracy: float | None = 0.5) -> EpochMetrics:
    test_loss = None if accuracy is None else 1.5
    return EpochMetrics(epoch, epoch + 1, 8, 0.1, 1.0, 0.5, test_loss, accuracy, 2.0, 4.0, 0.7)


def test_metrics_are_read_as_written_and_of_older_files_without_gradient_norms(tmp_path: Path) -> None:
    history = tuple(metrics(epoch, accuracy) for epoch, accuracy in enumerate((0.2, None, 0.7, 0.7, 0.6)))
    write_metrics(tmp_path, history)
    assert read_metrics(tmp_path) == history
    assert best_of(history) == history[2]  # the first of the highest
    assert best_of(history[1:2]) is None
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text().replace(', "gradient_norm": 0.7', ""))
    assert read_metrics(tmp_path)[0].gradient_norm is None


@pytest.mark.parametrize("text", ["{", '{"epoch": 1}\n', '["a"]\n', "\xff"])
def test_corrupt_metrics_are_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / METRICS_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"^expected .*metrics\.jsonl"):
        read_metrics(tmp_path)


def epochs(folder: Path) -> list[int]:
    return [kept.epochs for kept in read_kept_weights(folder)]


@pytest.mark.parametrize(
    ("every", "expected", "whole"), [(1, [0, 1, 2, 3], [0, 1, 2, 3]), (2, [0, 2], [0, 2, 3]), (None, [], [])]
)
def test_weights_are_kept_at_intervals_and_before_training(
    tmp_path: Path, every: int | None, expected: list[int], whole: list[int]
) -> None:
    """Epoch 0 the initial ones; the last those of model.safetensors, averaged as they are, in half precision."""
    initial, (without, _) = state(tiny_model()), trained(tmp_path / "without")
    model, _ = trained(tmp_path, keep_every=every)
    assert same(state(model), state(without))
    assert epochs(tmp_path) == expected
    over = weights_over_training(tmp_path)
    assert [kept.epochs for kept in over] == whole
    assert not whole or over[-1].file == tmp_path / saved.WEIGHTS_FILE
    for epoch, weights in ((0, initial), (3, state(model))):
        if epoch in expected:
            file = tmp_path / KEPT_FOLDER / f"epoch-{epoch:04}.safetensors"
            assert same(load_file(file), {name: value.half() for name, value in weights.items()})
            assert loading.load(str(file)).classes == model.classes


@pytest.mark.parametrize("at", [1, 5, 11])
def test_a_resumed_run_has_each_once_and_another_training_anew(tmp_path: Path, at: int) -> None:
    trained(tmp_path / "whole", keep_every=1)
    with pytest.raises(InterruptedTrainingError):
        trained(tmp_path / "cut", on_progress=interrupting(at), keep_every=1)
    folder = tmp_path / "cut" / KEPT_FOLDER
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "epoch-0000.safetensors" in before
    (folder / ".epoch-0001-abc.safetensors").write_bytes(b"half-written")
    trained(tmp_path / "cut", tiny_model(seed=7), resume=True, keep_every=1)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after == {path.name: path.read_bytes() for path in (tmp_path / "whole" / KEPT_FOLDER).iterdir()}
    assert before.items() <= after.items()
    keep_weights(tmp_path / "cut", tiny_model(), epochs=12345)
    (folder / "mine.safetensors").write_bytes(b"mine")
    trained(tmp_path / "cut", recipe=tiny_recipe(epochs=1), keep_every=1)
    assert epochs(tmp_path / "cut") == [0, 1]
    assert (folder / "mine.safetensors").exists()
