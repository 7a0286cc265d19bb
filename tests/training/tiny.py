"""The tiny model, data and recipe of the fixtures and the subprocess tests."""

import torch

from vitlens.data.split import InMemory, Split
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.names import Part
from vitlens.training.recipe import Recipe

CLASSES = ("a", "b", "c")


def tiny_model(*, seed: int = 0, drop_path: float = 0.2, dropout: float = 0.1) -> Model:
    overrides = {"dim": 16, "depth": 2, "heads": 2, "drop_path": drop_path, "dropout": dropout, "patch_size": [4, 4]}
    return untrained("vit-mini", classes=CLASSES, image_size=(8, 12), seed=seed, overrides=overrides)


def tiny_split(part: Part, count: int) -> Split:
    generator = torch.Generator().manual_seed(len(part))
    pixels = torch.randint(0, 256, (count, 3, 8, 12), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % len(CLASSES)
    return Split("random", part, InMemory(pixels), (8, 12), CLASSES, labels=labels)


def tiny_recipe(**changes: object) -> Recipe:
    values: dict[str, object] = {
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "average": 0.9,
        "crop_padding": 1,
        "flip": True,
        "label_smoothing": 0.1,
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]
