"""Gradients and occlusion against captum; RISE and KernelSHAP against their definitions."""

from itertools import permutations

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, Occlusion, Saliency
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.batches import in_small_batches
from tests.kit.explainable import MODELS, linear
from tests.kit.tiny import images, model_of, ours, shaken
from vitlens import Model
from vitlens.errors import InputError

TARGETS = torch.tensor([1, 4])


def explained(model: Model, batch: Tensor, method: str, **options: object) -> Tensor:
    return vitlens.explain(model, batch, targets=TARGETS, method=method, **options)


class Twice(nn.Module):
    """A model that reads the pixels by a convolution and directly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.conv(pixels).square().mean((2, 3)) + pixels.mean((1, 2, 3))[:, None]


class ByKeyword(nn.Module):
    """A model that passes the pixels to its convolution by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.conv(input=pixels).square().mean((2, 3))


@pytest.mark.parametrize("name", [*MODELS, "twice", "by keyword"])
def test_values_equal_captums(name):
    """In float64: in float32 a ReLU near its kink may be active in one of the two only."""
    convolutions = {"twice": Twice, "by keyword": ByKeyword}
    model = MODELS[name]() if name in MODELS else model_of(shaken(convolutions[name]))
    model = model.double()
    batch = images(model.input_size).double()
    leaf = batch.clone().requires_grad_()
    same = {"atol": 1e-4, "rtol": 1e-4}
    theirs = Saliency(model).attribute(leaf, target=TARGETS).amax(1)
    torch.testing.assert_close(explained(model, batch, "saliency"), theirs.float(), **same)
    theirs = InputXGradient(model).attribute(leaf, target=TARGETS).detach().sum(1)
    torch.testing.assert_close(explained(model, batch, "input-x-gradient"), theirs.float(), **same)
    for steps, baseline in ((7, 0.0), (12, 0.5)):
        theirs = IntegratedGradients(model).attribute(
            batch, baseline, target=TARGETS, n_steps=steps
        )
        maps = explained(model, batch, "integrated-gradients", steps=steps, baseline=baseline)
        torch.testing.assert_close(maps, theirs.sum(1).float(), **same)
    assert maps.abs().max() > 1e-3  # above the tolerance: the comparison is not empty


def test_smoothgrad_without_noise_is_saliency_and_its_noise_has_the_stated_standard_deviation():
    model = ours()
    batch = images((32, 48))
    maps = explained(model, batch, "smoothgrad", samples=3, noise=0.0)
    torch.testing.assert_close(maps, explained(model, batch, "saliency"), atol=1e-6, rtol=1e-4)
    model = linear()
    seen = []
    batch = images((8, 12), batch=1) * torch.tensor([1.0, 0.1]).view(2, 1, 1, 1)
    with model.module.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].detach())
    ):
        explained(model, batch, "smoothgrad", samples=200, noise=0.2)
    noise = torch.cat([copies.unflatten(0, (-1, 2)) for copies in seen]) - batch
    ranges = batch.amax((1, 2, 3)) - batch.amin((1, 2, 3))
    assert len(noise) == 200
    torch.testing.assert_close(
        noise.transpose(0, 1).flatten(1).std(1), 0.2 * ranges, rtol=0.02, atol=0
    )
    # same draws
    torch.testing.assert_close(
        noise[:, 0] / ranges[0], noise[:, 1] / ranges[1], atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("method", "option"), [("integrated-gradients", "steps"), ("smoothgrad", "samples")]
)
def test_copies_in_several_passes_change_nothing_and_none_is_refused(method, option, monkeypatch):
    model = ours()
    batch = images((32, 48))
    at_once = explained(model, batch, method, **{option: 9})
    in_small_batches(monkeypatch)
    torch.testing.assert_close(
        explained(model, batch, method, **{option: 9}), at_once, atol=1e-6, rtol=1e-4
    )
    with pytest.raises(InputError):
        explained(model, batch, method, **{option: 0})


