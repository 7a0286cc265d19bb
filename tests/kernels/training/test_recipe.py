"""Recipes: which one is taken, what is refused, and changes that keep trainings comparable."""

import dataclasses
import json

import numpy as np
import pytest

from vitlens.errors import InputError, UnknownNameError
from vitlens.names import PRESETS
from vitlens.training.recipe import (
    FINE_TUNING,
    RECIPES,
    Recipe,
    equal_budgets,
    fitted,
    override,
    recipe_for,
)


def test_the_pair_comes_before_the_preset_and_the_preset_before_fine_tuning():
    assert {name for name in RECIPES if "/" not in name} == set(PRESETS)
    small = {name for name in PRESETS if not name.endswith("-224")}
    assert {name.partition("/")[0] for name in RECIPES if name.endswith("/digits")} == small
    # a mirrored 2 is none
    for name, recipe in RECIPES.items():
        if name.endswith("/digits"):
            assert not recipe.flip
    assert recipe_for("vit-mini", "digits") is RECIPES["vit-mini/digits"]
    assert recipe_for("vit-mini", "cifar10") is RECIPES["vit-mini"]
    assert recipe_for("timm:vit_tiny_patch16_224", "digits") is FINE_TUNING
    assert recipe_for("vit-mini", "digits", named="course").epochs == 25
    with pytest.raises(UnknownNameError, match="did you mean 'course'"):
        recipe_for("vit-mini", "digits", named="cours")


def test_compared_presets_see_the_same_images_in_as_many_steps():
    """On data where their own recipes differ in passes, batches and augmentation."""
    presets = ("vit-micro", "resnet20", "vit-tiny-224")
    budgets = equal_budgets(presets, "cifar10")
    recipes = [override(recipe_for(preset, "cifar10"), budgets[preset]) for preset in presets]
    shared = (
        "epochs",
        "batch_size",
        "crop_padding",
        "flip",
        "randaugment",
        "cutmix",
        "mixup",
        "erasing",
        "views",
    )
    assert len({tuple(getattr(recipe, name) for name in shared) for recipe in recipes}) == 1
    # the most and the fewest of the three
    assert (recipes[0].epochs, recipes[0].batch_size) == (
        300,
        128,
    )
    assert recipes[2].learning_rate == pytest.approx(1e-3 * (128 / 1024) ** 0.5, rel=1e-3)
    assert recipes[1].optimiser == recipe_for("resnet20", "cifar10").optimiser
    same = equal_budgets(["vit-micro", "resnet20"], "digits")
    assert {name: dict(changes) for name, changes in same.items()} == {
        "vit-micro": {},
        "resnet20": {},
    }
    few = equal_budgets(["resnet20"], "digits", epochs=1, batch_size=8)
    assert few == {"resnet20": {"epochs": 1, "batch_size": 8}}


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"evaluate_every": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"weight_decay": -1.0},
        {"warmup": 1.5},
        {"label_smoothing": 1.0},
        {"average": 1.0},
        {"betas": (0.9, 1.0)},
        {"betas": [0.9]},
        {"betas": ["a", "b"]},
        {"crop_padding": -1},
        {"clip": -0.5},
        {"lr": 1.0},
        {"source": "here"},
        {"epochs": 1.5},
        {"flip": 1},
        {"optimiser": "sgd"},
        {"magnitude": 31},
        {"layer_decay": 0.0},
        {"average": True},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(changes):
    with pytest.raises(InputError):
        override(Recipe(), changes)


def test_limits_are_taken_and_numbers_are_json_without_the_notes():
    limits = dict.fromkeys(("warmup", "layer_decay"), 1.0) | dict.fromkeys(
        ("erasing", "average", "clip"), 0
    )
    changes = {**limits, "epochs": 1, "magnitude": 30, "cutmix": 1, "betas": [0.9, 0.0]}
    changed = override(Recipe(), {**changes, "learning_rate": np.float64(0.5)})
    # torch draws no mixing share from Beta(1, 1) of whole numbers
    assert isinstance(changed.cutmix, float)
    assert (type(changed.epochs), changed.betas) == (int, (0.9, 0.0))
    numbers = Recipe(source="a").numbers()
    assert json.loads(json.dumps(numbers)) == numbers
    assert set(numbers) == {field.name for field in dataclasses.fields(Recipe)} - {"source"}


@pytest.mark.parametrize(
    ("images", "processes", "batch"),
    # ten batches of the recipe's size; fewer: the largest power of two of which there are ten; at
    # least 8, and one each
    [
        (1280, 1, 128),
        (1279, 1, 64),
        (400, 1, 32),
        (48, 1, 8),
        (3, 1, 8),
        (48, 16, 16),
        (3, 500, 128),
    ],
)
def test_few_images_get_small_batches_at_a_lower_rate(images, processes, batch):
    default = Recipe(batch_size=128, learning_rate=1e-3)
    how = fitted(default, images, processes=processes)
    assert how.batch_size == batch
    assert how.learning_rate == pytest.approx(1e-3 * (batch / 128) ** 0.5, rel=1e-3)
    assert (how == default) == (batch == 128)
    assert fitted(default, images, processes=processes, rate_given=True).learning_rate == 1e-3
