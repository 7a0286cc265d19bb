"""A tiny model, data and recipe, and trainings of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import vitlens
from vitlens.data.split import InMemory, Split
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.names import Part
from vitlens.training.metrics import Progress, TrainingResult, read_metrics
from vitlens.training.recipe import Recipe

CLASSES = ("a", "b", "c")
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [4, 4]}
STEPS = 3 * 5  # three epochs of five batches of eight


class InterruptedTrainingError(Exception):
    """Stands for a Ctrl-C, or for anything else."""


def tiny_model(*, seed: int = 0, drop_path: float = 0.2, dropout: float = 0.1, **shape: object) -> Model:
    overrides: Any = {**SHAPE, "drop_path": drop_path, "dropout": dropout, **shape}
    return untrained("vit-mini", classes=CLASSES, image_size=(8, 12), seed=seed, overrides=overrides)


def tiny_split(part: Part, count: int) -> Split:
    generator = torch.Generator().manual_seed(len(part))
    pixels = torch.randint(0, 256, (count, 3, 8, 12), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % len(CLASSES)
    return Split("random", part, InMemory(pixels), (8, 12), CLASSES, labels=labels)


def tiny_recipe(**changes: object) -> Recipe:
    values: dict[str, Any] = {
        "epochs": 3, "batch_size": 8, "learning_rate": 3e-3, "average": 0.9, "crop_padding": 1, "flip": True,
        "label_smoothing": 0.1,
    }  # fmt: skip
    return Recipe(**{**values, **changes})


TRAIN, TEST = tiny_split("train", 40), tiny_split("test", 12)


def trained(folder: Path, model: Model | None = None, **changes: Any) -> tuple[Model, TrainingResult]:
    """A model after a training, and its result."""
    model = model or tiny_model()
    settings = {"recipe": tiny_recipe(), "directory": folder, "train": TRAIN, "test": TEST, **changes}
    return model, vitlens.train(model, **settings)


def interrupting(at: int) -> Callable[[Progress], None]:
    """Stops a training after a step."""

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
