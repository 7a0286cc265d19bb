"""Attention as the lens sees it beside timm's own unfused path: what enters its attn_drop."""

import copy

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.tiny import TIMM, images, timm_model
from vitlens import Model

FAMILIES = ("vit", "deit-distilled", "beit", "dinov2-registers", "dinov3", "siglip", "cait", "swin", "swinv2")


def unfused_attention(model: Model, batch: Tensor) -> dict[str, Tensor]:
    """timm's weights by module, through its own fused_attn=False: the input of attn_drop, before dropout."""
    twin, found = copy.deepcopy(model.module), dict[str, Tensor]()
    for name, module in twin.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if name.endswith("attn_drop"):
            owner = name.rpartition(".")[0]
            module.register_forward_pre_hook(lambda _module, inputs, owner=owner: found.__setitem__(owner, inputs[0]))
    with torch.no_grad():
        twin(model.prepare(batch))
    return found


def difference(model: Model, batch: Tensor) -> float:
    """The largest over all layers that timm shows; every layer of ours must be among them. In double precision, as
    float noise adds up over the layers."""
    model, batch = copy.deepcopy(model).double(), batch.double()
    expected, captured = unfused_attention(model, batch), list[vitlens.AttentionCall]()
    vitlens.observe(model, batch, captured.append)
    largest = 0.0
    for call in captured:
        site, weights = call.site, call.weights()
        if site.module == "attn_pool":  # it has no attn_drop to look at; by hand below
            continue
        own, module = expected.pop(site.module), model.module.get_submodule(site.module)
        if hasattr(module, "proj_w"):  # talking heads: timm mixes the weights over heads before attn_drop
            weights = module.proj_w(weights.movedim(1, -1)).movedim(-1, 1)
        assert own.shape == weights.shape
        largest = max(largest, (own - weights).abs().max().item())
    assert not expected
    return largest


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family):
    assert difference(timm_model(TIMM[family]), images()) < 1e-12


def test_the_oracle_can_tell():
    """Another image's attention is further away than the tolerance: the comparison is not empty."""
    model = timm_model(TIMM["vit"])
    ours = vitlens.attention(model, images())[1]
    theirs = unfused_attention(model, images(seed=1))["blocks.1.attn"]
    assert (ours - theirs).abs().max() > 1e-4


def test_siglips_pooling_by_hand():
    model = timm_model(TIMM["siglip"])
    pool = model.module.attn_pool
    tokens: list[Tensor] = []
    pool.register_forward_pre_hook(lambda _module, inputs: tokens.append(inputs[0]))
    weights = vitlens.attention(model, images())[-1]
    heads, width = pool.num_heads, pool.head_dim
    query = pool.q(pool.latent)[0].view(heads, width)
    key = pool.kv(tokens[-1])[..., : heads * width].view(2, -1, heads, width)
    expected = torch.einsum("hd,bkhd->bhk", query, key).mul(width**-0.5).softmax(-1)
    torch.testing.assert_close(weights[:, :, 0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_whole_models(name):
    model = vitlens.load(f"timm:{name}", random_weights=True)
    assert difference(model, images(model.input_size, batch=1)) < 1e-10
