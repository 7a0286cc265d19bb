"""Weights, and relevance of weights ⊙ gradient, beside captum's at timm's attn_drop, through which its unfused weights
go."""

import copy
from collections.abc import Callable

import pytest
import torch
from captum.attr import LayerActivation, LayerGradientXActivation
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import TIMM, images, timm_model, with_kernel
from vitlens import Model

FAMILIES = ("vit", "vit-mean", "deit3", "beit", "eva02", "dinov2-registers", "dinov3")
TARGETS = [3, 0, 4]


def unfused(model: Model) -> tuple[Callable[[Tensor], Tensor], list[nn.Module]]:
    """A copy of the model with timm's fused_attn=False, and the attn_drop of its attention layers."""
    twin = with_kernel(copy.deepcopy(model), fused=False)
    return twin, [module for name, module in twin.module.named_modules() if name.endswith(".attn_drop")]


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a part of the largest number."""
    return max(((f - e).abs().max() / e.abs().max()).item() for f, e in zip(found, expected, strict=True))


def relevance_of(products: list[Tensor], model: Model) -> Tensor:
    """R + Ā R of every layer (Chefer 2021), Ā the mean over heads of the positive part of weights ⊙ gradient; the
    readout's row of R - I over the patches."""
    prefix = len(model.layout.prefix)
    tokens = products[0].shape[-1]
    whole = torch.eye(tokens, dtype=products[0].dtype).expand(len(products[0]), -1, -1)
    for product in products:
        whole = whole + product.clamp_min(0).mean(1) @ whole
    whole = whole - torch.eye(tokens, dtype=whole.dtype)
    row = whole[:, 0] if model.anatomy.readout == "cls" else whole[:, prefix:].mean(1)
    return row[:, prefix:].unflatten(1, model.layout.grid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_relevance(family, dtype):
    model, batch = timm_model(TIMM[family]).to(dtype), images(batch=3).to(dtype)
    twin, layers = unfused(model)
    weights = [LayerActivation(twin, layer).attribute(batch) for layer in layers]
    products = [LayerGradientXActivation(twin, layer).attribute(batch, target=TARGETS).detach() for layer in layers]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    assert len(layers) == 2
    assert largest(list(vitlens.attention(model, batch)), weights) < tolerance
    found = vitlens.relevance(model, batch, targets=torch.tensor(TARGETS))
    assert largest([found], [relevance_of(products, model)]) < tolerance
    other = vitlens.relevance(model, batch, targets=torch.tensor([2, 2, 2]))
    assert largest([other], [relevance_of(products, model)]) > 0.01  # the comparison is not empty
