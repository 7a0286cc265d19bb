"""Post-norm blocks against torch's nn.TransformerEncoderLayer(norm_first=False)."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import half
from tests.kit.tiny import ours
from vitlens import Model
from vitlens.errors import UnsupportedError

SIZE = (16, 24)
LABELS = torch.arange(12) % 3
IMAGES = torch.rand(12, 3, *SIZE, generator=torch.Generator().manual_seed(2))


class Oracle(nn.Module):
    """The same network of torch's post-norm encoder layers."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.stem = vit.patch_embed
        self.head = vit.head
        self.cls = vit.cls_token
        self.positions = vit.pos_embed
        options = {
            "dropout": 0.0,
            "activation": "gelu",
            "layer_norm_eps": 1e-6,
            "batch_first": True,
        }
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 64, **options) for _ in vit.blocks
        )
        for block, layer in zip(vit.blocks, self.layers):
            state = block.state_dict()
            for our_name, theirs in (
                ("attn.qkv.", "self_attn.in_proj_"),
                ("attn.proj", "self_attn.out_proj"),
                ("mlp.fc", "linear"),
            ):
                state = {name.replace(our_name, theirs): value for name, value in state.items()}
            layer.load_state_dict(state)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images)
        if self.cls is not None:
            tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1)
        tokens = tokens + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1) if self.cls is None else tokens[:, 0])


@cache
def both(pooling: str = "cls") -> tuple[Model, Model]:
    model = ours(
        size=SIZE, patch_size=(4, 4), depth=3, classes=3, norm_first=False, pooling=pooling
    )
    return model, half(Oracle(model.module).eval(), SIZE, classes="abc")


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_logits_and_gradients_are_torchs(pooling):
    model, other = both(pooling)
    torch.testing.assert_close(model(IMAGES), other(IMAGES), atol=1e-5, rtol=1e-5)
    for tested in (model, other):
        nn.functional.cross_entropy(tested.requires_grad_(True)(IMAGES), LABELS).backward()
    for block, layer in zip(model.module.blocks, other.module.layers, strict=True):
        for parameter, theirs in (
            (block.attn.qkv.weight, layer.self_attn.in_proj_weight),
            (block.mlp.fc1.weight, layer.linear1.weight),
            (block.norm1.weight, layer.norm1.weight),
            (block.norm2.bias, layer.norm2.bias),
        ):
            torch.testing.assert_close(parameter.grad, theirs.grad, atol=1e-5, rtol=1e-4)


ANALYSES: dict[str, Callable[[Model], Tensor]] = {
    "attention": lambda model: torch.stack(list(vitlens.attention(model, IMAGES))),
    "relevance": lambda model: vitlens.relevance(model, IMAGES, targets=LABELS),
    "logit lens": lambda model: vitlens.logit_lens(model, IMAGES).logits,
    "ablation": lambda model: vitlens.ablate(model, IMAGES, LABELS).delta_loss,
    "gradcam": lambda model: vitlens.explain(model, IMAGES, targets=LABELS, method="gradcam"),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_equals_that_of_torchs_layers(name):
    first, second = (torch.as_tensor(ANALYSES[name](model)) for model in both())
    assert first.abs().max() > 1e-4
    torch.testing.assert_close(first, second, atol=2e-5, rtol=1e-3)


def test_what_assumes_pre_norm_refuses_in_one_line():
    model = both()[0]
    for call, instead in (
        (lambda: vitlens.direct_logit_attribution(model, IMAGES), "vitlens.logit_lens"),
        (lambda: vitlens.walkthrough(model, IMAGES[:1]), "vitlens attention"),
    ):
        with one_line(UnsupportedError, instead):
            call()
    assert "post-norm" in model.supports("walkthrough")
    assert model.supports("ablate") is model.supports("rollout") is None
    with vitlens.replay(model, IMAGES) as replay:
        assert replay.exact
