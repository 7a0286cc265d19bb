import dataclasses
import json

import pytest

from vitlens.errors import InputError
from vitlens.names import PRESETS
from vitlens.training.recipe import FINE_TUNING, RECIPES, Recipe, fitted, override, recipe_for


def test_every_preset_has_a_recipe_and_one_for_digits() -> None:
    assert {name for name in RECIPES if "/" not in name} == set(PRESETS)
    small = {name for name in PRESETS if not name.endswith("-224")}
    assert {name.partition("/")[0] for name in RECIPES if name.endswith("/digits")} == small


@pytest.mark.parametrize("preset", [name for name in RECIPES if name.endswith("/digits")])
def test_digits_are_never_flipped(preset: str) -> None:
    assert not RECIPES[preset].flip


def test_the_pair_comes_before_the_preset_and_the_preset_before_fine_tuning() -> None:
    assert recipe_for("vit-mini", "digits") is RECIPES["vit-mini/digits"]
    assert recipe_for("vit-mini", "cifar10") is RECIPES["vit-mini"]
    assert recipe_for("timm:vit_tiny_patch16_224", "digits") is FINE_TUNING


def test_an_override_clears_what_was_measured_unless_the_value_is_the_same() -> None:
    recipe = Recipe(measured="90 %")
    assert override(recipe, {"epochs": 3}).measured == ""
    assert override(recipe, {"epochs": 3}).epochs == 3
    assert override(recipe, {"epochs": recipe.epochs}) == recipe


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
        {"crop_padding": -1},
        {"clip": -0.5},
        {"lr": 1.0},
        {"measured": "100 %"},
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^expected .*, found "):
        override(Recipe(), changes)


def test_numbers_are_json_without_the_notes() -> None:
    numbers = Recipe(source="a", measured="b").numbers()
    assert json.loads(json.dumps(numbers)) == numbers
    assert set(numbers) == {field.name for field in dataclasses.fields(Recipe)} - {"source", "measured"}


@pytest.mark.parametrize(
    ("images", "processes", "batch"),
    # ten batches of the recipe's size; fewer: the largest power of two of which there are ten; at least 8, and one each
    [(1280, 1, 128), (1279, 1, 64), (400, 1, 32), (48, 1, 8), (3, 1, 8), (48, 16, 16), (3, 500, 128)],
)
def test_few_images_get_small_batches_at_a_lower_rate(images, processes, batch):
    usual = Recipe(batch_size=128, learning_rate=1e-3, measured="90 %")
    how = fitted(usual, images, processes=processes)
    assert how.batch_size == batch
    assert how.learning_rate == pytest.approx(1e-3 * (batch / 128) ** 0.5, rel=1e-3)
    assert (how == usual) == (batch == 128)
    assert fitted(usual, images, processes=processes, rate_given=True).learning_rate == 1e-3


def test_a_whole_number_for_a_fraction_is_one():
    changed = override(Recipe(), {"cutmix": 1, "epochs": 3})
    assert isinstance(changed.cutmix, float)  # torch draws no mixing share from Beta(1, 1) of whole numbers
    assert isinstance(changed.epochs, int)
