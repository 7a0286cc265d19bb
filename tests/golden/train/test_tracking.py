"""Trackers receive the values of the training, change nothing, and may fail without harm."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.golden.train.test_train import GOLDEN
from tests.kit import tensorboard_logs
from tests.kit.commands import gone_on, ran, refusal
from tests.kit.making import digits
from tests.kit.select import values_of
from tests.kit.training_runs import interrupted
from tests.kit.wandb_runs import read_run
from vitlens import load, statistics

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def events(folder: Path) -> Any:
    """Return everything that TensorBoard would show of a run."""
    return tensorboard_logs.events(folder / "tensorboard")


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


@needs_tensorboard
def test_tensorboard_gets_histograms_and_a_sheet_of_the_attention(tmp_path):
    ran(tmp_path, f"{GOLDEN} --track tensorboard --overwrite")
    log = events(tmp_path)
    model = load(str(tmp_path))
    for kind in ("weights", "gradients", "attention_of_heads_entropy/patches"):
        histograms = log.Histograms(f"{kind}/layer_00")
        assert [histogram.step for histogram in histograms] == [4, 8, 12]
        assert sum(histograms[-1].histogram_value.bucket) == histograms[-1].histogram_value.num
    block = model.module.get_submodule(model.anatomy.blocks[0])
    weights = log.Histograms("weights/layer_00")[-1].histogram_value
    matrices = [parameter for parameter in block.parameters() if parameter.ndim > 1]
    values = torch.cat([matrix.flatten() for matrix in matrices])
    np.testing.assert_allclose(
        (weights.num, weights.min, weights.max, weights.sum),
        (len(values), values.min(), values.max(), values.sum()),
        rtol=1e-5,
        atol=1e-3,
    )
    [sheet] = log.Images("attention")
    assert (sheet.step, np.std(Image.open(BytesIO(sheet.encoded_image_string))) > 10) == (4, True)


@needs_tensorboard
def test_the_tracked_gradients_are_those_of_the_last_update_of_the_epoch(tmp_path):
    ten_updates = "--limit 100 --batch-size 10 --epochs 1"
    ran(tmp_path, f"{GOLDEN} {ten_updates} --track tensorboard --overwrite")
    log = events(tmp_path)
    squares = 0.0
    for name in log.Tags()["histograms"]:
        if name.startswith("gradients/"):
            squares += log.Histograms(name)[-1].histogram_value.sum_squares
    [norm] = log.Scalars("train/gradient_norm")
    assert (norm.step, norm.value) == (10, pytest.approx(squares**0.5, rel=1e-5))


class Recording:
    """A tracker's library that records its calls, and fails where requested."""

    def __init__(self) -> None:
        # logged: the steps of numbers
        self.calls = []
        self.logged = []
        self.fails = ""
        self.tracker = SimpleNamespace(log=self.draw, add_histogram_raw=self.draw)

    def draw(self, *values: object, **settings: object) -> None:
        self.histogram()

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
        module.Histogram = dict
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tracking, "TensorBoardTracker", lambda *_, **__: recordings["tensorboard"])
    monkeypatch.setattr(tracking, "WandBTracker", lambda *_, **__: recordings["wandb"])
    return recordings


def failures(out: Path, line: str, capsys) -> list[str]:
    """Return the messages of a run about failures."""
    ran(out, line)
    return [said for said in capsys.readouterr().err.splitlines() if "failed" in said]


@pytest.mark.parametrize("failing", ["start", "log_images", "histogram", "finish"])
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
    assert broken.calls.count(failing) == 1
    # a tracker that began is also finished after a failure
    later_calls = broken.calls[broken.calls.index(failing) + 1 :]
    assert later_calls == ([] if failing in ("start", "finish") else ["finish"])
    assert (recording.calls[:2], recording.calls[-1]) == (
        ["start", "store_init_configuration"],
        "finish",
    )
    assert recording.calls.count("log_images") == 1
    assert recording.logged == [4, 4, 8, 8, 10, 12, 12]


def test_attention_that_cannot_be_measured_does_not_stop_the_training(
    libraries, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("vitlens.commands.run.tracking.attention_snapshot", lambda *_, **__: 1 / 0)
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


@pytest.fixture
def offline(tmp_path, monkeypatch) -> None:
    """Run W&B as for a user without an account."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@needs_wandb
@pytest.mark.slow  # W&B's service takes seconds to start and to write out
def test_wandb_writes_offline_what_metrics_say(offline, golden, tmp_path, capsys):
    folder = tmp_path / "run"
    assert not failures(folder, f"{GOLDEN} --track wandb", capsys)
    assert weights(folder) == weights(golden("train").folder)
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    run = read_run(file)
    for name in ("train_loss", "test_accuracy"):
        expected = [(row.step, getattr(row, name)) for row in golden("train").record.history]
        np.testing.assert_allclose(run.history[f"epoch/{name}"], expected)
    assert run.config["recipe.epochs"] == 3
    histograms = run.of_type("histogram")
    for name in ("weights/layer_00", "gradients/layer_00"):
        assert [step for step, _ in histograms[name]] == [4, 8, 12]


@needs_wandb
@pytest.mark.slow
def test_wandb_has_the_histograms_and_pictures_of_the_model(offline, tmp_path):
    folder = tmp_path / "run"
    ran(folder, f"{GOLDEN} --track wandb")
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    run = read_run(file)
    model = load(str(folder))
    block = model.module.get_submodule(model.anatomy.blocks[0])
    step, weights_of_block = run.of_type("histogram")["weights/layer_00"][-1]
    assert step == 12
    matrices = [parameter for parameter in block.parameters() if parameter.ndim > 1]
    assert sum(weights_of_block["values"]) == sum(matrix.numel() for matrix in matrices)
    for name in ("attention", "attention_rollout"):
        [(step, picture)] = run.of_type("images/separated")[name]
        assert step == 4
        for path in picture["filenames"]:
            with Image.open(file.parent / "files" / path) as image:
                assert np.std(image) > 10
