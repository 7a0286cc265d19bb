"""A tiny model, data and recipe, trainings of them, and what a training shows to its model."""

from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit import splits
from vitlens import Model, Split
from vitlens.models.loading import untrained
from vitlens.names import Part
from vitlens.processes import Processes
from vitlens.training import loop
from vitlens.training.metrics import Progress, TrainingResult, read_metrics
from vitlens.training.recipe import Recipe

CLASSES = ("a", "b", "c")
SHAPE: Any = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [4, 4]}


class EnoughError(Exception):
    """Ends a training that has shown what a test needs; stands for a Ctrl-C."""


def tiny_model(
    *,
    seed: int = 0,
    drop_path: float = 0.2,
    dropout: float = 0.1,
    classes: tuple[str, ...] = CLASSES,
    **shape: object,
) -> Model:
    overrides: Any = {**SHAPE, "drop_path": drop_path, "dropout": dropout, **shape}
    return untrained(
        "vit-mini", classes=classes, image_size=(8, 12), seed=seed, overrides=overrides
    )


def tiny_cnn() -> Model:
    return untrained("resnet20", classes=CLASSES, image_size=(8, 12))


def split_of(pixels: Tensor, *, part: Part = "train") -> Split:
    """Return images with these pixels, labelled in turn."""
    return replace(
        splits.split_of(pixels, torch.arange(len(pixels)) % len(CLASSES), CLASSES),
        name="random",
        part=part,
    )


def tiny_split(part: Part, count: int, size: tuple[int, int] = (8, 12)) -> Split:
    generator = torch.Generator().manual_seed(len(part))
    return split_of(
        torch.randint(0, 256, (count, 3, *size), generator=generator, dtype=torch.uint8), part=part
    )


def tiny_recipe(**changes: object) -> Recipe:
    values: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "average": 0.9,
        "crop_padding": 1,
        "flip": True,
        "label_smoothing": 0.1,
    }
    return Recipe(**{**values, **changes})


def plain_recipe(**changes: object) -> Recipe:
    """Return a recipe without augmentation, warm-up, decay of the rate, clipping and averaging."""
    none = {
        "average": 0.0,
        "crop_padding": 0,
        "flip": False,
        "warmup": 0.0,
        "minimum": 1.0,
        "clip": 0.0,
    }
    return tiny_recipe(**{**none, "label_smoothing": 0.0, **changes})


def recipe_of(settings: Mapping[str, str]) -> Recipe:
    """Return the recipe that a record shows."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        is_text = name in ("source", "optimiser")
        values[name] = value if is_text else literal_eval(value)
    return Recipe(**values)


TRAIN = tiny_split("train", 40)
TEST = tiny_split("test", 12)


def trained(
    folder: Path, model: Model | None = None, **changes: Any
) -> tuple[Model, TrainingResult]:
    """Return a model after a training, and its result."""
    model = model or tiny_model()
    settings = {
        "recipe": tiny_recipe(),
        "directory": folder,
        "train": TRAIN,
        "test": TEST,
        **changes,
    }
    return model, vitlens.train(model, **settings)


def interrupting(at: int) -> Callable[[Progress], None]:
    """Return a callback that stops a training after a step."""

    def stop(progress: Progress) -> None:
        if progress.step == at:
            raise EnoughError

    return stop


@pytest.fixture
def progress_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0.0)


@pytest.fixture(scope="session")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an .npz of 50 scenes of digits, which stay the same in every epoch: 40 to train on."""
    split = vitlens.load_data("digits", limit=50)
    file = tmp_path_factory.mktemp("still") / "digits.npz"
    pixels = split.source.read(torch.arange(50)).permute(0, 2, 3, 1).numpy()
    np.savez(file, images=pixels, labels=split.labels.numpy())  # type: ignore[union-attr]
    return file


def state(model: Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def timeless(folder: Path) -> list[Any]:
    return [
        replace(metrics, seconds=0.0, images_per_second=0.0) for metrics in read_metrics(folder)
    ]


@dataclass
class Showing:
    """A user's objective, which stores the images and targets of the first steps, and ends."""

    steps: int = 1
    error: BaseException = field(default_factory=EnoughError)
    images: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)

    def module(self, model: Model) -> nn.Module:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, len(model.classes))
        )

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        self.images.append(images.clone())
        self.targets.append(targets.clone())
        if len(self.images) == self.steps:
            raise self.error
        return outputs.sum()

    def logits(self, outputs: Tensor) -> Tensor:
        return outputs

    def identity(self) -> dict[str, object]:
        return {}


def shown(
    train: Split, folder: Path, *, steps: int = 1, seed: int = 0, **recipe: Any
) -> tuple[Tensor, Tensor]:
    """Return the images and targets of the first steps of a training, as they enter the model."""
    showing = Showing(steps)
    model = untrained("vit-mini", classes=train.classes, image_size=train.size, overrides=SHAPE)
    with pytest.raises(EnoughError):
        trained(
            folder,
            model,
            train=train,
            test=train,
            recipe=plain_recipe(**recipe),
            seed=seed,
            objective=showing,
        )
    return torch.cat(showing.images), torch.cat(showing.targets)


@contextmanager
def one_of(processes: int, index: int, model: Model) -> Iterator[dict[str, Tensor]]:
    """Train inside the context as one of several processes.

    The gradients that would be averaged are stored by name.
    """
    gradients: dict[str, Tensor] = {}

    def backward(loss: Tensor) -> None:
        loss.backward()
        parameters = model.module.named_parameters()
        gradients.update(
            {name: value.grad.clone() for name, value in parameters if value.grad is not None}
        )

    accelerator = SimpleNamespace(
        num_processes=processes,
        process_index=index,
        backward=backward,
        prepare_model=lambda module: module,
        no_sync=lambda _: nullcontext(),
        wait_for_everyone=lambda: None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda _values: None)
        patch.setattr(
            loop, "accelerated", lambda device: (accelerator, Processes(index, processes, device))
        )
        yield gradients
