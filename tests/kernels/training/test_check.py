"""Models and recipes broken on purpose: each finding names the fault, and healthy ones pass."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import vitlens
from tests.kit.making import untrained
from tests.kit.select import index_by
from vitlens import Model, Split
from vitlens.errors import DataError
from vitlens.training.check import BatchRun, Finding, check_training, learning_rate
from vitlens.training.recipe import Recipe, recipe_for

IMAGES = vitlens.load_data("digits", part="train", limit=120)
RECIPE = replace(recipe_for("vit-micro", "digits"), learning_rate=1e-2)
SLOW = pytest.mark.slow


def tiny(**changes: object) -> Model:
    shape: Any = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8], **changes}
    return untrained("vit-micro", classes=IMAGES.classes, overrides=shape)


def run(
    model: Model, split: Split = IMAGES, *, recipe: Recipe = RECIPE, **more: Any
) -> dict[str, Finding]:
    findings = index_by(check_training(model, split, split, recipe=recipe, **more), "name")
    assert tuple(findings) == ("initial loss", "gradient norms", "one batch", "learning rate")
    return findings


def states(findings: dict[str, Finding]) -> str:
    """Return the first letter of each finding's state: pass, warn, fail, inconclusive."""
    return "".join(finding.state[0] for finding in findings.values())


@pytest.mark.parametrize("mode", [True, False])
def test_a_healthy_model_passes_and_is_as_before(mode):
    model = tiny(dropout=0.7).train(mode)  # without which the batch is learned by heart
    model.module.head.weight.grad = torch.ones_like(model.module.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    findings = run(model)
    assert states(findings) == "pppp"
    assert len({finding.found for finding in findings.values()}) == 4  # each says something else
    assert findings["initial loss"].value == pytest.approx(math.log(10), abs=0.1)
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value)
    for part in model.modules():
        assert part.training is mode
    gradients = {
        name: parameter.grad
        for name, parameter in model.module.named_parameters()
        if parameter.grad is not None
    }
    assert gradients.keys() == {"head.weight"}
    assert gradients["head.weight"].eq(1).all()
    assert torch.equal(torch.random.get_rng_state(), random)
    if mode:
        assert findings == run(tiny(dropout=0.7))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["vit-mini", "swin-micro", "resnet20"])
def test_healthy_presets_pass(preset):
    assert (
        states(run(untrained(preset, classes=IMAGES.classes), recipe=recipe_for(preset, "digits")))
        == "pppp"
    )


def zero_head(model: Model) -> None:  # as a new head of a trained model
    nn.init.zeros_(model.module.head.weight)


def hooked(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], object]:
    """Return a function that changes the output of a part of the model."""
    return lambda model: model.module.get_submodule(part).register_forward_hook(
        lambda _, __, output: change(output)
    )


ENLARGED = "make the head's initial weights smaller"
DAMAGES: dict[str, tuple[Callable[[Model], object], bool, str, str, str]] = {
    "a new head": (zero_head, True, "pppp", "initial loss", "2.303 nats"),
    "a large head": (
        lambda model: model.module.head.weight.data.mul_(300),
        True,
        "fp..",
        "initial loss",
        ENLARGED,
    ),
    "a trained one": (
        lambda model: model.module.head.weight.data.mul_(300),
        False,
        "wp..",
        "initial loss",
        "",
    ),
    "infinity": (
        hooked("blocks.0", lambda output: output / 0),
        True,
        "ffii",
        "initial loss",
        "division by 0",
    ),
    "a small gradient": (
        hooked("blocks.1", lambda output: output.detach().lerp(output, 1e-9)),
        True,
        "pf..",
        "gradient norms",
        "vanish or explode",
    ),
    "no gradient": (hooked("head", torch.Tensor.detach), True, "pifi", "gradient norms", "cut off"),
    "no norm": (
        lambda model: (zero_head(model), nn.init.zeros_(model.module.norm.weight)),
        True,
        "p.fi",
        "learning rate",
        "not the cause",
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW if kind == "no norm" else ()) for kind in DAMAGES]
)
def test_what_is_broken_is_named(kind):
    damage, fresh, expected, name, says = DAMAGES[kind]
    model = tiny()
    damage(model)
    findings = run(model, fresh=fresh)
    for state, letter in zip(states(findings), expected):
        if letter != ".":
            assert state == letter, states(findings)
    assert says in findings[name].line


@pytest.mark.parametrize(
    ("rate", "word", "optimiser"),
    [
        (10.0, "high", "muon"),
        (1e-8, "low", "adamw"),
        pytest.param(10.0, "high", "adamw", marks=SLOW),
        pytest.param(1e-8, "low", "muon", marks=SLOW),
    ],
)
def test_a_wrong_learning_rate_is_the_only_fault_and_a_better_one_is_given(rate, word, optimiser):
    findings = run(tiny(depth=1), recipe=replace(RECIPE, optimiser=optimiser, learning_rate=rate))
    assert states(findings) == "pppf"  # the batch is learned at another rate
    assert findings["learning rate"].value == rate
    assert f"too {word}: try learning_rate=0.01." in findings["learning rate"].line


def test_a_low_rate_of_fine_tuning_at_which_the_loss_falls_is_no_fault():
    model = tiny(dim=32)
    zero_head(model)
    assert (
        states(run(model, recipe=replace(RECIPE, optimiser="adamw", learning_rate=3e-4)))[2:]
        == "pp"
    )


def test_a_part_that_is_frozen_on_purpose_is_no_fault():
    model = vitlens.load("vit-digits")
    findings = run(model, train_last=1, fresh=False, recipe=replace(RECIPE, optimiser="adamw"))
    assert states(findings)[0] == "i"  # it knows the digits
    assert "f" not in states(findings)
    for parameter in model.parameters():
        assert not parameter.requires_grad


def test_images_of_one_class_and_without_labels():
    findings = run(tiny(dim=8, depth=1), IMAGES.pick((IMAGES.labels == 3).nonzero()[:, 0]))
    assert states(findings)[2:] == "ii"
    assert "two classes" in findings["one batch"].line
    with pytest.raises(DataError, match="found images without labels"):
        run(tiny(), replace(IMAGES, labels=None))


def test_a_batch_that_is_learned_already_passes():
    # of logits so far apart that the loss is rounded to 0
    run = BatchRun(1e-3, losses=(0.0,), constant_loss=0.7, weight_change=0.0, images=8)
    assert run.fits
    assert learning_rate([run]).state == "pass"
