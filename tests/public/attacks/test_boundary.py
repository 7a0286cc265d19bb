"""Searches for the smallest change: they end at the boundary, on the adversarial side."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.attacked import asked, made, perceptron, pictures, predictions

FINEST = 9**-3  # three rounds of eight points


class Planted(nn.Module):
    """Misclassified where the brightness lies in an interval; DeepFool's first step from black leads to 0.918."""

    def __init__(self, *intervals: tuple[float, float]) -> None:
        super().__init__()
        self.intervals = intervals

    def forward(self, images: Tensor) -> Tensor:
        bright = images.flatten(1).mean(1)
        wrong = sum(((bright > low) & (bright < high)).float() for low, high in self.intervals)
        lead = 1.9 * wrong - 0.9 + bright - bright.detach()
        return torch.stack([torch.zeros_like(lead), lead], 1)


@pytest.mark.parametrize(
    ("intervals", "boundary"),
    [
        *(([(low, 2.0)], low) for low in (0.0005, 0.2, 1 / 3, 0.71, 0.9)),
        ([(0.3, 0.5), (0.8, 2.0)], 0.3),  # of several the first
    ],
)
def test_the_result_lies_just_beyond_the_boundary(intervals, boundary):
    model, black = made(Planted(*intervals), (4, 4), classes=2), torch.zeros(1, 3, 4, 4)
    result = vitlens.attack(model, black, torch.tensor([0]), method="deepfool")
    assert result.success.all()
    gap = result.images.mean().item() - boundary
    assert 0 < gap <= 0.92 * FINEST + 1e-6
    assert result.images.std() < 1e-6
    assert result.forwards.item() == 2 + 24


def test_where_no_nearer_image_is_adversarial_the_one_found_is_returned_bit_for_bit():
    model, black = made(Planted((0.9175, 2.0)), (4, 4), classes=2), torch.zeros(1, 3, 4, 4)
    with asked(model) as seen:
        result = vitlens.attack(model, black, torch.tensor([0]), method="deepfool")
    assert result.success.all()
    assert torch.equal(result.images, seen[2].detach())


@pytest.mark.parametrize("name", ["cw", "deepfool"])
def test_the_returned_images_are_adversarial_and_slightly_nearer_they_are_not(name):
    model, images = perceptron(seed=2), pictures(12, seed=4)
    labels = predictions(model, images)
    result = vitlens.attack(model, images, labels, method=name, steps=20)
    success = result.success
    assert success.sum() > 3
    shorter = images + (1 - 3 * FINEST) * (result.images - images)
    assert (predictions(model, shorter) == labels)[success].float().mean() > 0.9


def test_black_and_white_images_are_finite_in_tanh_space():
    images = pictures(4, seed=6)
    images[:, :, :4] = images[:, :, :4].round()
    result = vitlens.attack(perceptron(seed=1), images, "predicted", method="cw", steps=20)
    assert torch.isfinite(result.images).all()
    assert result.success.any()
    assert torch.isfinite(result.distance).all()


@pytest.mark.parametrize("name", ["cw", "deepfool"])
def test_an_epsilon_bounds_what_counts(name):
    model, images = perceptron(), pictures(6, seed=3)
    free = vitlens.attack(model, images, "predicted", method=name, steps=15)
    middle = free.distance.median().item()
    bound = vitlens.attack(model, images, "predicted", method=name, steps=15, epsilon=middle)
    assert torch.equal(bound.success, free.success & (free.distance <= middle))
    assert torch.equal(bound.images[~bound.success], images[~bound.success])
    curve = vitlens.attack(model, images, "predicted", method=name, steps=15, epsilons=[middle / 2, middle, 9.0])
    assert torch.equal(curve.success[1], bound.success)
    torch.testing.assert_close(curve.distance, torch.where(free.success, free.distance, torch.inf))


def test_deepfool_stays_where_no_class_has_a_gradient():
    class Constant(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.tensor([[1.0, 0.0]]).expand(len(images), -1) + 0 * images.flatten(1)[:, :2]

    result = vitlens.attack(made(Constant(), (4, 4), classes=2), pictures(2, (4, 4)), "predicted", method="deepfool")
    assert not result.success.any()
    assert torch.isfinite(result.images).all()
