"""Trainings without labels, of a tiny model on a few images, and the parts of their objectives."""

from pathlib import Path
from typing import Any

import vitlens
from tests.kit.making import untrained
from tests.kit.trainings import plain_recipe, trained
from vitlens import Model, Split
from vitlens.data.captions import PROMPTS, captions_of
from vitlens.training.metrics import TrainingResult
from vitlens.training.objectives import clip, dino, mae, pretraining
from vitlens.training.objectives.clip import text_classifier
from vitlens.training.objectives.pretraining import make_objective

# besides what is made here
__all__ = [
    "captions_of",
    "clip",
    "dino",
    "mae",
    "pretraining",
    "text_classifier",
]

NAMES = ("mae", "dino", "clip")
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
SETTINGS: dict[str, dict[str, Any]] = {
    "mae": {"decoder_dim": 8, "decoder_depth": 1},
    "dino": {"outputs": 12, "local_size": 16},
    "clip": {"text_dim": 8, "text_depth": 1},
}


def scenes(part: Any, count: int = 24, data: str = "shapes") -> Split:
    return vitlens.load_data(data, part=part, limit=count)


def headless(*, seed: int = 0, **shape: Any) -> Model:
    return untrained("vit-mini", classes=(), seed=seed, overrides={**SHAPE, **shape})


def built(
    name: str, model: Model | None = None, *, train: Split | None = None, **settings: Any
) -> Any:
    """Return the module that an objective trains."""
    train = train or scenes("train")
    objective = make_objective(name, train, train, {**SETTINGS[name], **settings})
    assert objective is not None
    return objective.module(model or headless())


def pretrained(
    name: str,
    folder: Path,
    model: Model | None = None,
    *,
    train: Split | None = None,
    test: Split | None = None,
    recipe: Any = None,
    settings: Any = None,
    **changes: Any,
) -> tuple[Model, TrainingResult]:
    """Return a model after a training of a few steps, and its result."""
    train = train or scenes("train")
    test = test or scenes("test", 16)
    objective = make_objective(name, train, test, {**SETTINGS[name], **(settings or {})})
    recipe = recipe or plain_recipe(epochs=3)
    return trained(
        folder,
        model or headless(),
        train=train,
        test=test,
        objective=objective,
        recipe=recipe,
        **changes,
    )


def with_prompts_of_training(model):
    """Return the zero-shot classifier of a model by the prompts that its training chose."""
    return vitlens.zero_shot(model, model.classes, templates=PROMPTS)
