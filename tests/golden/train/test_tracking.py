"""Trackers receive the values of the training, change nothing, and may fail without harm."""

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.trainings import TEST, same, state, tiny_model, tiny_recipe, trained
from vitlens import statistics
from vitlens.cli.main import run
from vitlens.commands.run import tracking as module
from vitlens.commands.run.tracking import TrackerWatcher, require_trackers
from vitlens.errors import InputError
from vitlens.models import loading, saved
from vitlens.training.metrics import StepMetrics

CONFIG = {"model": "tiny", "recipe": {"epochs": 3, "betas": [0.9, 0.999], "clip": None}}
needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], bytes]:
    """The state and file of a model that was trained without a tracker."""
    folder = tmp_path_factory.mktemp("alone")
    model, _ = trained(folder)
    return state(model), (folder / saved.WEIGHTS_FILE).read_bytes()


def watcher(folder: Path, heard: list[str], name: Any = "tensorboard") -> TrackerWatcher:
    return TrackerWatcher(name, folder, TEST, config=CONFIG, say=heard.append)


def events(folder: Path) -> Any:
    """All that TensorBoard would show of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


@needs_tensorboard
def test_tensorboard_is_told_what_metrics_say_and_changes_no_bit(alone, tmp_path, heard):
    model, result = trained(tmp_path, watchers=[watcher(tmp_path, heard)])
    assert same(state(model), alone[0])
    assert (tmp_path / saved.WEIGHTS_FILE).read_bytes() == alone[1]
    found = events(tmp_path)
    calls = {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "gradient_norm"):
        expected = [(metrics.step, getattr(metrics, name)) for metrics in result.history]
        assert [step for step, _ in calls[f"epoch/{name}"]] == [5, 10, 15]
        np.testing.assert_allclose([v for _, v in calls[f"epoch/{name}"]], [v for _, v in expected], rtol=1e-5)
    for name in ("loss", "learning_rate", "gradient_norm", "images_per_second"):
        assert [step for step, _ in calls[f"train/{name}"]] == [10]
    images = next(TEST.batches(len(TEST))).images
    table = statistics(model.eval(), images)
    for rows, values in (("patches", table.normalised_entropy), ("cls", table.cls_normalised_entropy)):
        for layer in range(2):
            step, value = calls[f"attention_entropy/{rows}/layer_{layer:02}"][-1]
            assert (step, value) == (15, pytest.approx(values[layer].mean().item(), rel=1e-5))
    [picture] = found.Images("attention_rollout")
    assert (picture.step, min(picture.width, picture.height) > 100) == (5, True)
    assert np.std(Image.open(BytesIO(picture.encoded_image_string))) > 10
    assert heard == []


class Recording:
    """A tracker's library that records its calls, and fails where requested."""

    def __init__(self, *_: object, **settings: object) -> None:
        self.settings, self.calls, self.fails = settings, [], ()

    def __getattr__(self, name: str) -> Any:
        def do(*values: object, **settings: object) -> None:
            self.calls.append((name, settings.get("step")))
            if name in self.fails:
                raise ConnectionError("no route\nto host")

        return do


@pytest.fixture
def backends(monkeypatch) -> dict[str, Recording]:
    """Stand-ins for the libraries, which can be made to fail."""
    from accelerate import tracking

    made = {"tensorboard": Recording(), "wandb": Recording()}
    monkeypatch.setattr(tracking, "TensorBoardTracker", lambda *_, **__: made["tensorboard"])
    monkeypatch.setattr(tracking, "WandBTracker", lambda *_, **__: made["wandb"])
    monkeypatch.setattr(module, "_wandb_settings", lambda _: {})
    return made


@pytest.mark.parametrize("failing", ["start", "store_init_configuration", "log", "log_images", "finish"])
def test_a_failing_tracker_is_reported_once_and_does_not_stop_the_training(failing, backends, alone, tmp_path, heard):
    backends["wandb"].fails = (failing,)
    watchers = [watcher(tmp_path / "seen", heard, name) for name in ("tensorboard", "wandb")]
    seen, _ = trained(tmp_path / "seen", watchers=watchers)
    assert same(state(seen), alone[0])
    assert heard == ["wandb failed and is left out from here on (no route to host); the training goes on"]
    names = [name for name, _ in backends["wandb"].calls]
    assert names.count(failing) == 1
    assert names[-1] == failing
    whole = [name for name, _ in backends["tensorboard"].calls]
    assert whole[:2] == ["start", "store_init_configuration"]
    assert whole[-1] == "finish"
    assert whole.count("log_images") == 1
    assert [step for name, step in backends["tensorboard"].calls if name == "log"] == [5, 5, 10, 10, 10, 15, 15]


def test_a_failure_to_measure_attention_does_not_stop_the_training(backends, tmp_path, heard, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in the statistics")

    monkeypatch.setattr("vitlens.commands.run.tracking.statistics", broken)
    trained(tmp_path, watchers=[watcher(tmp_path, heard)])
    assert heard == ["attention failed and is left out from here on (in the statistics); the training goes on"]
    assert [step for name, step in backends["tensorboard"].calls if name == "log"] == [5, 10, 10, 15]


def test_a_cnn_is_tracked_without_attention(backends, tmp_path, heard):
    cnn = loading.untrained("resnet20", classes=tiny_model().classes, image_size=(8, 12))
    trained(tmp_path, cnn, recipe=tiny_recipe(epochs=1), watchers=[watcher(tmp_path, heard)])
    assert heard == []
    assert [name for name, _ in backends["tensorboard"].calls] == ["start", "store_init_configuration", "log", "finish"]


def test_a_tracker_without_values_writes_nothing(tmp_path, heard):
    watcher(tmp_path, heard).close()
    assert not list(tmp_path.iterdir())


@needs_tensorboard
def test_a_resumed_run_takes_back_what_came_after_its_checkpoint(tmp_path, heard):
    for steps in ((10, 20, 30), (20, 30, 40)):
        tracking = watcher(tmp_path, heard)
        for step in steps:
            tracking.on_step(StepMetrics(step, 0, float(steps[0]), 1e-3, 0.5, 100.0))
        tracking.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("train/loss")] == [
        (10, 10.0),
        (20, 20.0),
        (30, 20.0),
        (40, 20.0),
    ]


def test_a_library_that_is_not_there_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="library of --track wandb, found it not installed; type pip install wandb"):
        require_trackers(("wandb",))
    out = tmp_path / "out"
    assert run(["train", "vit-micro", "--track", "tensorboard", "--out", str(out), "--device", "cpu"]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert run(["train", "vit-micro", "--track", "tensorbord", "--out", str(out)]) == 2
    assert "did you mean 'tensorboard'" in capsys.readouterr().err
    assert not out.exists()


@needs_wandb
@pytest.mark.slow  # W&B's service takes seconds to start and to write out
def test_wandb_writes_offline_into_the_run(alone, tmp_path, heard, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    seen, _ = trained(folder, watchers=[watcher(folder, heard, "wandb")])
    assert heard == []
    assert same(state(seen), alone[0])
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    assert file.stat().st_size > 0
    assert list(folder.glob("wandb/offline-run-*/files/media/images/*.png"))
