"""Trackers receive the values of the training, change nothing, and may fail without harm."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.golden.train.test_train import GOLDEN
from tests.kit.commands import gone_on, ran, refusal
from tests.kit.making import digits
from tests.kit.select import values_of
from tests.kit.training_runs import interrupted
from vitlens import load, statistics

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def events(folder: Path) -> Any:
    """Return everything that TensorBoard would show of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    log.Reload()
    return log


@needs_tensorboard
def test_tensorboard_is_told_what_metrics_say_and_changes_no_bit(golden, tmp_path):
    record = ran(tmp_path, f"{GOLDEN} --track tensorboard --overwrite")
    assert weights(tmp_path) == weights(golden("train").folder)
    log = events(tmp_path)
    calls = {}
    for name in log.Tags()["scalars"]:
        calls[name] = values_of(log.Scalars(name), "step", "value")
    for name in (
        "train_loss",
        "train_accuracy",
        "test_loss",
        "test_accuracy",
        "images_per_second",
        "gradient_norm",
    ):
        assert [step for step, _ in calls[f"epoch/{name}"]] == [4, 8, 12]
        expected = [getattr(row, name) for row in record.history]
        np.testing.assert_allclose(
            [value for _, value in calls[f"epoch/{name}"]], expected, rtol=1e-5
        )
    for name in ("loss", "learning_rate", "gradient_norm", "images_per_second"):
        assert [step for step, _ in calls[f"train/{name}"]] == [10]
    watched = digits("test").limit(40).limit(16)
    table = statistics(load(str(tmp_path)), next(watched.batches(16)).images)
    step, value = calls["attention_entropy/patches/layer_00"][-1]
    assert (step, value) == (12, pytest.approx(table.normalised_entropy[0].mean().item(), rel=1e-4))
    [picture] = log.Images("attention_rollout")
    assert (picture.step, min(picture.width, picture.height) > 100) == (4, True)
    assert np.std(Image.open(BytesIO(picture.encoded_image_string))) > 10


class Recording:
    """A tracker's library that records its calls, and fails where requested."""

    def __init__(self) -> None:
        # logged: the steps of numbers
        self.calls = []
        self.logged = []
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        def do(*values: object, **settings: object) -> None:
            self.calls.append(name)
            self.logged.extend([settings["step"]] if name == "log" else [])
            if name == self.fails:
                raise ConnectionError("no route\nto host")

        return do


@pytest.fixture
def libraries(monkeypatch) -> dict[str, Recording]:
    """Replace the trackers' libraries by stand-ins that can be made to fail."""
    from accelerate import tracking

    recordings = {"tensorboard": Recording(), "wandb": Recording()}
    for name in recordings:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.Settings = dict
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tracking, "TensorBoardTracker", lambda *_, **__: recordings["tensorboard"])
    monkeypatch.setattr(tracking, "WandBTracker", lambda *_, **__: recordings["wandb"])
    return recordings


def failures(out: Path, line: str, capsys) -> list[str]:
    """Return the messages of a run about failures."""
    ran(out, line)
    return [said for said in capsys.readouterr().err.splitlines() if "failed" in said]


@pytest.mark.parametrize("failing", ["start", "log_images", "finish"])
def test_a_failing_tracker_is_reported_once_and_does_not_stop_the_training(
    failing, libraries, golden, tmp_path, capsys
):
    broken = libraries["wandb"]
    recording = libraries["tensorboard"]
    broken.fails = failing
    (said,) = failures(tmp_path / "seen", f"{GOLDEN} --track tensorboard,wandb", capsys)
    assert said.startswith("wandb failed")
    assert "(no route to host)" in said
    assert weights(tmp_path / "seen") == weights(golden("train").folder)
    assert (broken.calls.count(failing), broken.calls[-1]) == (1, failing)
    assert (recording.calls[:2], recording.calls[-1]) == (
        ["start", "store_init_configuration"],
        "finish",
    )
    assert recording.calls.count("log_images") == 1
    assert recording.logged == [4, 4, 8, 8, 10, 12, 12]


def test_attention_that_cannot_be_measured_does_not_stop_the_training(
    libraries, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("vitlens.commands.run.tracking.statistics", lambda *_, **__: 1 / 0)
    (said,) = failures(tmp_path / "out", f"{GOLDEN} --track tensorboard", capsys)
    assert said.startswith("attention failed")
    assert libraries["tensorboard"].logged == [4, 8, 10, 12]


def test_a_model_without_attention_is_no_failure_to_tell(libraries, tmp_path, capsys):
    line = "train resnet20 --data digits --limit 20 --batch-size 10 --epochs 1 --track tensorboard"
    assert not failures(tmp_path / "out", line, capsys)
    assert "log_images" not in libraries["tensorboard"].calls


@needs_tensorboard
def test_a_resumed_run_takes_back_what_came_after_its_checkpoint(tmp_path):
    folder = tmp_path / "out"
    with interrupted(lambda _, progress: progress.step >= 11):
        ran(folder, f"{GOLDEN} --track tensorboard", code=130)
    gone_on(folder, "train --track tensorboard")
    log = events(folder)
    assert values_of(log.Scalars("train/loss"), "step") == [10]
    assert values_of(log.Scalars("epoch/train_loss"), "step") == [4, 8, 12]


def test_a_library_that_is_not_there_is_said_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("importlib.util._find_spec", lambda *_: None)
    for name in ("tensorboard", "wandb"):
        said = refusal(
            capsys, f"train vit-micro --track {name} --out {tmp_path / 'out'} --device cpu"
        )
        assert f"pip install {name}" in said
    assert not (tmp_path / "out").exists()


@needs_wandb
@pytest.mark.slow  # W&B's service takes seconds to start and to write out
def test_wandb_writes_offline_into_the_run(golden, tmp_path, monkeypatch, capsys):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    assert not failures(folder, f"{GOLDEN} --track wandb", capsys)
    assert weights(folder) == weights(golden("train").folder)
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    assert file.stat().st_size > 0
    assert list(folder.glob("wandb/offline-run-*/files/media/images/*.png"))
