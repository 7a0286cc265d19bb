"""`best` against its equation, and its cost; its parts have separate tests."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import gaussian_blur

import vitlens
from tests.kit.explainable import affinity
from vitlens import Model

# of vit-digits
GRID = 8
PATCH = 4


def constant_norm(norm: Any, tokens: Tensor) -> Tensor:
    """Apply a LayerNorm whose standard deviation is a constant."""
    spread = (tokens.detach().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    return (tokens - tokens.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias


def cells_of(model: Model, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the last block's attention and LibraGrad's gradient there.

    Both have the shape (batch, patches, dim). Weights of attention, gates of the GELU and standard
    deviations are constants.
    """
    module: Any = model.module
    place = "blocks.5.input"
    before = vitlens.capture(model, images, place)[place]
    block = module.blocks[-1]
    attention = block.attn
    cells = block.norm1(before).detach().requires_grad_()
    mixed = attention.qkv(cells).unflatten(-1, (3, attention.heads, -1))
    query, key, value = mixed.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head_dim)
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1).detach()
    attended = (weights @ value).transpose(1, 2).flatten(2)
    stream = before + attention.proj(attended)
    first, second = (layer for layer in block.mlp.modules() if isinstance(layer, nn.Linear))
    hidden = first(constant_norm(block.norm2, stream))
    gate = (1 + torch.erf(hidden.detach() / math.sqrt(2))) / 2  # of the GELU
    stream = stream + second(hidden * gate)
    logits = module.head(constant_norm(module.norm, stream)[:, 0])
    (gradient,) = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), cells)
    return cells.detach()[:, 1:].double(), gradient[:, 1:].double()


def by_mean(maps: Tensor) -> Tensor:
    """Divide the positive part by its mean; return 0 where nothing is positive."""
    return (maps.clamp_min(0) / maps.clamp_min(0).mean((1, 2), keepdim=True)).nan_to_num(0.0)


def alike(cells: Tensor) -> Tensor:
    """Return T: of tokens less their mean, exp(5 cos), rows scaled to sum to 1."""
    centred = cells - cells.mean(1, keepdim=True)
    lengths = centred.norm(dim=2, keepdim=True)
    similarity = (5 * (centred @ centred.mT) / (lengths * lengths.mT)).exp()
    return similarity / similarity.sum(2, keepdim=True)


def blurred(images: Tensor) -> Tensor:
    """Blur with a Gaussian of an eighth of the side, truncated at three standard deviations."""
    return gaussian_blur(images, [25, 25], [4.0, 4.0])


def effect(model: Model, images: Tensor, targets: Tensor) -> Tensor:
    """Return e, a patch's share of the logit's first-order change at 9/10 blur and 1/10 image."""
    change = images - blurred(images)
    start = (blurred(images) + change / 10).requires_grad_()
    (gradient,) = torch.autograd.grad(model(start).gather(1, targets[:, None]).sum(), start)
    changes = F.avg_pool2d((gradient * change).sum(1), PATCH)
    return changes.double() / changes.abs().sum((1, 2), keepdim=True)


def spread(maps: Tensor) -> Tensor:
    """Return (Σ m)² / (N Σ m²), the share of patches in a map of zeros and equal values."""
    return maps.sum((-2, -1)) ** 2 / (maps.shape[-2:].numel() * (maps**2).sum((-2, -1)))


def smooth(where: Tensor, rollout: Tensor, cells: Tensor, effects: Tensor) -> Tensor:
    """Return ((4/5 Q + 1/5 BQ) / max + 3/2 e)⁺ over its greatest value and to a power.

    Q = (R + TR) / 2 and R = (V⁶ G)^⅙; B has the kernel (1, 6, 1) / 8 along each axis, with the
    border repeated.
    """
    root = (where**6 * rollout) ** (1 / 6)  # R
    spread_root = (alike(cells) @ root.flatten(1)[..., None]).view_as(root)  # TR
    mean_root = (root + spread_root) / 2  # Q
    line = torch.tensor([1.0, 6.0, 1.0]).double() / 8
    kernel = torch.outer(line, line)[None, None]
    padded = F.pad(mean_root[:, None], (1, 1, 1, 1), mode="replicate")
    blurred_root = F.conv2d(padded, kernel)[:, 0]  # BQ
    mixed = 0.8 * mean_root + 0.2 * blurred_root
    maps = (mixed / mixed.amax((1, 2), keepdim=True) + 1.5 * effects).clamp_min(0)
    maps = maps / maps.amax((1, 2), keepdim=True)
    powers = [1 + 3 * step / 5000 for step in range(5001)]  # from 1 to 4
    sharpened = []
    for heat_map in maps:
        # the highest power at which the map still spreads over 15 % of the patches
        wide_enough = [power for power in powers if spread(heat_map**power) >= 0.15]
        sharpened.append(heat_map ** max(wide_enough, default=1.0))
    return torch.stack(sharpened)


