"""The way back: to the boundary and not beyond it, whatever lies on the line."""

import pytest
import torch
from torch import Tensor

from tests.attacks.models import answers, linear, perceptron, pictures
from vitlens.attacks.attack import attack
from vitlens.attacks.engine import POINTS, ROUNDS, line_search
from vitlens.attacks.norms import L2
from vitlens.attacks.sweep import sweep

FINEST = (POINTS + 1) ** -ROUNDS


def straight(count: int) -> tuple[Tensor, Tensor]:
    """Grey images, and the same with one channel at white: the share of a line is how far that channel is gone."""
    clean = torch.zeros(count, 3, 4, 4)
    found = clean.clone()
    found[:, 0] = 1
    return clean, found


def share(images: Tensor) -> Tensor:
    return images[:, 0, 0, 0]


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_it_ends_where_the_boundary_is(batch_size):
    clean, found = straight(5)
    boundaries = torch.tensor([0.001, 0.2, 1 / 3, 0.71, 0.9999])
    sizes = []

    def judge(points: Tensor, rows: Tensor) -> Tensor:
        sizes.append(len(points))
        return share(points) >= boundaries[rows]

    nearer = line_search(judge, clean, found, batch_size=batch_size)
    gap = share(nearer) - boundaries
    assert (gap >= 0).all()
    assert (gap <= FINEST + 1e-6).all()
    assert gap.max() > FINEST / 10
    assert torch.equal(nearer[:, 1:], clean[:, 1:])
    assert max(sizes) == min(batch_size, 5 * POINTS)
    assert sum(sizes) == 5 * POINTS * ROUNDS


def test_where_nothing_nearer_is_adversarial_the_image_comes_back_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    clean, found = torch.rand(2, 3, 3, 4, 4, generator=generator)
    found = found * 1e-5  # so small that the way there and back would round it
    assert not torch.equal(clean + (found - clean), found)
    nearer = line_search(lambda points, _: torch.zeros(len(points), dtype=torch.bool), clean, found, batch_size=8)
    assert torch.equal(nearer, found)


def test_of_several_stretches_the_first_that_was_seen():
    clean, found = straight(1)

    def judge(points: Tensor, _rows: Tensor) -> Tensor:
        return ((share(points) > 0.3) & (share(points) < 0.5)) | (share(points) > 0.8)

    assert share(line_search(judge, clean, found, batch_size=8)).item() == pytest.approx(0.3, abs=1.01 * FINEST)


@pytest.mark.parametrize("name", ["cw", "deepfool"])
def test_what_is_handed_out_was_judged(name):
    """The images are those that the model saw, and a little nearer to the clean one they are taken for it again."""
    model, images = perceptron(seed=2), pictures(12, seed=4)
    labels = answers(model, images)
    result = attack(model, images, labels, method=name, steps=20)
    success = result.success
    assert success.sum() > 5
    assert (answers(model, result.images) != labels)[success].all()
    torch.testing.assert_close(
        L2.length(result.images - images)[success], result.distance[success], atol=1e-6, rtol=1e-6
    )
    shorter = images + (1 - 3 * FINEST) * (result.images - images)
    assert (answers(model, shorter) == labels)[success].float().mean() > 0.9


@pytest.mark.parametrize("name", ["cw", "deepfool"])
def test_its_looks_are_counted(name):
    model, images = linear(classes=2), pictures(6, low=0.4, high=0.6)
    passes = []
    model.module.register_forward_pre_hook(lambda _module, inputs: passes.append(len(inputs[0])))
    found = sweep(model, images, "predicted", attacks=[name], steps=3, batch_size=1)
    looked = passes[6:]  # after the clean images
    assert found.forwards[name] == sum(looked)
    assert looked.count(1) > 0
    assert found.distance[name].isfinite().any()


def test_an_attack_within_epsilon_is_left_as_it_is(monkeypatch):
    def none(*_: object, **__: object) -> Tensor:
        raise AssertionError("no line search wanted")

    monkeypatch.setattr("vitlens.attacks.engine.line_search", none)
    result = attack(perceptron(), pictures(6), "predicted", method="pgd-l2", epsilon=0.3, steps=4)
    assert result.success.any()
