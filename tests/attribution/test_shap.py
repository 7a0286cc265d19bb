"""KernelSHAP: exact with all coalitions, close to it with sampled ones, and complete in both cases."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from tests.attribution.models import cnn, linear
from tests.lens.tiny import images, ours
from vitlens.attribution.masked import (
    _all_coalitions,
    _sampled_coalitions,
    kernel_shap,
    scores_without,
    shapley_values,
)
from vitlens.errors import InputError
from vitlens.models.model import Model

TARGETS = torch.tensor([1, 4])


def by_permutations(model: Model, batch: Tensor, players: int) -> Tensor:
    """Shapley values as they are defined: what each patch adds, over all orders in which patches can come."""
    subsets = (torch.arange(2**players)[:, None] >> torch.arange(players)) % 2 == 1
    scores = scores_without(model, batch, TARGETS, ~subsets).double()
    shares, orders = torch.zeros(len(batch), players, dtype=torch.float64), list(permutations(range(players)))
    for order in orders:
        present = 0
        for player in order:
            shares[:, player] += scores[:, present | (1 << player)] - scores[:, present]
            present |= 1 << player
    return shares / len(orders)


def test_few_patches_get_their_exact_values():
    model = ours(patch_size=(16, 16))  # a grid of 2 x 3
    batch = images((32, 48))
    values = kernel_shap(model, batch, TARGETS)
    expected = by_permutations(model, batch, 6).float().view(2, 2, 3)
    torch.testing.assert_close(values, expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)


def test_sampled_coalitions_come_near_the_exact_values():
    model, batch = ours(), images((32, 48))  # 12 patches: 4,094 coalitions
    exact = kernel_shap(model, batch, TARGETS, coalitions=5000)
    drawn = kernel_shap(model, batch, TARGETS, coalitions=1000)
    assert not torch.equal(drawn, exact)
    assert (drawn - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("make", [ours, cnn])
def test_shares_add_up(make):
    model, batch = make(), images((32, 48))
    maps = kernel_shap(model, batch, TARGETS)
    with torch.no_grad():
        grey = batch.mean((2, 3), keepdim=True).expand_as(batch)
        gain = (model(batch) - model(grey)).gather(1, TARGETS[:, None])[:, 0]
    torch.testing.assert_close(maps.sum((1, 2)), gain, atol=1e-4, rtol=1e-4)


def test_the_values_of_a_linear_model_are_its_pixel_contributions():
    """Where nothing interacts, any coalitions give the exact values."""
    model = linear()
    batch = images(model.input_size)
    weight = model.module.weight[TARGETS].view(2, 3, 8, 12)
    worth = (weight * (batch - batch.mean((2, 3), keepdim=True))).sum(1)
    expected = worth.unflatten(1, (4, 2)).unflatten(3, (3, 4)).sum((2, 4))
    values = kernel_shap(model, batch, TARGETS, coalitions=48)
    torch.testing.assert_close(values, expected, atol=1e-3, rtol=1e-3)


def test_a_game_without_interaction_is_solved_by_any_draw():
    worth = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).double()
    chosen, weights = _sampled_coalitions(9, 60, seed=0)
    assert torch.equal(chosen[:30], ~chosen[30:])
    shares = shapley_values(chosen, weights, worth @ chosen.double().T, worth.sum(1))
    torch.testing.assert_close(shares, worth)


def test_the_kernel_weighs_sizes_as_it_draws_them():
    """Lundberg & Lee 2017: (M - 1) / (C(M, s) s (M - s)); summed over a size, what a draw of sizes must follow."""
    chosen, weights = _all_coalitions(6)
    assert len(chosen) == 62
    sizes = chosen.sum(1)
    for size in range(1, 6):
        assert weights[sizes == size].sum().item() == pytest.approx(5 / (size * (6 - size)))
    drawn, _ = _sampled_coalitions(6, 20_000, seed=0)
    share = (drawn.sum(1) == 1).float().mean().item()
    assert share == pytest.approx((1 / 5) / (2 / 5 + 2 / 8 + 1 / 9), abs=0.02)


def test_too_few_coalitions_are_refused():
    with pytest.raises(InputError, match="at least 36 coalitions of 12 patches, found 20"):
        kernel_shap(ours(), images((32, 48)), TARGETS, coalitions=20)
    with pytest.raises(InputError, match="at least two patches"):
        kernel_shap(ours(patch_size=(32, 48)), images((32, 48)), TARGETS)
