"""Models and recipes broken on purpose: each finding names what was done, and what is healthy passes."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import vitlens
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.training.check import Finding, check_training
from vitlens.training.recipe import Recipe, recipe_for

IMAGES = vitlens.load_data("digits", part="train").limit(120)
RECIPE = replace(recipe_for("vit-micro", "digits"), learning_rate=1e-2)
NAMES = ("initial loss", "gradient norms", "one batch", "learning rate")


def tiny(**changes: object) -> Model:
    shape: Any = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8], **changes}
    return untrained("vit-micro", classes=IMAGES.classes, overrides=shape)


def run(model: Model, split: Split = IMAGES, *, recipe: Recipe = RECIPE, **more: Any) -> dict[str, Finding]:
    found = {each.name: each for each in check_training(model, split, split, recipe=recipe, **more)}
    assert tuple(found) == NAMES
    return found


def states(found: dict[str, Finding]) -> str:
    """The first letter of each finding's state: pass, warn, fail, inconclusive."""
    return "".join(each.state[0] for each in found.values())


@pytest.mark.parametrize(
    "preset", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("vit-mini", "swin-micro", "resnet20"))]
)
def test_healthy_models_pass(preset: str | None) -> None:
    model = untrained(preset, classes=IMAGES.classes) if preset else tiny()
    recipe = recipe_for(preset, "digits") if preset else RECIPE
    found = run(model, recipe=recipe)
    assert states(found) == "pppp"
    if preset is None:
        assert found["initial loss"].value == pytest.approx(math.log(10), abs=0.1)
        assert found == run(tiny())


def enlarge_head(model: Model) -> None:
    model.module.head.weight.data.mul_(300)


def divide_by_zero(model: Model) -> None:
    model.module.blocks[0].register_forward_hook(lambda _, __, output: output / 0)


def shrink_gradient(model: Model) -> None:
    model.module.blocks[1].register_forward_hook(
        lambda _, __, output: output.detach() + 1e-9 * (output - output.detach())
    )


def cut_off(model: Model) -> None:
    model.module.head.register_forward_hook(lambda _, __, output: output.detach())


def zero_head(model: Model) -> None:  # as a new head of a trained model
    nn.init.zeros_(model.module.head.weight)


def zero_norm(model: Model) -> None:
    zero_head(model)
    nn.init.zeros_(model.module.norm.weight)


@pytest.mark.parametrize(
    ("damage", "expected", "name", "says"),
    [
        (zero_head, "pipp", "initial loss", "pass          initial loss: 2.303 nats"),
        (enlarge_head, "fp..", "initial loss", "confident and wrong: make the head's initial weights smaller"),
        (divide_by_zero, "ffii", "initial loss", "Look for a division by 0"),
        (divide_by_zero, "ffii", "learning rate", "a loss that is not finite"),
        (shrink_gradient, "pf..", "gradient norms", "Gradients vanish or explode between these layers"),
        (cut_off, "pifi", "gradient norms", "is the loss cut off from them?"),
        pytest.param(zero_norm, "p.fi", "learning rate", "the rate is not the cause", marks=pytest.mark.slow),
    ],
)
def test_what_is_broken_is_named(damage: Callable[[Model], None], expected: str, name: str, says: str) -> None:
    model = tiny()
    damage(model)
    found = run(model)
    assert all(state == wanted for state, wanted in zip(states(found), expected) if wanted != "."), states(found)
    assert says in found[name].line


@pytest.mark.parametrize(
    ("rate", "word", "optimiser"),
    [
        (10.0, "high", "muon"),
        (1e-8, "low", "adamw"),
        pytest.param(10.0, "high", "adamw", marks=pytest.mark.slow),
        pytest.param(1e-8, "low", "muon", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_learning_rate_is_the_only_fault_and_a_better_one_is_given(rate: float, word: str, optimiser: str):
    found = run(tiny(), recipe=replace(RECIPE, optimiser=optimiser, learning_rate=rate))
    assert states(found) == "pppf"  # the batch is learned at another rate
    assert found["learning rate"].value == rate
    assert f"The rate is too {word}: try --learning-rate 0.01." in found["learning rate"].line


def test_a_low_rate_of_fine_tuning_at_which_the_loss_falls_is_no_fault() -> None:
    model = tiny(dim=32)
    zero_head(model)
    found = run(model, recipe=replace(RECIPE, optimiser="adamw", learning_rate=3e-4))
    assert states(found)[2:] == "pp"
    assert found["one batch"].found.endswith(("at 0.01", "at 0.001"))


def test_a_part_that_is_frozen_on_purpose_is_no_fault() -> None:
    model = vitlens.load("vit-digits")
    found = run(model, train_last=1, fresh=False, recipe=replace(RECIPE, optimiser="adamw"))
    assert states(found)[0] == "i"  # it knows the digits
    assert "f" not in states(found)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_is_left_behind(mode: bool) -> None:
    model = tiny(dropout=0.2).train(mode)
    model.module.head.weight.grad = torch.ones_like(model.module.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    run(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(part.training is mode for part in model.modules())
    gradients = {name: each.grad for name, each in model.module.named_parameters() if each.grad is not None}
    assert gradients.keys() == {"head.weight"}
    assert gradients["head.weight"].eq(1).all()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_images_of_one_class_and_without_labels() -> None:
    assert IMAGES.labels is not None
    found = run(tiny(), IMAGES.pick((IMAGES.labels == 3).nonzero()[:, 0]))
    assert states(found)[2:] == "ii"
    assert "Give images of two classes" in found["one batch"].line
    with pytest.raises(DataError, match="expected labelled train images in digits, found images without labels"):
        run(tiny(), replace(IMAGES, labels=None))
