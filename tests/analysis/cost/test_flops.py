"""FLOPs: the counter equals the formula on our ViT, and an independent sum over layers on everything else."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.lens.tiny import EACH_FAMILY, FAMILIES, images, our_swin, ours, shared_model, torchvision_vit
from vitlens.analysis.cost.flops import (
    BETWEEN,
    EMBEDDING,
    HEAD,
    MLP,
    PRODUCTS,
    PROJECTIONS,
    crossover,
    exponent,
    flops_by_part,
    vit_flops,
)
from vitlens.analysis.cost.profile import tokens_of
from vitlens.lens.observe import observe
from vitlens.models.loading import load
from vitlens.models.model import Model

SHAPES = {
    "plain": {},
    "distilled": {"distillation": True, "registers": 3},
    "mean": {"pooling": "mean", "mlp_ratio": 2.5},
    "without attention": {"attention": False},
    "without MLP": {"mlp": False, "depth": 3},
    "square": {"patch_size": (4, 4), "heads": 4, "dim": 32},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [True, False])
def test_the_counter_equals_the_formula(shape, fused):
    model = ours(fused=fused, **SHAPES[shape])
    assert flops_by_part(model) == vit_flops(model.module.config)


def test_the_formula_is_that_of_the_papers():
    """8 N d² + 4 N² d for attention, 16 N d² for an MLP of four times the width (twice what counts as one MAC)."""
    config = load("vit-tiny", random_weights=True).module.config
    tokens, dim = 65, 192
    found = vit_flops(config)
    assert found[PROJECTIONS] == 6 * 8 * tokens * dim**2
    assert found[PRODUCTS] == 6 * 4 * tokens**2 * dim
    assert found[MLP] == 6 * 16 * tokens * dim**2


class Weighted(TorchFunctionMode):
    """Adds two for each multiplication of a linear map or a convolution, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (F.linear, F.conv2d):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.flops += 2 * found.numel() * weight[0].numel()  # of a convolution: its group's channels x window
        return found


def by_hand(model, *, width: int) -> int:
    """Products with weights as they are called, and products of tokens as the lens sees them.

    width: of a head, for models that make their weights themselves.
    """
    batch, products = images(model.input_size, batch=1), []

    def add(call) -> None:
        seen = width if call.output is None else call.output.shape[-1]
        products.append(2 * 2 * call.weights().numel() * seen)

    with torch.no_grad(), Weighted() as mode:
        model(batch)
    observe(model, batch, add)
    return mode.flops + sum(products)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "torchvision-vit"])
def test_other_families_count_what_a_sum_over_their_layers_gives(family):
    model = shared_model(family)
    found = flops_by_part(model)
    assert sum(found.values()) == by_hand(model, width=16 if family == "cait" else 8)
    assert found[PRODUCTS] > 0


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_no_family_loses_its_products(family):
    model, seen = shared_model(family), []
    observe(model, images(model.input_size, batch=1), lambda call: seen.append(call.weights().shape))
    least = sum(2 * prod(shape) for shape in seen)  # a head is at least one number wide, and there are two products
    assert flops_by_part(model)[PRODUCTS] >= least


def test_torch_s_multihead_attention_is_seen_into():
    """Its inference kernel is one opaque operation; 16 tokens and CLS, width 32, two layers, an MLP of 64."""
    found = flops_by_part(torchvision_vit())
    tokens, dim, hidden = 17, 32, 64
    assert found[PROJECTIONS] == 2 * 8 * tokens * dim**2
    assert found[PRODUCTS] == 2 * 4 * tokens**2 * dim
    assert found[MLP] == 2 * 4 * tokens * dim * hidden
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_resnet_has_the_flops_of_its_paper():
    """He 2016, table 1: 1.8 billion multiplications and additions as one, at 224 px."""
    found = flops_by_part(load("torchvision:resnet18", random_weights=True))
    assert round(sum(found.values()) / 2e9, 1) == 1.8
    assert list(found) == ["stem", "stage 0", "stage 1", "stage 2", "stage 3", "head"]
    assert found["head"] == 2 * 512 * 1000


