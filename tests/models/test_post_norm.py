"""Post-norm blocks against torch's own nn.TransformerEncoderLayer(norm_first=False) with the same weights: logits,
gradients and every analysis; what assumes pre-norm refuses them in one line."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitlens
from vitlens.analysis.cost.flops import flops_by_part, vit_flops
from vitlens.errors import UnsupportedError
from vitlens.lens.intervene import intervene
from vitlens.lens.replay_pass import method_of
from vitlens.models import saved
from vitlens.models.anatomy import is_known_block
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.rebuild import prune_heads

SHAPE = {"dim": 16, "depth": 3, "heads": 2, "patch_size": [4, 4], "norm_first": False}
CLASSES = ("a", "b", "c")
SIZE = (16, 24)


class Oracle(nn.Module):
    """The same network of torch's post-norm encoder layers."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        config, self.stem, self.head = vit.config, vit.patch_embed, vit.head
        self.cls, self.positions = vit.cls_token, vit.pos_embed
        self.layers = nn.ModuleList()
        for block in vit.blocks:
            layer = nn.TransformerEncoderLayer(
                config.dim, config.heads, config.hidden, dropout=0.0, activation="gelu", layer_norm_eps=1e-6,
                batch_first=True, norm_first=False,
            )  # fmt: skip
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


def ours(**changes: object) -> Model:
    model = untrained("vit-micro", classes=CLASSES, image_size=SIZE, overrides={**SHAPE, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from zero biases and unit scales, which would hide a wrong order
        for parameter in model.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def torchs(model: Model) -> Model:
    return vitlens.wrap(Oracle(model.module).eval(), image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, classes=CLASSES)


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model]:
    model = ours()
    return model, torchs(model)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(12, 3, *SIZE, generator=torch.Generator().manual_seed(2))


LABELS = torch.arange(12) % 3


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_logits_and_gradients_are_torchs(pooling, images):
    model = ours(pooling=pooling)
    other = torchs(model).requires_grad_(True)
    torch.testing.assert_close(model(images), other(images), atol=1e-5, rtol=1e-5)
    for each in (model, other):
        nn.functional.cross_entropy(each(images), LABELS).backward()
    for index, block in enumerate(model.module.blocks):
        layer = other.module.layers[index]
        for own, theirs in (
            (block.attn.qkv.weight, layer.self_attn.in_proj_weight),
            (block.attn.proj.bias, layer.self_attn.out_proj.bias),
            (block.mlp.fc1.weight, layer.linear1.weight),
            (block.norm1.weight, layer.norm1.weight),
            (block.norm2.bias, layer.norm2.bias),
        ):
            torch.testing.assert_close(own.grad, theirs.grad, atol=1e-5, rtol=1e-4)


ANALYSES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "attention": lambda model, images: torch.stack(list(vitlens.attention(model, images))),
    "relevance": lambda model, images: vitlens.relevance(model, images, targets=LABELS),
    "logit lens": lambda model, images: vitlens.logit_lens(model, images).logits,
    "ablation": lambda model, images: vitlens.ablate(model, images, LABELS).delta_loss,
    "gradcam": lambda model, images: vitlens.explain(model, images, targets=LABELS, method="gradcam"),
    "legrad": lambda model, images: vitlens.explain(model, images, targets=LABELS, method="legrad"),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_equals_that_of_torchs_layers(name, pair, images):
    first, second = (torch.as_tensor(ANALYSES[name](model, images)) for model in pair)
    assert first.abs().max() > 1e-4
    torch.testing.assert_close(first, second, atol=2e-5, rtol=1e-3)


def test_replay_is_exact_from_every_layer_and_runs_the_last_block_whole(images):
    model = ours()
    method = method_of(model)
    assert method.exact
    assert method.rows is None
    assert not is_known_block(model.module.blocks[0])
    by_replay = vitlens.ablate(model, images, LABELS, replace="zero").delta_loss
    with torch.no_grad():
        clean = nn.functional.cross_entropy(model(images), LABELS)
        for layer in range(3):
            for head in range(2):
                with intervene(model, {f"blocks.{layer}.head.{head}": "zero"}):
                    loss = nn.functional.cross_entropy(model(images), LABELS)
                assert by_replay[layer, head].item() == pytest.approx((loss - clean).item(), abs=1e-5)


def test_it_is_pruned_saved_and_loaded(tmp_path, images):
    model = ours()
    with torch.no_grad():
        with intervene(model, {"blocks.1.head.0": "zero"}):
            ablated = model(images)
        pruned = prune_heads(model, {1: [0]})
        torch.testing.assert_close(pruned(images), ablated, atol=1e-5, rtol=1e-5)
        saved.save(pruned, tmp_path / "model.safetensors")
        again = load(str(tmp_path))
        assert again.architecture["overrides"]["norm_first"] is False
        assert torch.equal(again(images), pruned(images))


def test_the_last_block_ends_with_the_last_norm():
    pre, post = (untrained("vit-micro", classes=CLASSES, overrides={"norm_first": first}) for first in (True, False))
    assert pre.parameter_count() - post.parameter_count() == 2 * 128
    tokens = post.module.forward_features(torch.rand(2, 3, 32, 32))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 65), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.var(-1, unbiased=False), torch.ones(2, 65), atol=1e-3, rtol=0)
    assert sum(flops_by_part(post).values()) == sum(vit_flops(post.module.config).values())


def test_what_assumes_pre_norm_refuses_in_one_line(pair, images):
    model = pair[0]
    for run, instead in (
        (lambda: vitlens.direct_logit_attribution(model, images), "vitlens.logit_lens reads each depth"),
        (lambda: vitlens.walkthrough(model, images[:1]), "vitlens attention shows its queries, keys"),
    ):
        with pytest.raises(UnsupportedError, match=r"\(post-norm\) in blocks.0") as caught:
            run()
        assert instead in str(caught.value)
        assert "\n" not in str(caught.value)
    assert "post-norm" in (model.supports("walkthrough") or "")
    assert model.supports("ablate") is model.supports("rollout") is None
