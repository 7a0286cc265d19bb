"""Models and recipes broken on purpose: each finding names what was done, and what is healthy passes."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import vitlens
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.training.check import Finding, check_training
from vitlens.training.recipe import Recipe, recipe_for

SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
RECIPE = replace(recipe_for("vit-micro", "digits"), learning_rate=1e-2)


@pytest.fixture(scope="module")
def images() -> Split:
    return load_data("digits", part="train").limit(120)


def tiny(**changes: object) -> Model:
    return untrained("vit-micro", classes=tuple("0123456789"), overrides={**SHAPE, **changes})


def run(model: Model, split: Split, *, recipe: Recipe = RECIPE, **more: object) -> dict[str, Finding]:
    findings = check_training(model, split, split, recipe=recipe, **more)
    assert [each.name for each in findings] == ["initial loss", "gradient norms", "one batch", "learning rate"]
    return {each.name: each for each in findings}


def failed(found: dict[str, Finding]) -> list[str]:
    return [name for name, each in found.items() if each.state == "fail"]


def test_a_healthy_model_passes(images):
    found = run(tiny(), images)
    assert {each.state for each in found.values()} == {"pass"}
    assert found["initial loss"].value == pytest.approx(math.log(10), abs=0.1)


@pytest.mark.parametrize("preset", ["vit-micro", "vit-mini", "swin-micro", "resnet20"])
@pytest.mark.slow
def test_small_presets_pass(preset, images):
    found = run(untrained(preset, classes=images.classes), images, recipe=recipe_for(preset, "digits"))
    assert {each.state for each in found.values()} == {"pass"}


def enlarge_head(model: Model) -> None:
    with torch.no_grad():
        model.module.head.weight.mul_(300)


def divide_by_zero(model: Model) -> None:
    model.module.blocks[0].register_forward_hook(lambda _, __, output: output / 0)


def shrink_gradient(model: Model) -> None:
    model.module.blocks[1].register_forward_hook(
        lambda _, __, output: output.detach() + 1e-9 * (output - output.detach())
    )


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (enlarge_head, "initial loss", "confident and wrong: make the head's initial weights smaller"),
        (divide_by_zero, "initial loss", "Look for a division by 0"),
        (shrink_gradient, "gradient norms", "Gradients vanish or explode between these layers"),
    ],
)
def test_what_is_broken_is_named_first(damage: Callable[[Model], None], name: str, says: str, images: Split):
    model = tiny()
    damage(model)
    found = run(model, images)
    assert failed(found)[0] == name
    assert says in found[name].line


def test_a_head_that_starts_at_zero_is_healthy(images):
    model = tiny()
    nn.init.zeros_(model.module.head.weight)
    found = run(model, images)
    assert failed(found) == []
    assert found["initial loss"].value == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "word", "optimiser"),
    [
        (10.0, "high", "muon"),
        (1e-8, "low", "adamw"),
        pytest.param(10.0, "high", "adamw", marks=pytest.mark.slow),
        pytest.param(1e-8, "low", "muon", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_learning_rate_is_the_only_fault_and_a_better_one_is_given(optimiser, rate, word, images):
    found = run(tiny(), images, recipe=replace(RECIPE, optimiser=optimiser, learning_rate=rate))
    assert failed(found) == ["learning rate"]
    assert found["learning rate"].value == rate
    assert f"The rate is too {word}: try --learning-rate 0.01." in found["learning rate"].line
    assert found["one batch"].state == "pass"  # at another rate


def test_a_low_rate_of_fine_tuning_at_which_the_loss_falls_is_no_fault(images):
    model = tiny(dim=32)
    nn.init.zeros_(model.module.head.weight)  # as a new head of a trained model
    found = run(model, images, recipe=replace(RECIPE, optimiser="adamw", learning_rate=3e-4))
    assert (found["one batch"].state, found["learning rate"].state) == ("pass", "pass")
    assert found["one batch"].found.endswith(("at 0.01", "at 0.001"))


@pytest.mark.slow
def test_where_no_rate_fits_the_rate_is_not_blamed(images):
    model = tiny()
    nn.init.zeros_(model.module.head.weight)
    nn.init.zeros_(model.module.norm.weight)
    found = run(model, images)
    assert found["one batch"].state == "fail"
    assert found["learning rate"].state == "inconclusive"


def test_a_part_that_is_frozen_on_purpose_is_no_fault(images):
    model = vitlens.load("vit-digits")
    found = run(model, images, train_last=1, fresh=False, recipe=replace(RECIPE, optimiser="adamw"))
    assert failed(found) == []
    assert found["initial loss"].state == "inconclusive"  # it knows the digits
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_loss_that_is_cut_off_from_the_weights_is_a_finding(images):
    model = tiny()
    model.module.head.register_forward_hook(lambda _, __, output: output.detach())
    found = run(model, images)
    assert "is the loss cut off from them?" in found["gradient norms"].line
    assert failed(found) == ["one batch"]


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_is_left_behind(mode, images):
    model = tiny(dropout=0.2).train(mode)
    model.module.head.weight.grad = torch.ones_like(model.module.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    run(model, images)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(part.training is mode for part in model.modules())
    assert model.module.head.weight.grad.eq(1).all()
    assert all(each.grad is None for name, each in model.module.named_parameters() if name != "head.weight")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_same_seed_finds_the_same(images):
    first, second = (check_training(tiny(), images, images, recipe=RECIPE, seed=3) for _ in range(2))
    assert first == second


def test_images_without_labels_are_refused(images):
    with pytest.raises(DataError, match="expected labelled train images in digits, found images without labels"):
        check_training(tiny(), replace(images, labels=None), images, recipe=RECIPE)
