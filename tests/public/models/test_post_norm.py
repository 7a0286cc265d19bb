"""Post-norm blocks against torch's own nn.TransformerEncoderLayer(norm_first=False) with the same weights: logits,
gradients and every analysis; what assumes pre-norm refuses them in one line."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitlens
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
        self.stem, self.head, self.cls, self.positions = vit.patch_embed, vit.head, vit.cls_token, vit.pos_embed
        self.layers = nn.ModuleList()
        for block in vit.blocks:
            layer = nn.TransformerEncoderLayer(
                16, 2, 64, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=False
            )
            with torch.no_grad():
                layer.self_attn.in_proj_weight.copy_(block.attn.qkv.weight)
                layer.self_attn.in_proj_bias.copy_(block.attn.qkv.bias)
            layer.self_attn.out_proj.load_state_dict(block.attn.proj.state_dict())
            for own, other in (("fc1", "linear1"), ("fc2", "linear2")):
                getattr(layer, other).load_state_dict(getattr(block.mlp, own).state_dict())
            for name in ("norm1", "norm2"):
                getattr(layer, name).load_state_dict(getattr(block, name).state_dict())
            self.layers.append(layer)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images)
        if self.cls is not None:
            tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1)
        tokens = tokens + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1) if self.cls is None else tokens[:, 0])


def both(pooling: str = "cls") -> tuple[Model, Model]:
    own = ours(size=SIZE, patch_size=(4, 4), depth=3, classes=3, norm_first=False, pooling=pooling)
    module = Oracle(own.module).eval()
    return own, half(module, SIZE, classes="abc")


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    return both()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_logits_and_gradients_are_torchs(pooling):
    own, other = both(pooling)
    torch.testing.assert_close(own(IMAGES), other(IMAGES), atol=1e-5, rtol=1e-5)
    for each in (own, other):
        nn.functional.cross_entropy(each.requires_grad_(True)(IMAGES), LABELS).backward()
    for block, layer in zip(own.module.blocks, other.module.layers, strict=True):
        for mine, theirs in (
            (block.attn.qkv.weight, layer.self_attn.in_proj_weight),
            (block.mlp.fc1.weight, layer.linear1.weight),
            (block.norm1.weight, layer.norm1.weight),
            (block.norm2.bias, layer.norm2.bias),
        ):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


ANALYSES: dict[str, Callable[[Model], Tensor]] = {
    "attention": lambda model: torch.stack(list(vitlens.attention(model, IMAGES))),
    "relevance": lambda model: vitlens.relevance(model, IMAGES, targets=LABELS),
    "logit lens": lambda model: vitlens.logit_lens(model, IMAGES).logits,
    "ablation": lambda model: vitlens.ablate(model, IMAGES, LABELS).delta_loss,
    "gradcam": lambda model: vitlens.explain(model, IMAGES, targets=LABELS, method="gradcam"),
    "legrad": lambda model: vitlens.explain(model, IMAGES, targets=LABELS, method="legrad"),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_equals_that_of_torchs_layers(name, pair):
    first, second = (torch.as_tensor(ANALYSES[name](model)) for model in pair)
    assert first.abs().max() > 1e-4
    torch.testing.assert_close(first, second, atol=2e-5, rtol=1e-3)


def test_replay_is_exact_from_every_layer(pair):
    model, changes = pair[0], [{f"blocks.{layer}.head.{head}": "zero"} for layer in range(3) for head in range(2)]
    with vitlens.replay(model, IMAGES) as kept, torch.no_grad():
        assert kept.exact
        for change, logits in zip(changes, kept.run(changes), strict=True):
            with vitlens.intervene(model, change):
                torch.testing.assert_close(logits, model(IMAGES), atol=1e-5, rtol=1e-5)


def test_the_last_block_ends_with_the_last_norm():
    pre, post = (ours(norm_first=first) for first in (True, False))
    assert pre.parameter_count() - post.parameter_count() == 2 * 16
    block = post.module.blocks[-1]
    features = post.module.forward_features(torch.rand(2, 3, 32, 48))
    normed = (features - block.norm2.bias) / block.norm2.weight
    torch.testing.assert_close(normed.mean(-1), torch.zeros(2, 13), atol=1e-5, rtol=0)
    torch.testing.assert_close(normed.var(-1, unbiased=False), torch.ones(2, 13), atol=1e-3, rtol=0)


def test_what_assumes_pre_norm_refuses_in_one_line(pair):
    model = pair[0]
    for refused, instead in (
        (lambda: vitlens.direct_logit_attribution(model, IMAGES), "vitlens.logit_lens"),
        (lambda: vitlens.walkthrough(model, IMAGES[:1]), "vitlens attention"),
    ):
        with pytest.raises(UnsupportedError, match=instead) as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert "post-norm" in model.supports("walkthrough")
    assert model.supports("ablate") is model.supports("rollout") is None
