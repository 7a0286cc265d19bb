import errno
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny import CLASSES, tiny_model, tiny_recipe, tiny_split
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError, InputError, NonFiniteError, StorageError
from vitlens.models import loading, saved
from vitlens.models.model import Model
from vitlens.training import checkpoint as checkpoint_module
from vitlens.training import loop
from vitlens.training.loop import BEST_FILE, fit
from vitlens.training.metrics import METRICS_FILE, Progress, TrainingResult, read_metrics

TRAIN, TEST = tiny_split("train", 40), tiny_split("test", 12)
STEPS = 3 * 5  # three epochs of five batches of eight


class InterruptedTrainingError(Exception):
    """Stands for a Ctrl-C, or for anything else."""


@pytest.fixture(autouse=True)
def progress_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0.0)


def trained(folder: Path, model: Model | None = None, **changes: Any) -> tuple[Model, TrainingResult]:
    model = model or tiny_model()
    settings: dict[str, Any] = {"recipe": tiny_recipe(), "directory": folder, "train": TRAIN, "test": TEST, **changes}
    return model, fit(model, **settings)


def interrupting(at: int) -> Any:
    def stop(progress: Progress) -> None:
        if progress.step == at:
            raise InterruptedTrainingError

    return stop


def state(model: Model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def timeless(folder: Path) -> list[Any]:
    return [replace(metrics, seconds=0.0, images_per_second=0.0) for metrics in read_metrics(folder)]


def test_one_batch_is_overfitted(tmp_path: Path) -> None:
    few = tiny_split("train", 8)
    recipe = tiny_recipe(epochs=60, learning_rate=1e-2, average=0.0, crop_padding=0, flip=False, evaluate_every=100)
    model = tiny_model(drop_path=0.0, dropout=0.0)
    _, result = trained(tmp_path, model, train=few, test=replace(few, part="test"), recipe=recipe)
    assert result.accuracy == 1.0
    assert result.history[-1].train_loss < 0.6 * result.history[0].train_loss


def test_same_seed_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    first, second, other = (trained(tmp_path / name, seed=seed)[0] for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert same(state(first), state(second))
    assert not same(state(first), state(other))
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")


def test_the_files_match_the_result(tmp_path: Path) -> None:
    model, result = trained(tmp_path)
    assert same(load_file(result.weights), state(model))
    for file, accuracy in ((result.weights, result.accuracy), (result.best_weights, result.best_accuracy)):
        with torch.inference_mode():
            logits = loading.load(str(file))(next(TEST.batches(12)).images)
        assert TEST.labels is not None
        assert (logits.argmax(1) == TEST.labels).float().mean().item() == pytest.approx(accuracy)
    assert read_metrics(tmp_path) == result.history
    assert [metrics.epoch for metrics in result.history] == [0, 1, 2]
    assert result.best_accuracy == max(metrics.test_accuracy or 0.0 for metrics in result.history)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [BEST_FILE, saved.WEIGHTS_FILE, METRICS_FILE, "checkpoint"]
    )


def test_nothing_stays_behind(tmp_path: Path) -> None:
    model = tiny_model().eval().requires_grad_(False)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(tmp_path, model)
    assert torch.equal(torch.rand(3), expected)  # the caller's random numbers are not affected
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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


def test_a_finished_run_resumes_to_its_result(tmp_path: Path) -> None:
    model, result = trained(tmp_path)
    again, repeated = trained(tmp_path, tiny_model(seed=7), resume=True)
    assert repeated == result
    assert same(state(again), state(model))


def test_resuming_without_a_checkpoint_starts(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole")
    resumed, _ = trained(tmp_path / "new", resume=True)
    assert same(state(resumed), state(whole))


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
    trained(tmp_path, recipe=tiny_recipe(epochs=1))
    with pytest.raises(InputError, match=named):
        trained(tmp_path, resume=True, **{"recipe": tiny_recipe(epochs=1), **changes})


def test_a_loss_that_explodes_keeps_the_last_good_weights(tmp_path: Path) -> None:
    model = tiny_model()
    broken = interrupting(12)

    def poison(progress: Progress) -> None:
        try:
            broken(progress)
        except InterruptedTrainingError:
            with torch.no_grad():
                model.module.get_parameter("head.weight").fill_(float("nan"))

    with pytest.raises(
        NonFiniteError, match=r"found loss nan.* in epoch 3, step 13; .* the last good weights; try --lear"
    ):
        trained(tmp_path, model, on_progress=poison)
    assert len(read_metrics(tmp_path)) == 2
    for file in (saved.WEIGHTS_FILE, BEST_FILE, "checkpoint/state.safetensors"):
        assert all(value.isfinite().all() for value in load_file(tmp_path / file).values())


def test_a_full_disk_leaves_a_checkpoint_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(tmp_path / "whole")
    write, calls = checkpoint_module.save_file, []

    def filling(*arguments: Any, **settings: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:  # the first is of the start, the second of the first epoch
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments, **settings)

    monkeypatch.setattr(checkpoint_module, "save_file", filling)
    with pytest.raises(StorageError, match="found it full"):
        trained(tmp_path / "full")
    resumed, _ = trained(tmp_path / "full", tiny_model(seed=7), resume=True)
    assert same(state(resumed), state(whole))


@dataclass(frozen=True)
class Drawn:
    """Images that differ in every epoch."""

    inner: InMemory
    number: int = 0
    seen: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.number)
        return self.inner.read(indices)

    def epoch(self, number: int) -> "Drawn":
        return replace(self, number=number)


def test_each_epoch_draws_its_own_images(tmp_path: Path) -> None:
    assert isinstance(TRAIN.source, InMemory)
    source = Drawn(TRAIN.source)
    trained(tmp_path, train=replace(TRAIN, source=source))
    assert source.seen == [0] * 5 + [1] * 5 + [2] * 5


def test_tests_are_run_when_due_and_always_at_the_end(tmp_path: Path) -> None:
    _, result = trained(tmp_path, recipe=tiny_recipe(epochs=5, evaluate_every=2))
    looked = [metrics.epoch for metrics in result.history if metrics.test_accuracy is not None]
    assert looked == [1, 3, 4]
    assert result.best_epoch in looked


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    heard: list[Progress] = []
    _, result = trained(tmp_path, on_progress=heard.append)
    assert [progress.step for progress in heard] == sorted(progress.step for progress in heard)
    assert {progress.step for progress in heard} == set(range(1, STEPS + 1))
    assert heard[-1].steps == STEPS
    assert heard[-1].seconds_left == 0.0
    assert heard[-1].test_accuracy == result.accuracy
    assert all(progress.images_per_second > 0 and 0 <= progress.accuracy <= 1 for progress in heard)


def test_a_cnn_trains_by_the_same_loop(tmp_path: Path) -> None:
    model = loading.untrained("resnet20", classes=CLASSES, image_size=(8, 12))
    before = state(model)
    _, result = trained(tmp_path, model, recipe=tiny_recipe(epochs=1))
    assert not same(before, state(model))
    assert state(model)["bn1.num_batches_tracked"] == 5
    assert 0 <= result.accuracy <= 1


@pytest.mark.parametrize(
    ("train", "error", "match"),
    [
        (replace(TRAIN, labels=None), DataError, "found images without labels"),
        (TRAIN.pick(torch.arange(0)), DataError, "found none"),
        (replace(TRAIN, classes=("a", "b")), InputError, "expected a model of random's 2 classes"),
        (replace(TRAIN, labels=torch.full((40,), 3)), DataError, "expected labels from 0 to 2"),
        (replace(TRAIN, labels=torch.arange(40) % 2), DataError, r"found none of 1 \(c\)"),
    ],
)
def test_refuses_data_that_does_not_fit(tmp_path: Path, train: Split, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        trained(tmp_path, train=train)


def test_one_class_is_refused(tmp_path: Path) -> None:
    model = loading.untrained("vit-mini", classes=("a",), image_size=(8, 12))
    one = [replace(split, classes=("a",), labels=torch.zeros(len(split), dtype=torch.long)) for split in (TRAIN, TEST)]
    with pytest.raises(DataError, match="at least 2 classes"):
        trained(tmp_path, model, train=one[0], test=one[1])


def test_metrics_are_json_lines(tmp_path: Path) -> None:
    trained(tmp_path, recipe=tiny_recipe(epochs=1))
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line)["images"] == 40