def test_products_overtake_the_rest_at_the_crossover():
    """2 d + h tokens: where 4 N² d = 8 N d² + 4 N d h."""
    config = load("vit-tiny", random_weights=True).module.config
    tokens = crossover(vit_flops(config), config.layout.tokens)
    assert tokens == pytest.approx(2 * 192 + 768)
    large = replace(config, image_size=(4 * 34, 4 * 34))
    found = vit_flops(large)
    assert (found[PRODUCTS] > found[PROJECTIONS] + found[MLP]) == (large.layout.tokens > tokens) is True


TOKENS = [17, 37, 65, 145, 257]


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0, 1.5, 2.0])
def test_a_power_law_gives_its_exponent_without_width(power):
    found = exponent(TOKENS, [3 * tokens**power for tokens in TOKENS])
    assert (found.value, found.low, found.high) == pytest.approx((power, power, power), abs=1e-9)
    assert found.n == 5


def test_a_mixture_lies_between_its_powers_and_is_no_power_law():
    found = exponent(TOKENS, [100 * tokens + tokens**2 for tokens in TOKENS])
    assert 1 < found.low < found.value < found.high < 2
    assert found.high - found.low > 0.1


def test_the_interval_is_that_of_least_squares():
    noise = np.random.default_rng(0).normal(size=5)
    x, y = np.log(TOKENS), 1.3 * np.log(TOKENS) + 0.1 * noise
    found = exponent(TOKENS, np.exp(y).tolist())
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - slope * x - intercept
    half = stats.t.ppf(0.975, 3) * np.sqrt((residual**2).sum() / 3 / ((x - x.mean()) ** 2).sum())
    assert (found.value, found.low, found.high) == pytest.approx((slope, slope - half, slope + half))


def test_the_products_of_attention_grow_with_the_square_of_the_tokens():
    configs = [ours(size=(side, side)).module.config for side in (16, 32, 64)]
    products = [vit_flops(config)[PRODUCTS] for config in configs]
    assert exponent([config.layout.tokens for config in configs], products).value == pytest.approx(2)


def swin_flops(model: Model) -> dict[str, int]:
    """FLOPs of our Swin by formula: in each window of n places 4 n² d for the two products; places include padding."""
    config, (height, width) = model.module.config, model.input_size
    maps, inside = config.maps((height, width)), config.window[0] * config.window[1]
    found = {EMBEDDING: 2 * prod(maps[0]) * 3 * prod(config.patch_size) * config.dim}
    for (rows, columns), dim, depth in zip(maps, config.widths, config.depths):
        windows = -(-rows // config.window[0]) * -(-columns // config.window[1])
        parts = {
            PROJECTIONS: depth * 8 * windows * inside * dim**2,
            PRODUCTS: depth * 4 * windows * inside**2 * dim,
            MLP: depth * 4 * rows * columns * dim * int(dim * config.mlp_ratio),
        }
        found |= {part: found.get(part, 0) + count for part, count in parts.items()}
    merging = [2 * prod(after) * 4 * dim * 2 * dim for after, dim in zip(maps[1:], config.widths)]
    return {**found, BETWEEN: sum(merging), HEAD: 2 * config.widths[-1] * config.classes}


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (8, 20)])
@pytest.mark.parametrize("shift", [True, False])
def test_our_swin_by_counter_and_by_formula(size, shift):
    model = our_swin(size=size, shift=shift)
    assert flops_by_part(model) == swin_flops(model)


def test_in_windows_the_products_of_attention_grow_with_the_tokens():
    """The ViT's with their square: the exponents, fitted to counted FLOPs, leave no room between."""
    sides = (32, 64, 96, 128)
    vits, swins = ([make(size=(side, side)) for side in sides] for make in (ours, our_swin))
    fits = [
        exponent([tokens_of(model) for model in models], [flops_by_part(model)[PRODUCTS] for model in models])
        for models in (vits, swins)
    ]
    for fit, power in zip(fits, (2.0, 1.0)):
        assert (fit.value, fit.low, fit.high) == pytest.approx((power, power, power), abs=1e-6)


def test_two_points_have_no_interval():
    found = exponent([10, 100], [1, 10])
    assert (found.value, found.low, found.high, found.n) == (pytest.approx(1.0), None, None, 2)
