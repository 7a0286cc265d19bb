"""C&W: the nearest of all adversarial images, image by image."""

from dataclasses import replace

import pytest
import torch

from tests.attacks.models import perceptron, pictures, predictions, setting
from vitlens.attacks.attack import attack
from vitlens.attacks.engine import AttackOutcome, worst_case
from vitlens.attacks.minimum_norm import carlini_wagner
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


@pytest.mark.slow
def test_searches_stop_image_by_image():
    outcome, _ = run(pictures(8), steps=60)
    assert outcome.forwards.min() < outcome.forwards.max() <= 9 * 60
    alone, _ = run(pictures(8)[4:5], steps=60)
    assert alone.forwards[0] == outcome.forwards[4] < 9 * 60
    assert abs(alone.distance[0] - outcome.distance[4]) < 1e-3


def test_a_search_stops_when_the_loss_has_risen_at_two_checks_in_a_row():
    """One check is not enough: Adam's first steps overshoot, and later images are nearer."""
    algorithm = carlini_wagner(setting(20), searches=1)
    state = {"ticks": torch.ones(1), "still": torch.zeros(1), "checked": torch.full((1,), torch.inf)}
    still = []
    for loss in (3.0, 4.0, 2.0, 3.0, 4.0):
        state = algorithm._checked(state, torch.tensor([loss]))
        still.append(int(state["still"]))
        state["ticks"] += 1
        state = algorithm._checked(state, torch.tensor([loss + 9]))  # no check
        state["ticks"] += 1
    assert still == [0, 1, 0, 1, 2]


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
    blank = torch.cat((torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)))
    result = attack(perceptron(seed=1), blank, "predicted", method="cw", steps=20)
    assert torch.equal(result.images[~result.success], blank[~result.success])
    changed = result.images[result.success].flatten(1)
    assert (changed.amax(1) > changed.amin(1)).all()


def test_a_longer_search_finds_nothing_farther():
    images = pictures(6, seed=3)
    short, long = (attack(perceptron(), images, "predicted", method="cw", steps=steps) for steps in (10, 60))
    assert (long.success >= short.success).all()
    both = short.success
    assert (long.distance[both] <= short.distance[both] * 1.01).all()
    assert long.distance[both].mean() < short.distance[both].mean()


def test_an_epsilon_bounds_what_counts():
    images = pictures(6, seed=3)
    free = attack(perceptron(), images, "predicted", method="cw", steps=15)
    middle = free.distance.median().item()
    bound = attack(perceptron(), images, "predicted", method="cw", steps=15, epsilon=middle)
    assert torch.equal(bound.success, free.success & (free.distance <= middle))
    assert torch.equal(bound.images[~bound.success], images[~bound.success])
