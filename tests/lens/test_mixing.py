"""Attention that adds or subtracts several softmaxes is refused where weights are read, and can still be ablated."""

import pytest
import torch

import vitlens
from tests.lens.tiny import images, timm_model
from vitlens.errors import UnsupportedError
from vitlens.lens.observe import require_one_softmax
from vitlens.lens.trace import layers
from vitlens.models.model import Model

READ = {
    "attention": vitlens.attention,
    "observe": lambda model, batch: vitlens.observe(model, batch, lambda _: None),
    "relevance": vitlens.relevance,
    "rollout": vitlens.rollout,
    "statistics": vitlens.statistics,
    "best": lambda model, batch: vitlens.explain(model, batch, method="best"),
    "legrad": lambda model, batch: vitlens.explain(model, batch, method="legrad"),
    "walkthrough": lambda model, batch: vitlens.walkthrough(model, batch[:1]),
    "explorer": vitlens.explorer,
}


BLOCKS = {"sequential": "vit_dwee_patch16_reg1_gap_256", "parallel": "vit_dpwee_patch16_reg1_gap_256"}


def differential(blocks: str, *, fused: bool, wrapped: bool = False) -> Model:
    """A tiny ViT of two blocks, each of whose heads subtracts one softmax from another."""
    model = timm_model(BLOCKS[blocks])
    for module in model.module.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    if wrapped:
        return vitlens.wrap(model.module, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    return model


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", READ)
def test_a_difference_of_softmaxes_is_not_read_as_either(name: str, blocks: str, fused: bool, wrapped: bool) -> None:
    with pytest.raises(UnsupportedError, match=r"one softmax|side by side|has, found"):
        READ[name](differential(blocks, fused=fused, wrapped=wrapped), images())


@pytest.mark.parametrize("blocks", BLOCKS)
def test_heads_of_a_difference_are_those_that_the_projection_reads(blocks: str) -> None:
    """Replaced by zero, a head is as if its columns of the projection were zero."""
    model, batch = differential(blocks, fused=True), images()
    projection = model.module.get_submodule(model.anatomy.parts[layers(model)[1].attention].projection)
    with vitlens.intervene(model, {"blocks.1.head.1": "zero"}), torch.no_grad():
        found = model(batch)
    with torch.no_grad():
        projection.weight[:, projection.in_features // 2 :] = 0
        torch.testing.assert_close(found, model(batch))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_two_softmaxes_in_one_call_are_not_two_heads(blocks: str) -> None:
    """Of four softmaxes of 8 columns each, the projection reads two heads of 16."""
    with pytest.raises(UnsupportedError, match="expected heads"):
        vitlens.ablate(differential(blocks, fused=False), images(), "predicted")


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "cait_xxs24_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"]
)
def test_one_softmax_is_found_to_be_one(name: str) -> None:
    require_one_softmax(timm_model(name), images())
