"""Attention against timm's unfused path (the input of its attn_drop), relevance against captum."""

import copy

import pytest
import torch
from captum.attr import LayerActivation, LayerGradientXActivation
from torch import Tensor

import vitlens
from tests.kit.tiny import TIMM, images, timm_model, with_kernel
from vitlens import Model


def unfused_attention(model: Model, batch: Tensor) -> dict[str, Tensor]:
    """Return timm's weights by module with fused_attn=False: the input of attn_drop."""
    twin = with_kernel(copy.deepcopy(model), fused=False)
    attention_inputs = dict[str, Tensor]()
    for name, module in twin.module.named_modules():
        if name.endswith("attn_drop"):
            owner = name.rpartition(".")[0]
            module.register_forward_pre_hook(
                lambda _module, inputs, owner=owner: attention_inputs.__setitem__(owner, inputs[0])
            )
    with torch.no_grad():
        twin(batch)
    return attention_inputs


def difference(model: Model, batch: Tensor) -> float:
    """Return the largest difference over all layers, in double precision."""
    model = copy.deepcopy(model).double()
    batch = batch.double()
    expected = unfused_attention(model, batch)
    captured = list[vitlens.AttentionCall]()
    vitlens.observe(model, batch, captured.append)
    largest = 0.0
    for call in captured:
        if call.site.module == "attn_pool":  # it has no attn_drop to look at; by hand below
            continue
        expected_weights = expected.pop(call.site.module)
        module = call.site.module
        weights = call.weights()
        # talking heads: timm mixes before attn_drop
        if hasattr(mixed := model.module.get_submodule(module), "proj_w"):
            weights = mixed.proj_w(weights.movedim(1, -1)).movedim(-1, 1)
        assert expected_weights.shape == weights.shape
        assert expected_weights.std() > 1e-4  # the comparison is not empty
        largest = max(largest, (expected_weights - weights).abs().max().item())
    assert not expected
    return largest


@pytest.mark.parametrize("family", ["deit-distilled", "siglip", "cait", "swin", "swinv2"])
def test_weights_are_timms_own(family):
    assert difference(timm_model(TIMM[family]), images()) < 1e-12


def test_siglips_pooling_by_hand():
    model = timm_model(TIMM["siglip"])
    pool = model.module.attn_pool
    tokens: list[Tensor] = []
    pool.register_forward_pre_hook(lambda _module, inputs: tokens.append(inputs[0]))
    weights = vitlens.attention(model, images())[-1]
    heads = pool.num_heads
    width = pool.head_dim
    query = pool.q(pool.latent)[0].view(heads, width)
    key = pool.kv(tokens[-1])[..., : heads * width].view(2, -1, heads, width)
    expected = torch.einsum("hd,bkhd->bhk", query, key).mul(width**-0.5).softmax(-1)
    torch.testing.assert_close(weights[:, :, 0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"]
)
def test_whole_models(name):
    model = vitlens.load(f"timm:{name}", random_weights=True)
    assert difference(model, images(model.input_size, batch=1)) < 1e-10


def relevance_of(products: list[Tensor], model: Model) -> Tensor:
    """Return the readout's row of R - I over the patches, with Chefer's R + Ā R of every layer.

    Ā is the mean over heads of the positive part of weights ⊙ gradient.
    """
    prefix = len(model.layout.prefix)
    tokens = products[0].shape[-1]
    identity = torch.eye(tokens, dtype=products[0].dtype).expand(len(products[0]), -1, -1)
    relevance = identity
    for product in products:
        relevance = relevance + product.clamp_min(0).mean(1) @ relevance
    relevance = relevance - identity
    row = relevance[:, 0] if model.anatomy.readout == "cls" else relevance[:, prefix:].mean(1)
    return row[:, prefix:].unflatten(1, model.layout.grid)


@pytest.mark.parametrize("family", ["vit", "vit-mean", "beit", "eva02", "dinov3"])
def test_weights_and_relevance_are_captums(family):
    def largest(actual: list[Tensor], expected: list[Tensor]) -> float:
        return max(
            ((f - e).abs().max() / e.abs().max()).item()
            for f, e in zip(actual, expected, strict=True)
        )

    model = timm_model(TIMM[family]).double()
    batch = images(batch=3).double()
    targets = [3, 0, 4]
    twin = with_kernel(copy.deepcopy(model), fused=False)
    layers = [module for name, module in twin.module.named_modules() if name.endswith(".attn_drop")]
    weights = [LayerActivation(twin, layer).attribute(batch) for layer in layers]
    products = [
        LayerGradientXActivation(twin, layer).attribute(batch, target=targets).detach()
        for layer in layers
    ]
    assert len(layers) == 2
    assert largest(list(vitlens.attention(model, batch)), weights) < 1e-11
    expected = [relevance_of(products, model)]
    assert (
        largest([vitlens.relevance(model, batch, targets=torch.tensor(targets))], expected) < 1e-11
    )
    other = vitlens.relevance(model, batch, targets=torch.tensor([2, 2, 2]))
    assert largest([other], expected) > 0.01  # the comparison is not empty
