"""The line search ends at the boundary, on the adversarial side."""

import pytest
import torch
from torch import Tensor

from tests.attacks.models import perceptron, pictures, predictions
from vitlens.attacks.attack import attack
from vitlens.attacks.engine import POINTS, ROUNDS, line_search
from vitlens.attacks.norms import L2

FINEST = (POINTS + 1) ** -ROUNDS


def straight(count: int) -> tuple[Tensor, Tensor]:
    """Black images, and the same with one channel at 1: that channel's value is the share of the line."""
    clean = torch.zeros(count, 3, 4, 4)
    adversarial = clean.clone()
    adversarial[:, 0] = 1
    return clean, adversarial


def share(images: Tensor) -> Tensor:
    return images[:, 0, 0, 0]


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_it_ends_at_the_boundary(batch_size):
    clean, adversarial = straight(5)
    boundaries = torch.tensor([0.001, 0.2, 1 / 3, 0.71, 0.9999])
    sizes = []

    def judge(points: Tensor, rows: Tensor) -> Tensor:
        sizes.append(len(points))
        return share(points) >= boundaries[rows]

    nearer = line_search(judge, clean, adversarial, batch_size=batch_size)
    gap = share(nearer) - boundaries
    assert (gap >= 0).all()
    assert (gap <= FINEST + 1e-6).all()
    assert gap.max() > FINEST / 10
    assert torch.equal(nearer[:, 1:], clean[:, 1:])
    assert max(sizes) == min(batch_size, 5 * POINTS)
    assert sum(sizes) == 5 * POINTS * ROUNDS


def test_where_no_nearer_point_is_adversarial_the_image_is_returned_unchanged():
    generator = torch.Generator().manual_seed(0)
    clean, adversarial = torch.rand(2, 3, 3, 4, 4, generator=generator)
    adversarial = adversarial * 1e-5  # so small that clean + (adversarial - clean) is rounded
    assert not torch.equal(clean + (adversarial - clean), adversarial)
    nearer = line_search(lambda points, _: torch.zeros(len(points), dtype=torch.bool), clean, adversarial, batch_size=8)
    assert torch.equal(nearer, adversarial)


def test_of_several_adversarial_intervals_it_takes_the_first():
    clean, adversarial = straight(1)

    def judge(points: Tensor, _rows: Tensor) -> Tensor:
        return ((share(points) > 0.3) & (share(points) < 0.5)) | (share(points) > 0.8)

    assert share(line_search(judge, clean, adversarial, batch_size=8)).item() == pytest.approx(0.3, abs=1.01 * FINEST)


@pytest.mark.parametrize("name", ["cw", "deepfool"])
def test_the_returned_images_are_those_evaluated_and_its_passes_are_counted(name):
    """They are adversarial, and slightly nearer to the clean image they are not."""
    model, images = perceptron(seed=2), pictures(12, seed=4)
    labels, passes = predictions(model, images), list[int]()
    hook = model.module.register_forward_pre_hook(lambda _module, inputs: passes.append(len(inputs[0])))
    result = attack(model, images, labels, method=name, steps=20, batch_size=1)
    hook.remove()
    assert int(result.forwards.sum()) == sum(passes[12:])  # after the clean images
    success = result.success
    assert success.sum() > 5
    assert (predictions(model, result.images) != labels)[success].all()
    length = L2.length(result.images - images)[success]
    torch.testing.assert_close(length, result.distance[success], atol=1e-6, rtol=1e-6)
    shorter = images + (1 - 3 * FINEST) * (result.images - images)
    assert (predictions(model, shorter) == labels)[success].float().mean() > 0.9