@pytest.mark.parametrize("name", MODELS)
def test_occlusion_is_captums(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    # of a CNN as of a ViT of its size
    rows, columns = model.layout.grid if model.anatomy.layout else (8, 8)
    patch = batch.shape[2] // rows, batch.shape[3] // columns
    grey = batch.mean((2, 3), keepdim=True).expand_as(batch)
    window = (3, *patch)
    theirs = Occlusion(model).attribute(
        batch, window, strides=window, baselines=grey, target=TARGETS
    )
    maps = explained(model, batch, "occlusion")
    expected = theirs[:, 0, :: patch[0], :: patch[1]].float()
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


def test_of_many_patches_each_is_in_four_coalitions_and_the_ends_are_two_more():
    model = linear((12, 12), (1, 1))
    seen = 0

    def count(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    with model.module.register_forward_pre_hook(count):
        explained(model, images((12, 12)), "kernel-shap")
    assert 0.95 < seen / (2 * (4 * 144 + 2)) <= 1  # a coalition drawn twice is run once


def masks_of(size: tuple[int, int], count: int, seed: int) -> Tensor:
    """Draw RISE's masks: 7 x 7 random cells and one more a side, enlarged and cropped at random."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    cell = [-(-side // 7) for side in size]
    for _ in range(count):
        coarse = (torch.rand(1, 1, 7, 7, generator=generator) < 0.5).float()
        fine = F.interpolate(
            coarse, size=[8 * side for side in cell], mode="bilinear", align_corners=False
        )[0, 0]
        top, left = (int(torch.randint(side, (1,), generator=generator)) for side in cell)
        masks.append(fine[top : top + size[0], left : left + size[1]])
    return torch.stack(masks)


def test_rise_is_a_plain_loop():
    model = ours()
    batch = images((32, 48))
    maps = explained(model, batch, "rise", masks=9, seed=3)
    expected = torch.zeros(2, 32, 48)
    covered = torch.zeros(32, 48)
    for mask in masks_of((32, 48), 9, seed=3):
        # black after normalisation is the mean colour
        logits = model.module(model.prepare(batch) * mask)
        expected += logits.softmax(-1).gather(1, TARGETS[:, None])[:, :, None] * mask
        covered += mask
    torch.testing.assert_close(maps, expected / covered, atol=1e-5, rtol=1e-4)


def by_permutations(model: Model, batch: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compute Shapley values by definition: what each patch adds, over all orders."""
    players = grid[0] * grid[1]
    subsets = (torch.arange(2**players)[:, None] >> torch.arange(players)) % 2 == 1
    visible = (
        F.interpolate(subsets.view(-1, 1, *grid).float(), size=batch.shape[2:], mode="nearest")
        > 0.5
    )
    shares = torch.zeros(len(batch), players, dtype=torch.float64)
    orders = list(permutations(range(players)))
    for index, image in enumerate(batch):
        with torch.no_grad():
            seen = torch.where(visible, image, image.mean((1, 2), keepdim=True))
            scores = model(seen)[:, TARGETS[index]].double().tolist()
        for order in orders:
            present = 0
            for player in order:
                shares[index, player] += scores[present | (1 << player)] - scores[present]
                present |= 1 << player
    return (shares / len(orders)).float().view(-1, *grid)


def test_few_patches_get_their_exact_shapley_values_and_samples_come_near():
    model = ours(patch_size=(16, 16))
    batch = images((32, 48))
    expected = by_permutations(model, batch, (2, 3))
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(
        explained(model, batch, "kernel-shap"), expected, atol=tolerance, rtol=1e-3
    )
    # of 4,094
    exact = explained(ours(), batch, "kernel-shap", coalitions=5000)
    drawn = explained(ours(), batch, "kernel-shap", coalitions=1000)
    assert not torch.equal(drawn, exact)
    assert (drawn - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(
    ("method", "model", "options"),
    [
        ("rise", ours, {"masks": 0}),
        ("kernel-shap", ours, {"coalitions": 35}),  # of 12 patches, 36 at least
        ("kernel-shap", ours, {"coalitions": 0}),
        ("kernel-shap", lambda: ours(patch_size=(32, 48)), {}),
    ],
)
def test_refusals(method, model, options):
    with pytest.raises(InputError):
        explained(model(), images((32, 48)), method, **options)
