"""The calls of watchers, which do not change the training."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_loop import STEPS, TEST, InterruptedTrainingError, interrupting, same, state, timeless, trained
from tests.training.tiny import tiny_model, tiny_recipe
from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.heads.statistics import statistics
from vitlens.errors import InputError
from vitlens.models import loading, saved
from vitlens.models.model import Model
from vitlens.training.metrics import (
    METRICS_FILE,
    EpochMetrics,
    StepMetrics,
    Watcher,
    best_of,
    read_metrics,
    write_metrics,
)


def metrics(epoch: int, accuracy: float | None = 0.5) -> EpochMetrics:
    return EpochMetrics(epoch, epoch + 1, 8, 0.1, 1.0, 0.5, None if accuracy is None else 1.5, accuracy, 2.0, 4.0)


def test_lines_are_read_as_written(tmp_path: Path) -> None:
    history = (metrics(0), metrics(1, None), metrics(2))
    write_metrics(tmp_path, history)
    assert read_metrics(tmp_path) == history
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"epoch": 1, "st')
    with pytest.raises(InputError, match=METRICS_FILE):
        read_metrics(tmp_path)


def test_files_without_gradient_norms_are_read(tmp_path: Path) -> None:
    write_metrics(tmp_path, [dataclasses.replace(metrics(0), gradient_norm=0.7)])
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text().replace(', "gradient_norm": 0.7', ""))
    assert read_metrics(tmp_path)[0].gradient_norm is None


@pytest.mark.parametrize("text", ["{", '{"epoch": 1}\n', '["a"]\n', "\xff"])
def test_a_corrupt_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / METRICS_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"^expected .*metrics\.jsonl"):
        read_metrics(tmp_path)


def test_the_best_epoch_is_the_first_of_the_highest() -> None:
    history = [metrics(epoch, accuracy) for epoch, accuracy in enumerate((0.2, None, 0.7, 0.7, 0.6))]
    assert best_of(history) == history[2]
    assert best_of(history[1:2]) is None


class Notes:
    """A watcher that reads everything and draws random numbers."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.epochs: list[EpochMetrics] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.closed = 0

    def on_step(self, facts: StepMetrics) -> None:
        torch.rand(3)
        self.steps.append(facts)

    def on_epoch(self, metrics: EpochMetrics, model: Model) -> None:
        images = next(TEST.batches(4)).images
        statistics(model, images)
        rollout(model, images)
        torch.rand(7)
        self.epochs.append(metrics)
        self.weights.append(state(model))

    def close(self) -> None:
        self.closed += 1


def test_watching_changes_no_bit(tmp_path: Path) -> None:
    notes = Notes()
    assert isinstance(notes, Watcher)
    alone, _ = trained(tmp_path / "alone")
    seen, _ = trained(tmp_path / "seen", watchers=[notes])
    assert same(state(seen), state(alone))
    assert timeless(tmp_path / "seen") == timeless(tmp_path / "alone")
    assert [module.training for module in seen.modules()] == [module.training for module in alone.modules()]


def test_every_step_and_every_epoch_is_reported(tmp_path: Path) -> None:
    notes = Notes()
    _, result = trained(tmp_path, watchers=[notes])
    assert [facts.step for facts in notes.steps] == list(range(1, STEPS + 1))
    assert [facts.epoch for facts in notes.steps] == [0] * 5 + [1] * 5 + [2] * 5
    assert tuple(notes.epochs) == result.history == read_metrics(tmp_path)
    for metrics in notes.epochs:
        mine = [facts for facts in notes.steps if facts.epoch == metrics.epoch]
        assert metrics.train_loss == pytest.approx(sum(facts.loss for facts in mine) / 5, rel=1e-6)
        assert metrics.gradient_norm == pytest.approx(sum(facts.gradient_norm for facts in mine) / 5, rel=1e-6)
        assert metrics.learning_rate == mine[-1].learning_rate
    assert all(math.isfinite(facts.images_per_second) and facts.images_per_second > 0 for facts in notes.steps)
    assert notes.closed == 1


def test_the_weights_that_are_seen_are_those_that_were_tested(tmp_path: Path) -> None:
    """The averaged ones, where the recipe averages: those of model.safetensors at the end."""
    notes = Notes()
    trained(tmp_path, watchers=[notes])
    assert same(notes.weights[-1], state(loading.load(str(tmp_path / saved.WEIGHTS_FILE))))


def test_a_resumed_run_reports_the_remaining_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlens.training.loop.PROGRESS_INTERVAL", 0.0)
    first, second = Notes(), Notes()
    with pytest.raises(InterruptedTrainingError):
        trained(tmp_path, on_progress=interrupting(7), watchers=[first])
    assert first.closed == 1
    trained(tmp_path, tiny_model(seed=7), resume=True, watchers=[second])
    assert [facts.step for facts in second.steps] == list(range(6, STEPS + 1))
    assert [metrics.epoch for metrics in second.epochs] == [1, 2]


def test_what_a_watcher_raises_ends_the_training_and_closes_all(tmp_path: Path) -> None:
    class Broken(Notes):
        def on_step(self, facts: StepMetrics) -> None:
            raise ZeroDivisionError

    notes, broken = Notes(), Broken()
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, watchers=[notes, broken], recipe=tiny_recipe(epochs=1))
    assert (notes.closed, broken.closed) == (1, 1)


def test_all_are_closed_in_turn_though_one_fails(tmp_path: Path) -> None:
    order: list[str] = []

    class Named(Notes):
        def __init__(self, name: str, error: Any = None) -> None:
            super().__init__()
            self.name, self.error = name, error

        def close(self) -> None:
            order.append(self.name)
            if self.error:
                raise self.error

    with pytest.raises(ZeroDivisionError):
        trained(
            tmp_path, watchers=[Named("a"), Named("b", ZeroDivisionError()), Named("c")], recipe=tiny_recipe(epochs=1)
        )
    assert order == ["c", "b", "a"]
