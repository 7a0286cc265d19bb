"""Attention with a norm or a gate between its heads and the output projection, as timm 1.0.31 has: heads are read at
the input of the projection, so that one set to zero is the model with its columns cut there."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitlens
from tests.lens.tiny import images, model_of, shaken
from vitlens.lens.attention import projection_of
from vitlens.lens.trace import layers
from vitlens.models.model import Model

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def with_attention(build: Callable[[], nn.Module], kind: Callable[[], nn.Module]) -> nn.Module:
    """A model whose attention modules are of another kind."""
    model = build()
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn = kind()  # type: ignore[union-attr]
    return model


ViT = partial(VisionTransformer, **SHAPE)
EVA = partial(Eva, **SHAPE, use_rot_pos_emb=True)
GATED = {"num_heads": 2, "qkv_bias": True, "gated": True}
BOTH = {**GATED, "scale_norm": True, "norm_layer": nn.LayerNorm}
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "normed": partial(ViT, scale_attn_norm=True),
    "gated": lambda: with_attention(ViT, partial(Attention, 32, **GATED)),
    "gated and normed": lambda: with_attention(ViT, partial(Attention, 32, **BOTH)),
    "eva normed": partial(EVA, scale_attn_inner=True),
    "eva gated": lambda: with_attention(EVA, partial(EvaAttention, 32, num_prefix_tokens=1, **BOTH)),
    "rope normed": partial(EVA, scale_attn_inner=True, attn_type="rope"),
    "rope gated": lambda: with_attention(EVA, partial(AttentionRope, 32, num_prefix_tokens=1, **BOTH)),
}
SOURCES: dict[str, Callable[[nn.Module], Model]] = {
    "timm": model_of,
    "wrapped": lambda module: vitlens.wrap(module, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", BUILDS)
def test_a_head_set_to_zero_is_its_columns_cut_at_the_projection(name: str, source: str) -> None:
    model, batch = SOURCES[source](shaken(BUILDS[name])), images()
    layer = layers(model)[1]
    projection = projection_of(model, layer.attention)
    assert projection is not None
    with torch.no_grad():
        with vitlens.replay(model, batch) as kept:
            assert kept.exact
            replayed = kept.run([{"blocks.1.head.1": "zero"}])[0]
        with vitlens.intervene(model, {"blocks.1.head.1": "zero"}):
            found = model(batch)
        clean = model(batch)
        weight = projection.weight.clone()
        projection.weight[:, 16:] = 0
        expected = model(batch)
        projection.weight.copy_(weight)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-4)
    assert (clean - expected).abs().max() > 1e-3
    effects = vitlens.ablate(model, batch, torch.tensor([0, 1]), replace="zero")
    assert effects.delta_loss.numel() == 4
    parts = vitlens.direct_logit_attribution(model, batch)
    torch.testing.assert_close(parts.total(), parts.logit, atol=1e-3, rtol=1e-3)
