"""Weights, and weights ⊙ gradient, beside captum's at timm's attn_drop, through which its unfused weights go."""

import copy
from collections.abc import Callable

import pytest
import torch
from captum.attr import LayerActivation, LayerGradientXActivation
from torch import Tensor, nn

from tests.lens.tiny import TIMM, images, timm_model
from vitlens.analysis.attention.chain import chained
from vitlens.analysis.attention.methods import gradient_weighted
from vitlens.models.model import Model

FAMILIES = ("vit", "vit-mean", "deit-distilled", "deit3", "beit", "eva02", "dinov2-registers", "dinov3", "siglip")
TARGETS = [3, 0, 4]


def unfused(model: Model) -> tuple[Callable[[Tensor], Tensor], list[str], list[nn.Module]]:
    """A copy of the model with timm's fused_attn=False: what runs it, and its attention layers with their attn_drop."""
    twin = copy.deepcopy(model)
    names, layers = [], []
    for name, module in twin.module.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if name.endswith(".attn_drop"):
            names.append(name.removesuffix(".attn_drop"))
            layers.append(module)
    return twin, names, layers


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a part of the largest number."""
    return max(((f - e).abs().max() / e.abs().max()).item() for f, e in zip(found, expected, strict=True))


def captums(family: str, *, dtype: torch.dtype) -> tuple[Model, Tensor, list[str], list[Tensor], list[Tensor]]:
    model = timm_model(TIMM[family]).to(dtype)
    batch = images(batch=3).to(dtype)
    module, names, layers = unfused(model)
    weights = [LayerActivation(module, layer).attribute(batch) for layer in layers]
    products = [LayerGradientXActivation(module, layer).attribute(batch, target=TARGETS) for layer in layers]
    return model, batch, names, weights, [product.detach() for product in products]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_their_gradients(family, dtype):
    model, batch, names, weights, products = captums(family, dtype=dtype)
    calls = chained(model, batch, targets=torch.tensor(TARGETS), gradient=True).calls
    ours = [call for call in calls if call.site.module in names]  # SigLIP's pooling has no attn_drop
    assert [call.site.module for call in ours] == names
    assert len(ours) == 2
    own = [call.weights() for call in ours]
    gradients = [call.weight_gradient() for call in ours]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    assert largest(own, weights) < tolerance
    # before the positive part and the mean over heads, and after
    assert largest([w * g for w, g in zip(own, gradients)], products) < tolerance
    asked = [product.clamp_min(0).mean(1) for product in products]
    assert largest([gradient_weighted(w, g) for w, g in zip(own, gradients)], asked) < tolerance


def test_the_oracle_can_tell():
    """Another class's gradient is far from captum's: the comparison is not empty."""
    model, batch, _, _, products = captums("vit", dtype=torch.float32)
    calls = chained(model, batch, targets=torch.tensor([2, 2, 2]), gradient=True).calls
    assert largest([call.weights() * call.weight_gradient() for call in calls], products) > 0.1
