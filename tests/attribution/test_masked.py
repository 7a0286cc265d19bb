"""Occlusion beside captum's, RISE beside a plain loop, KernelSHAP beside Shapley's definition, where it is known."""

from itertools import permutations

import pytest
import torch
from captum.attr import Occlusion
from torch import Tensor, nn

from tests.attribution.models import MODELS, cnn, linear, with_layout
from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution import masked as module
from vitlens.attribution.masked import kernel_shap, occlusion, rise, shapley_values
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import TokenLayout

TARGETS = torch.tensor([1, 4])


@pytest.mark.parametrize("name", MODELS)
def test_occlusion_is_captums(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    rows, columns = removal_grid(model)
    patch = batch.shape[2] // rows, batch.shape[3] // columns
    grey, window = batch.mean((2, 3), keepdim=True).expand_as(batch), (3, *patch)
    theirs = Occlusion(model).attribute(batch, window, strides=window, baselines=grey, target=TARGETS)
    maps, expected = occlusion(model, batch, TARGETS), theirs[:, 0, :: patch[0], :: patch[1]].float()
    assert maps.shape == (2, rows, columns)
    torch.testing.assert_close(maps, expected, atol=1e-4, rtol=1e-4)
    assert expected.abs().max() > 1e-3


def test_the_maps_of_a_linear_model_are_its_pixel_contributions():
    """Where nothing interacts, any coalitions give the exact values."""
    model = linear()
    batch = images(model.input_size)
    weight = model.module.weight[TARGETS].view(2, 3, 8, 12)
    worth = (weight * (batch - batch.mean((2, 3), keepdim=True))).sum(1)
    expected = worth.unflatten(1, (4, 2)).unflatten(3, (3, 4)).sum((2, 4))
    torch.testing.assert_close(occlusion(model, batch, TARGETS), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kernel_shap(model, batch, TARGETS, coalitions=48), expected, atol=1e-3, rtol=1e-3)


class Corner(nn.Module):
    """The brighter the lower right corner, the likelier class 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        seen = pixels[:, :, -6:, -6:].mean((1, 2, 3))
        return torch.stack((torch.zeros_like(seen), 8 * seen, *[torch.full_like(seen, -9.0)] * 3), 1)


def test_masks_of_rise_are_soft_and_half_visible():
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack([module._mask((30, 44), generator) for _ in range(400)])
    assert (masks.shape, masks.min(), masks.max()) == ((400, 30, 44), 0, 1)
    assert ((masks > 0.1) & (masks < 0.9)).float().mean() > 0.2
    torch.testing.assert_close(masks.mean((0,)), torch.full((30, 44), 0.5), atol=0.12, rtol=0)


def test_rise_is_a_plain_loop():
    model, batch = ours(), images((32, 48))
    maps = rise(model, batch, TARGETS, masks=9, seed=3)
    generator = torch.Generator().manual_seed(3)
    expected, covered = torch.zeros(2, 32, 48), torch.zeros(32, 48)
    for _ in range(9):
        mask = module._mask((32, 48), generator)
        logits = model.module(model.prepare(batch) * mask)  # black after normalisation is the mean colour
        expected += logits.softmax(-1).gather(1, TARGETS[:, None])[:, :, None] * mask
        covered += mask
    torch.testing.assert_close(maps, expected / covered, atol=1e-5, rtol=1e-4)


def test_rise_finds_the_place_that_matters():
    layout = TokenLayout((4, 4), (8, 8))
    maps = rise(with_layout(Corner(), layout), torch.ones(1, 3, 32, 32), torch.tensor([1]), masks=400)
    assert min(divmod(int(maps[0].argmax()), 32)) >= 22
    constant = with_layout(nn.Sequential(Corner(), nn.Threshold(99.0, 1.0)), layout)
    maps = rise(constant, torch.rand(2, 3, 32, 32), TARGETS, masks=40)
    torch.testing.assert_close(maps, torch.full_like(maps, 0.2))


def by_permutations(model: Model, batch: Tensor, players: int) -> Tensor:
    """Shapley values as they are defined: what each patch adds, over all orders in which patches can come."""
    subsets = (torch.arange(2**players)[:, None] >> torch.arange(players)) % 2 == 1
    scores = module.scores_without(model, batch, TARGETS, ~subsets).double()
    shares, orders = torch.zeros(len(batch), players, dtype=torch.float64), list(permutations(range(players)))
    for order in orders:
        present = 0
        for player in order:
            shares[:, player] += scores[:, present | (1 << player)] - scores[:, present]
            present |= 1 << player
    return shares / len(orders)


def test_few_patches_get_their_exact_shapley_values_and_samples_come_near():
    model, batch = ours(patch_size=(16, 16)), images((32, 48))  # a grid of 2 x 3
    expected = by_permutations(model, batch, 6).float().view(2, 2, 3)
    torch.testing.assert_close(
        kernel_shap(model, batch, TARGETS), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3
    )
    exact, drawn = (kernel_shap(ours(), batch, TARGETS, coalitions=count) for count in (5000, 1000))  # of 4,094
    assert not torch.equal(drawn, exact)
    assert (drawn - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("make", [ours, cnn])
def test_shapley_values_add_up(make):
    model, batch = make(), images((32, 48))
    grey = batch.mean((2, 3), keepdim=True).expand_as(batch)
    gain = (model(batch) - model(grey)).gather(1, TARGETS[:, None])[:, 0]
    torch.testing.assert_close(kernel_shap(model, batch, TARGETS).sum((1, 2)), gain, atol=1e-4, rtol=1e-4)


def test_a_game_without_interaction_is_solved_by_any_draw():
    worth = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).double()
    chosen, weights = module._sampled_coalitions(9, 60, seed=0)
    assert torch.equal(chosen[:30], ~chosen[30:])
    shares = shapley_values(chosen, weights, worth @ chosen.double().T, worth.sum(1))
    torch.testing.assert_close(shares, worth)


def test_the_kernel_weighs_sizes_as_it_draws_them():
    """Lundberg & Lee 2017: (M - 1) / (C(M, s) s (M - s)); summed over a size, what a draw of sizes must follow."""
    chosen, weights = module._all_coalitions(6)
    assert len(chosen) == 62
    for size in range(1, 6):
        assert weights[chosen.sum(1) == size].sum().item() == pytest.approx(5 / (size * (6 - size)))
    drawn, _ = module._sampled_coalitions(6, 20_000, seed=0)
    share = (drawn.sum(1) == 1).float().mean().item()
    assert share == pytest.approx((1 / 5) / (2 / 5 + 2 / 8 + 1 / 9), abs=0.02)


@pytest.mark.parametrize(
    ("method", "model", "options", "message"),
    [
        (rise, ours, {"masks": 0}, "masks of at least 1, found 0"),
        (kernel_shap, ours, {"coalitions": 20}, "at least 36 coalitions of 12 patches, found 20"),
        (kernel_shap, lambda: ours(patch_size=(32, 48)), {}, "at least two patches"),
    ],
)
def test_refusals(method, model, options, message):
    with pytest.raises(InputError, match=message):
        method(model(), images((32, 48)), TARGETS, **options)
