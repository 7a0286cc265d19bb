"""A head trained on cached features is the head trained with the backbone run each time."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.kit.tiny import model_of
from tests.kit.trainings import (
    CLASSES,
    SHAPE,
    TEST,
    TRAIN,
    InterruptedTrainingError,
    state,
    tiny_model,
    tiny_recipe,
)
from tests.kit.trainings import trained as trained_whole
from vitlens.errors import InputError, UnsupportedError
from vitlens.models import loading, saved
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.rebuild import classifiers, for_classes
from vitlens.training import loop
from vitlens.training.head import HeadOnly, fit_head, read_features, require_cacheable
from vitlens.training.loop import BEST_FILE
from vitlens.training.metrics import Progress, TrainingResult, read_metrics
from vitlens.training.recipe import Recipe
from vitlens.training.task import Task

PLAIN: dict[str, Any] = {"learning_rate": 0.03, "crop_padding": 0, "flip": False, "average": 0.0, "epochs": 4}
OTHERS = ("1", "2")


def start(*, seed: int = 0) -> Model:
    """A model of other classes with dropout in its blocks, given a head for these."""
    overrides = {**SHAPE, "drop_path": 0.2, "dropout": 0.1}
    return for_classes(
        untrained("vit-mini", classes=OTHERS, image_size=(8, 12), seed=seed, overrides=overrides), CLASSES
    )


def trained(
    folder: Path, model: Model | None = None, *, views: int = 1, reading: AbstractContextManager[Any] | None = None,
    recipe: Recipe | None = None, **changes: Any,
) -> tuple[Model, TrainingResult]:  # fmt: skip
    model = model or start()
    task = Task(model, TRAIN, TEST, recipe or tiny_recipe(**PLAIN), folder, precision="fp32", **changes)
    return model, fit_head(task, views=views, reading=reading)


@pytest.mark.parametrize(
    ("changes", "views"), [({}, 1), ({"average": 0.9}, 1), ({"crop_padding": 1, "flip": True}, 4)], ids=str
)
def test_the_result_equals_training_with_the_backbone(tmp_path: Path, changes: dict[str, Any], views: int) -> None:
    """With as many cached views as epochs, each epoch sees what a training without a cache would see."""
    recipe, read = tiny_recipe(**{**PLAIN, **changes}), list[int]()
    cached, result = trained(tmp_path / "cached", recipe=recipe, views=views, reading=nullcontext(read.append))
    assert sum(read) == views * 40 + 12
    uncached, expected = trained_whole(tmp_path / "uncached", start(), recipe=recipe, precision="fp32", train_last=0)
    before, one, other = state(start()), state(cached), state(uncached)
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-4, atol=1e-6), name
        assert torch.equal(value, before[name]) == (not name.startswith("head.")), name
    assert one["head.weight"].abs().max() > 1e-3
    for epoch, expected_epoch in zip(result.history, expected.history, strict=True):
        assert epoch.train_loss == pytest.approx(expected_epoch.train_loss, rel=1e-5)
        assert epoch.gradient_norm == pytest.approx(expected_epoch.gradient_norm, rel=1e-4)
        for name in ("step", "images", "learning_rate", "test_accuracy"):
            assert getattr(epoch, name) == getattr(expected_epoch, name)
    assert (result.best_epoch, result.best_accuracy) == (expected.best_epoch, expected.best_accuracy)
    assert f"(images {'unchanged' if views == 1 else 'in 4 augmented views'}" in result.notes[-1]


def test_the_new_head_starts_at_zero(tmp_path: Path) -> None:
    one_step = tiny_recipe(**{**PLAIN, "epochs": 1, "batch_size": 40, "label_smoothing": 0.0})
    _, result = trained(tmp_path, recipe=one_step)
    assert result.history[0].train_loss == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-6)


def test_the_files_match_the_result(tmp_path: Path) -> None:
    model, result = trained(tmp_path, recipe=tiny_recipe(**{**PLAIN, "learning_rate": 0.3}))
    assert result.accuracy < result.best_accuracy  # the weights of an earlier epoch are kept
    for file, accuracy in ((result.weights, result.accuracy), (result.best_weights, result.best_accuracy)):
        with torch.inference_mode():
            logits = loading.load(str(file))(next(TEST.batches(12)).images)
        assert (logits.argmax(1) == TEST.labels).float().mean().item() == pytest.approx(accuracy)
    weights = load_file(result.weights)
    assert all(torch.equal(weights[name], value) for name, value in state(model).items())
    assert read_metrics(tmp_path) == result.history
    assert {path.name for path in tmp_path.iterdir()} == {BEST_FILE, saved.WEIGHTS_FILE, "metrics.jsonl", "checkpoint"}
    # the checkpoint holds only the head
    assert all(value.numel() <= 3 * 16 for value in load_file(tmp_path / "checkpoint" / "state.safetensors").values())
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = trained(tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_INTERVAL", 0.0)
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0.0)
    begun: list[int] = []

    def stop(progress: Progress) -> None:
        begun.append(progress.step)
        if progress.epoch == 2:
            raise InterruptedTrainingError

    with pytest.raises(InterruptedTrainingError):
        trained(tmp_path / "cut", on_progress=stop)
    resumed, result = trained(tmp_path / "cut", resume=True, on_progress=lambda each: begun.append(each.step))
    assert begun.count(11) == 2  # the epoch that was cut is begun again
    assert begun.count(6) == 1
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    assert [epoch.train_loss for epoch in result.history] == [epoch.train_loss for epoch in expected.history]
    assert result.best_epoch == expected.best_epoch
    best, expected_best = load_file(result.best_weights), load_file(expected.best_weights)
    assert all(torch.equal(best[name], expected_best[name]) for name in expected_best)


def test_another_backbone_is_not_resumed(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(InputError, match=r"with its frozen\.backbone = "):
        trained(tmp_path, start(seed=1), resume=True)
    with pytest.raises(InputError, match=r"with its frozen\.views = 1, found 2"):
        trained(tmp_path, resume=True, views=2)


@pytest.mark.parametrize(
    ("recipe", "views", "match"),
    [
        (Recipe(flip=True, crop_padding=2), 1, "crop_padding, flip; add --cached-views 4"),
        (Recipe(mixup=0.8), 4, "with mixup 0.8; add --set mixup=0, or train with --train-last 1"),
        (Recipe(cutmix=1.0), 4, "with cutmix 1.0; add --set cutmix=0"),
        (Recipe(views=3), 4, "with views 3; add --set views=1"),
        (Recipe(), 0, "--cached-views at least 1, found 0"),
        (Recipe(), 1, None),
        (Recipe(flip=True), 2, None),
    ],
)
def test_what_cannot_be_cached_is_refused(recipe: Recipe, views: int, match: str | None) -> None:
    with nullcontext() if match is None else pytest.raises(InputError, match=match):
        require_cacheable(recipe, views=views)


def test_a_cnn_and_its_batch_statistics(tmp_path: Path) -> None:
    model = for_classes(untrained("resnet20", classes=OTHERS, image_size=(8, 12)), CLASSES)
    before = state(model)
    trained(tmp_path, model)
    changed = {name for name, value in state(model).items() if not torch.equal(value, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


MADE = {
    "ours": tiny_model,
    "ours, distilled": lambda: tiny_model(distillation=True),
    "ours, mean of patches": lambda: tiny_model(pooling="mean"),
    "resnet": lambda: untrained("resnet20", classes=CLASSES),
    "timm, distilled": lambda: load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32)),
    "timm, a CNN": lambda: load("timm:resnet10t", random_weights=True, image_size=(32, 32)),
    "torchvision": lambda: load("torchvision:mobilenet_v3_small", random_weights=True),
}


@pytest.mark.parametrize("name", MADE)
def test_the_head_on_features_gives_the_models_logits(name: str) -> None:
    model = MADE[name]().eval()
    images = torch.rand(3, 3, *model.input_size)
    features, head = read_features(model, images), HeadOnly(model)
    assert features.shape[:2] == (3, len(classifiers(model)))
    with torch.no_grad():
        assert torch.allclose(head(features), model(images), atol=1e-5)
    assert {id(part) for part in head.parameters()} <= {id(part) for part in model.parameters()}


class Twice(nn.Module):
    """Logits that are doubled after the head, or a head that reads every patch."""

    def __init__(self, *, patches: bool) -> None:
        super().__init__()
        self.first, self.head, self.patches = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4, 5), patches

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first(images).flatten(2).transpose(1, 2)  # (batch, patches, 4)
        return self.head(maps).mean(1) if self.patches else 2 * self.head(maps.mean(1))


@pytest.mark.parametrize(("patches", "match"), [(True, r"one vector per image, found \(2, 16, 4\)"), (False, "differ")])
def test_a_head_that_is_not_the_last_step_is_refused(patches: bool, match: str) -> None:
    model = model_of(Twice(patches=patches))
    with pytest.raises(UnsupportedError, match=f"{match}.*--train-last 1 in place of --freeze-backbone"):
        read_features(model, torch.rand(2, 3, 32, 32))
    assert not any(module._forward_pre_hooks for module in model.modules())
