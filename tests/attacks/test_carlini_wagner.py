"""C&W: the nearest of all adversarial images, image by image."""

from dataclasses import replace

import pytest
import torch

from tests.attacks.models import perceptron, pictures, predictions
from vitlens.attacks.attack import attack
from vitlens.attacks.engine import AttackOutcome, worst_case
from vitlens.attacks.norms import L2
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACKS


def run(images: torch.Tensor, *, seed: int = 0, **options: float) -> tuple[AttackOutcome, list[torch.Tensor]]:
    model = perceptron(seed=seed)
    clean = clean_images(model, images, "predicted")
    seen: list[torch.Tensor] = []
    model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach().clone()))
    plan = AttackPlan((1.0,), steps=options.pop("steps", 100), keep=True)
    return worst_case(model, clean, replace(ATTACKS["cw"], options=options), plan), seen


def test_the_result_is_the_nearest_adversarial_image_of_all_queries():
    images = pictures(1, seed=2)
    outcome, seen = run(images, steps=30)
    label = predictions(perceptron(), images)
    points = torch.cat(seen)
    fooled = predictions(perceptron(), points) != label
    lengths = L2.length(points - images)[fooled]
    assert len(lengths) > 10
    assert outcome.distance.item() == pytest.approx(lengths.min().item(), abs=1e-5)
    torch.testing.assert_close(L2.length(outcome.adversarial[0][None] - images), outcome.distance)


def test_one_rise_of_the_loss_ends_no_search(monkeypatch):
    long, _ = run(pictures(8), steps=60, searches=1, first_c=1.0)
    monkeypatch.setattr("vitlens.attacks.minimum_norm._PATIENCE", 1)
    short, _ = run(pictures(8), steps=60, searches=1, first_c=1.0)
    assert (short.forwards <= long.forwards).all()
    assert (short.forwards < long.forwards).any()
    assert (long.distance <= short.distance).all()


def test_black_and_white_images_are_finite_in_tanh_space():
    images = pictures(4, seed=6).round()  # every pixel is 0 or 1
    result = attack(perceptron(seed=1), images, "predicted", method="cw", steps=20)
    assert torch.isfinite(result.images).all()
    assert torch.isfinite(result.distance).all()


def test_an_epsilon_bounds_what_counts():
    images = pictures(6, seed=3)
    free = attack(perceptron(), images, "predicted", method="cw", steps=15)
    middle = free.distance.median().item()
    bound = attack(perceptron(), images, "predicted", method="cw", steps=15, epsilon=middle)
    assert torch.equal(bound.success, free.success & (free.distance <= middle))
    assert torch.equal(bound.images[~bound.success], images[~bound.success])