def kept_with(model: Model, images: Tensor, targets: Tensor, maps: Tensor) -> Tensor:
    """Return the target's probability with the highest 32 of 64 patches, the others blurred."""
    ranks = maps.flatten(1).argsort(descending=True, stable=True).argsort().view_as(maps)
    visible = F.interpolate((ranks < 32).float()[:, None], scale_factor=PATCH) > 0.5
    with torch.no_grad():
        logits = model(torch.where(visible, images, blurred(images)))
    return logits.softmax(-1).gather(1, targets[:, None])[:, 0]


def candidates_of(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smooth, the sharp and the rollout candidate, and the probability that each keeps.

    V = S²G · (S²C⁺ + S²N⁺), G and C⁺ + N⁺ give them, with each factor divided by its mean.
    S is that of layers 2 to 5.
    """
    model = vitlens.load("vit-digits")
    similarity = affinity(model, images, (2, 3, 4, 5))  # S
    cells, gradient = cells_of(model, images, targets)

    def twice(maps: Tensor) -> Tensor:
        """Return S² of the positive part, divided by its mean."""
        columns = maps.clamp_min(0).flatten(1)[..., None]  # (images, patches, 1)
        return by_mean((similarity @ similarity @ columns).view_as(maps))

    rollout = vitlens.explain(model, images, targets=targets, method="gradient-rollout").double()
    gradcam = vitlens.explain(model, images, targets=targets, method="gradcam").double()
    libra = (cells * gradient).sum(2).view_as(gradcam)
    where = twice(rollout) * (twice(gradcam) + twice(libra))  # V
    rollout = by_mean(rollout)
    maps = [
        smooth(where, rollout, cells, effect(model, images, targets)),
        where**3 * rollout * (by_mean(gradcam) + by_mean(libra)),  # sharp
        rollout,
    ]
    probabilities = [kept_with(model, images, targets, candidate) for candidate in maps]
    return torch.stack(maps), torch.stack(probabilities)


@pytest.fixture(scope="module")
def scenes() -> tuple[Tensor, Tensor]:
    """Return scenes that the model classifies correctly.

    For other classes all values of a map may be zero or less.
    """
    (batch,) = vitlens.load_data("digits", limit=12).batches(12)
    correct = vitlens.load("vit-digits")(batch.images).argmax(1) == batch.labels
    return batch.images[correct][:4], batch.labels[correct][:4]


@pytest.fixture(scope="module")
def candidates(scenes) -> tuple[Tensor, Tensor]:
    return candidates_of(*scenes)


@pytest.mark.parametrize("margin", [None, -1.0, 0.0, 2.0])
def test_the_map_is_that_of_the_equation_and_the_image_decides_between_the_candidates(
    scenes, candidates, margin, monkeypatch
):
    """The candidate that keeps most of the probability wins; the margin shifts the smooth one."""
    if margin is not None:
        monkeypatch.setattr("vitlens.attribution.best.MARGIN", margin)
    explained = vitlens.explain(
        vitlens.load("vit-digits"), scenes[0], targets=scenes[1], method="best"
    ).double()
    maps, confidences = candidates
    margin = 0.1 if margin is None else margin
    numbers = (confidences + torch.tensor([margin, 0.0, 0.0])[:, None]).argmax(0)
    assert margin > -1 or (numbers > 0).all()
    assert margin < 2 or not numbers.any()
    for heat_map, expected in zip(explained, maps[numbers, torch.arange(4)], strict=True):
        # p to 1/1000
        torch.testing.assert_close(heat_map, expected, atol=1e-4 * expected.max().item(), rtol=5e-3)


def test_a_model_that_ignores_the_image_has_a_map_of_zeros(scenes):
    model = vitlens.load("vit-digits")
    model.module.head.weight.data.zero_()
    with pytest.warns(UserWarning, match="zero"):
        maps = vitlens.explain(model, scenes[0], targets=scenes[1], method="best")
    assert torch.equal(maps, torch.zeros(4, GRID, GRID))


def test_it_passes_an_image_through_the_model_at_most_ten_times(scenes):
    model = vitlens.load("vit-digits")
    passed = []
    with model.module.blocks[0].register_forward_pre_hook(
        lambda _block, inputs: passed.append(len(inputs[0]))
    ):
        vitlens.explain(model, scenes[0], targets=scenes[1], method="best")
        passed.clear()  # what is read of a model once, and again with another hook, does not count
        vitlens.explain(model, scenes[0], targets=scenes[1], method="best")
    assert 4 < sum(passed) / len(scenes[0]) <= 10
