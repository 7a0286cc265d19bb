"""Attention as the lens sees it beside timm's own unfused path: what enters its attn_drop."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import TIMM, images, timm_model
from vitlens import Model

OWN_PATH = ("vit", "deit-distilled", "beit", "dinov3", "siglip")  # more are in test_captum.py


def unfused_attention(model: Model, batch: Tensor, *, layer_by_layer: bool = True) -> dict[str, Tensor]:
    """timm's weights by module, through its own fused_attn=False: the input of attn_drop, before dropout.

    layer_by_layer: each module is given what it has in the fused model, so that float noise does not add up over the
    layers; else the whole model runs unfused.
    """
    twin: nn.Module = copy.deepcopy(model.module)
    whole = copy.deepcopy(model.module) if layer_by_layer else twin
    found: dict[str, Tensor] = {}
    for name, module in twin.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if name.endswith("attn_drop"):
            owner = name.rpartition(".")[0]
            module.register_forward_pre_hook(keeping(found, owner))
            if layer_by_layer:
                whole.get_submodule(owner).register_forward_pre_hook(
                    beside(twin.get_submodule(owner)), with_kwargs=True
                )
    with torch.no_grad():
        whole(model.prepare(batch))
    return found


def beside(twin: nn.Module) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]:
    def run(_module: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        twin(*inputs, **options)

    return run


def keeping(found: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[name] = inputs[0].detach()

    return keep


def compare(model: Model, batch: Tensor, *, layer_by_layer: bool = True) -> float:
    """The largest difference over all layers that timm shows; every layer of ours must be among them."""
    expected, captured = unfused_attention(model, batch, layer_by_layer=layer_by_layer), list[vitlens.AttentionCall]()
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


@pytest.mark.parametrize("family", [*OWN_PATH, "cait", "swin", "swinv2"])
def test_tiny_models(family):
    assert compare(timm_model(TIMM[family]), images()) < 1e-5


@pytest.mark.parametrize("family", ["vit", "deit-distilled", "dinov2-registers", "cait", "swin"])
def test_the_whole_model_in_double_precision(family):
    """Without float noise nothing is left of the difference, from the first layer to the last."""
    model = timm_model(TIMM[family]).double()
    assert compare(model, images().double(), layer_by_layer=False) < 1e-12


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


def test_rotary_positions_are_already_in_what_the_lens_sees():
    """DINOv3 by hand: queries and keys of the patches turned by timm's own rotary embedding, the prefix left alone."""
    model = timm_model(TIMM["dinov3"])
    module, block = model.module, model.module.blocks[0]
    entered: list[Tensor] = []
    block.attn.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0]))
    weights = vitlens.attention(model, images())[0]
    attention, prefix = block.attn, len(model.layout.prefix)
    rope = module.rope.get_embed(shape=list(model.layout.grid))
    qkv = attention.qkv(entered[-1]).view(2, -1, 3, attention.num_heads, 16).permute(2, 0, 3, 1, 4)

    def turned(x: Tensor) -> Tensor:
        half = getattr(attention, "rotate_half", False)
        return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], 2)

    expected = (turned(qkv[0]) @ turned(qkv[1]).mT * attention.scale).softmax(-1)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_whole_models(name):
    model = vitlens.load(f"timm:{name}", random_weights=True)
    assert compare(model, images(model.input_size, batch=1)) < 1e-5
    assert timm.is_model(name)
