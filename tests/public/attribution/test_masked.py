"""Occlusion beside captum's, RISE beside a plain loop, KernelSHAP beside Shapley's definition, where it is known."""

from itertools import permutations

import pytest
import torch
from captum.attr import Occlusion
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.explainable import MODELS, linear
from tests.kit.tiny import images, ours
from vitlens import Model
from vitlens.errors import InputError

TARGETS = torch.tensor([1, 4])


def explained(model: Model, batch: Tensor, method: str, **options: object) -> Tensor:
    return vitlens.explain(model, batch, targets=TARGETS, method=method, **options)


@pytest.mark.parametrize("name", MODELS)
def test_occlusion_is_captums(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    rows, columns = model.layout.grid if model.anatomy.layout else (8, 8)  # of a CNN as of a ViT of its size
    patch = batch.shape[2] // rows, batch.shape[3] // columns
    grey, window = batch.mean((2, 3), keepdim=True).expand_as(batch), (3, *patch)
    theirs = Occlusion(model).attribute(batch, window, strides=window, baselines=grey, target=TARGETS)
    maps, expected = explained(model, batch, "occlusion"), theirs[:, 0, :: patch[0], :: patch[1]].float()
    torch.testing.assert_close(maps, expected, atol=1e-4, rtol=1e-4)
    assert expected.abs().max() > 1e-3


def test_sampled_shapley_values_of_a_linear_model_are_its_pixel_contributions():
    """Where nothing interacts, any coalitions give the exact values."""
    model = linear()
    batch = images(model.input_size)
    weight = model.module.weight[TARGETS].view(2, 3, 8, 12)
    worth = (weight * (batch - batch.mean((2, 3), keepdim=True))).sum(1)
    expected = worth.unflatten(1, (4, 2)).unflatten(3, (3, 4)).sum((2, 4))
    sampled = explained(model, batch, "kernel-shap", coalitions=48)
    torch.testing.assert_close(sampled, expected, atol=1e-3, rtol=1e-3)


def masks_of(size: tuple[int, int], count: int, seed: int) -> Tensor:
    """RISE's: 7 x 7 cells, each visible or not, and one more a side, enlarged and cropped at random."""
    generator, found = torch.Generator().manual_seed(seed), []
    cell = [-(-side // 7) for side in size]
    for _ in range(count):
        coarse = (torch.rand(1, 1, 7, 7, generator=generator) < 0.5).float()
        fine = F.interpolate(coarse, size=[8 * side for side in cell], mode="bilinear", align_corners=False)[0, 0]
        top, left = (int(torch.randint(side, (1,), generator=generator)) for side in cell)
        found.append(fine[top : top + size[0], left : left + size[1]])
    return torch.stack(found)


def test_rise_is_a_plain_loop():
    model, batch = ours(), images((32, 48))
    maps = explained(model, batch, "rise", masks=9, seed=3)
    expected, covered = torch.zeros(2, 32, 48), torch.zeros(32, 48)
    for mask in masks_of((32, 48), 9, seed=3):
        logits = model.module(model.prepare(batch) * mask)  # black after normalisation is the mean colour
        expected += logits.softmax(-1).gather(1, TARGETS[:, None])[:, :, None] * mask
        covered += mask
    torch.testing.assert_close(maps, expected / covered, atol=1e-5, rtol=1e-4)


def by_permutations(model: Model, batch: Tensor, grid: tuple[int, int]) -> Tensor:
    """Shapley values as they are defined: what each patch adds, over all orders in which patches can come."""
    players = grid[0] * grid[1]
    subsets = (torch.arange(2**players)[:, None] >> torch.arange(players)) % 2 == 1
    shown = F.interpolate(subsets.view(-1, 1, *grid).float(), size=batch.shape[2:], mode="nearest") > 0.5
    shares, orders = torch.zeros(len(batch), players, dtype=torch.float64), list(permutations(range(players)))
    for index, image in enumerate(batch):
        with torch.no_grad():
            seen = torch.where(shown, image, image.mean((1, 2), keepdim=True))
            scores = model(seen)[:, TARGETS[index]].double().tolist()
        for order in orders:
            present = 0
            for player in order:
                shares[index, player] += scores[present | (1 << player)] - scores[present]
                present |= 1 << player
    return (shares / len(orders)).float().view(-1, *grid)


def test_few_patches_get_their_exact_shapley_values_and_samples_come_near():
    model, batch = ours(patch_size=(16, 16)), images((32, 48))
    expected = by_permutations(model, batch, (2, 3))
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(explained(model, batch, "kernel-shap"), expected, atol=tolerance, rtol=1e-3)
    exact, drawn = (explained(ours(), batch, "kernel-shap", coalitions=count) for count in (5000, 1000))  # of 4,094
    assert not torch.equal(drawn, exact)
    assert (drawn - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(
    ("method", "model", "options"),
    [
        ("rise", ours, {"masks": 0}),
        ("kernel-shap", ours, {"coalitions": 35}),  # of 12 patches, 36 at least
        ("kernel-shap", lambda: ours(patch_size=(32, 48)), {}),
    ],
)
def test_refusals(method, model, options):
    with pytest.raises(InputError):
        explained(model(), images((32, 48)), method, **options)
