"""Trainings of images: same seed, same bits; files, refusals, and what a watcher sees."""

import errno
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.trainings import (
    CLASSES,
    STEPS,
    TEST,
    TRAIN,
    InterruptedTrainingError,
    interrupting,
    same,
    state,
    timeless,
    tiny_model,
    tiny_recipe,
    tiny_split,
    trained,
)
from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.heads.statistics import statistics
from vitlens.data.split import Drawings, Drawn, InMemory
from vitlens.errors import DataError, InputError, NonFiniteError, StorageError
from vitlens.models import loading, saved
from vitlens.models.model import Model
from vitlens.training import checkpoint, loop
from vitlens.training.loop import BEST_FILE
from vitlens.training.metrics import METRICS_FILE, EpochMetrics, Progress, StepMetrics, Watcher, read_metrics


@pytest.fixture(autouse=True)
def progress_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0.0)


def test_one_batch_is_overfitted(tmp_path: Path) -> None:
    few = tiny_split("train", 8)
    recipe = tiny_recipe(epochs=60, learning_rate=1e-2, average=0.0, crop_padding=0, flip=False, evaluate_every=100)
    model = tiny_model(drop_path=0.0, dropout=0.0)
    _, result = trained(tmp_path, model, train=few, test=replace(few, part="test"), recipe=recipe)
    assert result.accuracy == 1.0
    assert result.history[-1].train_loss < 0.6 * result.history[0].train_loss


def test_same_seed_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (trained(tmp_path / name, seed=seed)[0] for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert torch.equal(torch.rand(3), expected)  # the caller's random numbers are not affected
    assert same(state(first), state(second))
    assert not same(state(first), state(other))
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")


def test_the_files_match_the_result(tmp_path: Path) -> None:
    model = tiny_model().eval().requires_grad_(False)
    _, result = trained(tmp_path, model)
    assert same(load_file(result.weights), state(model))
    for file, accuracy in ((result.weights, result.accuracy), (result.best_weights, result.best_accuracy)):
        with torch.inference_mode():
            logits = loading.load(str(file))(next(TEST.batches(12)).images)
        assert (logits.argmax(1) == TEST.labels).float().mean().item() == pytest.approx(accuracy)
    assert read_metrics(tmp_path) == result.history
    assert [(metrics.epoch, metrics.images) for metrics in result.history] == [(0, 40), (1, 80), (2, 120)]
    assert result.best_accuracy == max(metrics.test_accuracy or 0.0 for metrics in result.history)
    assert {path.name for path in tmp_path.iterdir()} == {BEST_FILE, saved.WEIGHTS_FILE, METRICS_FILE, "checkpoint"}
    assert not any(module.training or module._forward_hooks for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("at", "every"), [(2, None), (5, None), (7, None), (2, 3), (9, 3), (STEPS, 3)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, at: int, every: int | None) -> None:
    whole, _ = trained(tmp_path / "whole")
    with pytest.raises(InterruptedTrainingError):
        trained(tmp_path / "cut", on_progress=interrupting(at), checkpoint_every=every)
    resumed, result = trained(tmp_path / "cut", tiny_model(seed=7), resume=True, checkpoint_every=every)
    assert same(state(resumed), state(whole))
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")
    for name in (BEST_FILE, saved.WEIGHTS_FILE):
        assert same(load_file(tmp_path / "cut" / name), load_file(tmp_path / "whole" / name))
    assert result.history == read_metrics(tmp_path / "cut")
    again, repeated = trained(tmp_path / "cut", tiny_model(seed=8), resume=True)  # nothing is left to do
    assert (repeated, same(state(again), state(whole))) == (result, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": tiny_recipe(epochs=1, learning_rate=1.0)}, r"recipe\.learning_rate = 0.003, found 1.0"),
        ({"seed": 3}, "seed = 0, found 3"),
        ({"train": tiny_split("train", 39)}, r"data\.train = 40, found 39"),
        ({"model": loading.untrained("vit-mini", classes=CLASSES, image_size=(8, 12))}, r"architecture\.overrides"),
    ],
)
def test_resuming_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    trained(tmp_path, recipe=tiny_recipe(epochs=1), resume=True)  # without a checkpoint it starts
    with pytest.raises(InputError, match=named):
        trained(tmp_path, resume=True, **{"recipe": tiny_recipe(epochs=1), **changes})


ONE = [replace(each, classes=("a",), labels=torch.zeros(len(each), dtype=torch.long)) for each in (TRAIN, TEST)]
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"train": replace(TRAIN, labels=None)}, DataError, "found images without labels"),
    ({"train": TRAIN.pick(torch.arange(0))}, DataError, "found none"),
    ({"train": replace(TRAIN, classes=("a", "b"))}, InputError, "expected a model of random's 2 classes"),
    ({"train": replace(TRAIN, labels=torch.full((40,), 3))}, DataError, "expected labels from 0 to 2"),
    ({"test": replace(TEST, labels=TEST.labels - 1)}, DataError, "found -1 to 1"),
    ({"train": replace(TRAIN, labels=torch.arange(40) % 2)}, DataError, r"found none of 1 \(c\)"),
    (
        {"model": loading.untrained("vit-mini", classes=("a",), image_size=(8, 12)), "train": ONE[0], "test": ONE[1]},
        DataError,
        "at least 2 classes",
    ),
    ({"keep_every": 0}, InputError, "expected --keep-every at least 1, found 0"),
    ({"train_last": 3}, InputError, "--train-last from 1 to 2"),
    ({"precision": "fp8"}, InputError, "no precision 'fp8'"),
    ({"compiling": "maybe"}, InputError, "no --compile 'maybe'"),
]


