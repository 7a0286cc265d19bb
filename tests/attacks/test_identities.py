"""Attacks compared with closed-form results and with each other."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.attacks.models import adversarial, linear, perceptron, pictures, predictions, swept
from vitlens.attacks.attack import attack
from vitlens.attacks.engine import worst_case
from vitlens.attacks.norms import NORMS
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACKS
from vitlens.models.model import Model


def thresholds(model: Model, images: Tensor, power: int) -> Tensor:
    """The exact distance of each image from the boundary of a linear model of two classes, far from black and white."""
    weights = model.module.layers[1].weight
    with torch.no_grad():
        gap = model(images).diff(dim=1)[:, 0].abs()
    return gap / (weights[1] - weights[0]).norm(power)


@pytest.mark.parametrize("name", ["fgsm", "bim", "pgd", "apgd-ce"])
def test_a_linear_model_of_two_classes_breaks_at_its_margin(name):
    """L∞: at the margin over the L1 norm of the weights."""
    model, images = linear(classes=2), pictures(20, low=0.4, high=0.6)
    exact = thresholds(model, images, 1)
    levels = tuple(epsilon / 1000 for epsilon in range(4, 100, 4))
    broken_at = swept(model, images, "predicted", attack=name, epsilons=levels, steps=5).broken_at
    steps = torch.tensor([*levels, torch.inf], dtype=torch.float64)
    expected = steps[torch.searchsorted(steps, exact.double())]
    assert (broken_at >= expected).all()
    assert len(expected.unique()) > 4
    assert expected.max() < torch.inf
    assert (broken_at == expected).float().mean() > 0.8  # the rest lie a step short of a corner
    assert (broken_at <= expected + 0.0041).all()


@pytest.mark.parametrize("name", ["cw", "deepfool"])
def test_the_smallest_change_of_a_linear_model_is_the_distance_to_its_boundary(name):
    model, images = linear(classes=2), pictures(8, low=0.4, high=0.6)
    exact = thresholds(model, images, 2)
    result = attack(model, images, "predicted", method=name, steps=60)
    assert result.success.all()
    assert (result.distance >= exact).all()
    slack = 0.002 * exact if name == "deepfool" else 0.03 * exact + 0.012  # C&W's step is about 0.01 long
    assert (result.distance <= exact + slack).all()


@pytest.mark.parametrize("name", ["pgd", "pgd-l2"])
def test_one_step_of_pgd_from_the_clean_image_is_fgsm(name):
    model, images = perceptron(), pictures(20)
    clean, plan = clean_images(model, images, "predicted"), AttackPlan((0.3,), steps=1, keep=True)
    fixed = {**ATTACKS[name].options, "random_start": False}
    one, other = (  # the other's step is longer, and projected
        worst_case(model, clean, replace(ATTACKS[name], options={**fixed, "stride": stride}), plan)
        for stride in (1.0, 2.5)
    )
    assert one.adversarial
    assert one.adversarial.keys() == other.adversarial.keys()
    for row, image in one.adversarial.items():
        torch.testing.assert_close(image, other.adversarial[row], atol=1e-6, rtol=0)
    if name == "pgd":
        named = attack(model, images, "predicted", method="fgsm", epsilon=0.3)
        assert all(torch.equal(named.images[row], image) for row, image in one.adversarial.items())


def test_fgsm_is_the_sign_of_the_gradient_of_cross_entropy():
    model, images = perceptron(), pictures(20, low=0.3, high=0.7)
    labels = predictions(model, images)
    leaf = images.clone().requires_grad_()
    torch.nn.functional.cross_entropy(model(leaf), labels).backward()
    assert leaf.grad is not None
    expected = images + 0.04 * leaf.grad.sign()
    result = attack(model, images, labels, method="fgsm", epsilon=0.04)
    assert torch.equal(result.success, predictions(model, expected) != labels)
    assert 0 < result.success.sum() < 20
    torch.testing.assert_close(result.images[result.success], expected[result.success], atol=1e-6, rtol=0)


def test_auto_is_the_worst_case_of_its_members():
    model, images = perceptron(seed=1), pictures(16, seed=1)
    members = ATTACKS["auto"].members
    asked = {"epsilons": (0.005, 0.01, 0.02), "steps": 2, "seed": 4}
    whole = swept(model, images, "predicted", attack="auto", **asked)
    parts = [swept(model, images, "predicted", attack=name, **asked) for name in members]
    assert torch.equal(whole.broken_at, torch.stack([part.broken_at for part in parts]).amin(0))
    assert whole.forwards < sum(part.forwards for part in parts)
    rows, kept = adversarial(model, images, "predicted", "auto", **asked)
    assert len(set(whole.broken_at[rows].tolist())) > 1
    lengths = NORMS["linf"].length(kept - images[rows])
    torch.testing.assert_close(lengths, whole.distance[rows], atol=1e-6, rtol=0)
    assert (lengths <= whole.broken_at[rows] + 1e-6).all()


@pytest.mark.parametrize("name", ["pgd-targeted", "apgd-targeted"])
def test_targets_are_reached(name):
    model, images = perceptron(), pictures(10)
    targets = (predictions(model, images) + 2) % 5
    result = attack(model, images, "predicted", method=name, epsilon=0.5, targets=targets, steps=10)
    assert result.success.all()
    assert torch.equal(result.reached, result.success)
    assert torch.equal(predictions(model, result.images), targets)
    close = attack(model, images, "predicted", method=name, epsilon=1e-5, targets=targets, steps=2)
    assert not close.reached.any()