@pytest.mark.parametrize(("changes", "error", "match"), REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        trained(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_explodes_keeps_the_last_good_weights(tmp_path: Path) -> None:
    model = tiny_model()

    def poison(progress: Progress) -> None:
        if progress.step == 12:
            model.module.get_parameter("head.weight").data.fill_(float("nan"))

    match = r"found loss nan.* in epoch 3, step 13; .* the last good weights; try --lear"
    with pytest.raises(NonFiniteError, match=match):
        trained(tmp_path, model, on_progress=poison)
    assert len(read_metrics(tmp_path)) == 2
    for file in (saved.WEIGHTS_FILE, BEST_FILE, "checkpoint/state.safetensors"):
        assert all(value.isfinite().all() for value in load_file(tmp_path / file).values())


def test_a_full_disk_leaves_a_checkpoint_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(tmp_path / "whole")
    write, calls = checkpoint.save_file, []

    def filling(*arguments: Any, **settings: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:  # the first is of the start, the second of the first epoch
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments, **settings)

    monkeypatch.setattr(checkpoint, "save_file", filling)
    with pytest.raises(StorageError, match="found it full"):
        trained(tmp_path / "full")
    resumed, _ = trained(tmp_path / "full", tiny_model(seed=7), resume=True)
    assert same(state(resumed), state(whole))


def test_each_epoch_draws_its_own_images_and_is_tested_when_due(tmp_path: Path) -> None:
    assert isinstance(TRAIN.source, InMemory)
    pixels, seen = TRAIN.source.pixels, []

    def render(subjects: torch.Tensor, numbers: torch.Tensor) -> Drawn:
        seen.extend(numbers.unique().tolist())
        return Drawn(pixels[subjects], torch.zeros(len(subjects), 8, 12, dtype=torch.bool))

    source = Drawings(render, torch.arange(40), torch.zeros(40, dtype=torch.long))
    _, result = trained(tmp_path, train=replace(TRAIN, source=source), recipe=tiny_recipe(epochs=5, evaluate_every=2))
    assert seen == [epoch for epoch in range(5) for _ in range(5)]
    tested = [metrics.epoch for metrics in result.history if metrics.test_accuracy is not None]
    assert tested == [1, 3, 4]
    assert result.best_epoch in tested


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    heard: list[Progress] = []
    _, result = trained(tmp_path, on_progress=heard.append)
    assert [progress.step for progress in heard] == sorted(progress.step for progress in heard)
    assert {progress.step for progress in heard} == set(range(1, STEPS + 1))
    assert (heard[-1].steps, heard[-1].seconds_left, heard[-1].test_accuracy) == (STEPS, 0.0, result.accuracy)
    assert heard[-1].loss == pytest.approx(result.history[-1].train_loss)
    assert all(progress.images_per_second > 0 and 0 <= progress.accuracy <= 1 for progress in heard)


def test_a_cnn_trains_by_the_same_loop(tmp_path: Path) -> None:
    model = loading.untrained("resnet20", classes=CLASSES, image_size=(8, 12))
    before = state(model)
    _, result = trained(tmp_path, model, recipe=tiny_recipe(epochs=1))
    assert not same(before, state(model))
    assert state(model)["bn1.num_batches_tracked"] == 5
    assert 0 <= result.accuracy <= 1


class Notes:
    """A watcher that reads everything and draws random numbers; it may fail where it is told to."""

    def __init__(self, name: str = "", fails: str = "") -> None:
        self.name, self.fails = name, fails
        self.steps: list[StepMetrics] = []
        self.epochs: list[EpochMetrics] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.closed: list[str] = []

    def on_step(self, facts: StepMetrics) -> None:
        torch.rand(3)
        self.steps.append(facts)
        if self.fails == "step":
            raise ZeroDivisionError

    def on_epoch(self, metrics: EpochMetrics, model: Model) -> None:
        images = next(TEST.batches(4)).images
        statistics(model, images)
        rollout(model, images)
        torch.rand(7)
        self.epochs.append(metrics)
        self.weights.append(state(model))

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails == "close":
            raise ZeroDivisionError


def test_watching_changes_no_bit(tmp_path: Path) -> None:
    notes = Notes()
    assert isinstance(notes, Watcher)
    alone, _ = trained(tmp_path / "alone")
    seen, _ = trained(tmp_path / "seen", watchers=[notes])
    assert same(state(seen), state(alone))
    assert timeless(tmp_path / "seen") == timeless(tmp_path / "alone")
    # the averaged weights, where the recipe averages
    assert same(notes.weights[-1], state(loading.load(str(tmp_path / "seen" / saved.WEIGHTS_FILE))))


def test_every_step_and_every_epoch_is_reported_once_also_by_a_resumed_run(tmp_path: Path) -> None:
    notes, first, second = Notes(), Notes(), Notes()
    _, result = trained(tmp_path / "whole", watchers=[notes])
    assert [(facts.step, facts.epoch) for facts in notes.steps] == [(step + 1, step // 5) for step in range(STEPS)]
    assert tuple(notes.epochs) == result.history == read_metrics(tmp_path / "whole")
    for metrics in notes.epochs:
        mine = [facts for facts in notes.steps if facts.epoch == metrics.epoch]
        assert metrics.train_loss == pytest.approx(sum(facts.loss for facts in mine) / 5, rel=1e-6)
        assert metrics.gradient_norm == pytest.approx(sum(facts.gradient_norm for facts in mine) / 5, rel=1e-6)
        assert metrics.learning_rate == mine[-1].learning_rate
    assert all(math.isfinite(facts.images_per_second) and facts.images_per_second > 0 for facts in notes.steps)
    with pytest.raises(InterruptedTrainingError):
        trained(tmp_path / "cut", on_progress=interrupting(7), watchers=[first])
    trained(tmp_path / "cut", tiny_model(seed=7), resume=True, watchers=[second])
    assert [facts.step for facts in second.steps] == list(range(6, STEPS + 1))
    assert [metrics.epoch for metrics in second.epochs] == [1, 2]
    assert [len(each.closed) for each in (notes, first, second)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fails", "changes", "error"),
    [
        ("step", {}, ZeroDivisionError),
        ("close", {}, ZeroDivisionError),
        ("", {"train": replace(TRAIN, labels=None)}, DataError),  # before anything begins
        ("", {"model": tiny_model().requires_grad_(False), "train_last": 3}, InputError),
    ],
)
def test_all_watchers_are_closed_though_something_fails(
    tmp_path: Path, fails: str, changes: dict[str, Any], error: type[Exception]
) -> None:
    watchers = [Notes("a"), Notes("b", fails), Notes("c")]
    order: list[str] = []
    for watcher in watchers:
        watcher.closed = order
    with pytest.raises(error):
        trained(tmp_path, watchers=watchers, recipe=tiny_recipe(epochs=1), **changes)
    assert order == ["c", "b", "a"]


def test_watchers_are_closed_where_no_optimiser_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    notes = Notes()
    with pytest.raises(InputError, match=r"torch 2\.9"):
        trained(tmp_path, watchers=[notes], recipe=tiny_recipe(optimiser="muon"))
    assert notes.closed == [""]
