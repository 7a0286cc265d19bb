"""LeGrad against the equation of Bousselham 2025, for each way of reading tokens."""

from collections.abc import Callable, Iterable
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.explainable import prompted
from tests.kit.models.clip import tiny
from tests.kit.tiny import FAMILIES, images, ours, pruned, shared_model, timm_model
from vitlens import Model
from vitlens.attribution.registry import LAST_BLOCKS
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

TARGETS = torch.tensor([3, 0, 4])
Read = Callable[[Tensor], Tensor]  # the output of a block -> its logits


def legrad(model: Model, **options: object) -> Tensor:
    return vitlens.explain(model, batch_of(model), targets=TARGETS, method="legrad", **options)


def batch_of(model: Model) -> Tensor:
    return images(model.input_size, batch=3)


def summed(model: Model, blocks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return Σ_l mean over heads and queries of (∂s_l/∂A_l)⁺ at the patches.

    blocks: the logits and the weights of each.
    """
    maps = torch.zeros(3, model.layout.patches)
    for logits, weights in blocks:
        score = logits.gather(1, TARGETS[:, None]).sum()
        (gradient,) = torch.autograd.grad(score, weights, retain_graph=True)
        maps += gradient.clamp_min(0).mean((1, 2))[:, -model.layout.patches :]
    return maps.unflatten(1, model.layout.grid)


def by_graph(model: Model, read: Read, *, first: int = 0) -> Tensor:
    """Return the maps of the layers with heads, from `first` on, by one plain graph."""
    weights = [name for name in vitlens.places(model).names if name.endswith("attention.weights")][
        first:
    ]
    streams = [name.replace("attention.weights", "residual") for name in weights]
    captured = vitlens.capture(model, batch_of(model), [*weights, *streams], graph=True)
    return summed(
        model,
        [
            (read(captured[stream]), captured[place])
            for stream, place in zip(streams, weights, strict=True)
        ],
    )


def same(actual: Tensor, expected: Tensor) -> None:
    """Check equality to 1e-5, relative to the largest value."""
    torch.testing.assert_close(
        actual, expected, atol=1e-5 * min(1.0, expected.max().item()), rtol=0
    )
    assert expected.flatten(1).std(1).min() > 1e-2 * expected.max()


def head_of(module: Any, readout: str | None = None) -> Read:
    def read(stream: Tensor) -> Tensor:
        return (
            module.head(module.norm(stream.mean(1)))
            if readout
            else module.forward_head(module.norm(stream))
        )

    return read


@pytest.mark.parametrize(
    ("options", "readout", "first"),
    [
        ({"registers": 2, "distillation": True}, None, 2),
        ({"pooling": "mean", "registers": 2}, None, 1),
        ({"registers": 2}, "mean", 0),  # all tokens averaged before the final norm
    ],
)
def test_each_block_is_read_by_the_models_own_head_or_by_the_mean(options, readout, first):
    model = ours(depth=3, **options)
    maps = legrad(model, start_layer=first, readout=readout)
    default = legrad(model, start_layer=first, readout=None)
    assert torch.equal(default, legrad(model, start_layer=first, readout=model.anatomy.readout))
    same(maps, by_graph(model, head_of(model.module, readout), first=first))
    assert readout is None or (maps - default).abs().max() > 0.1 * default.max()


def test_a_block_without_heads_is_left_out():
    model = pruned(ours(depth=3), {1: (0, 1)})
    same(legrad(model), by_graph(model, head_of(model.module)))


@pytest.mark.parametrize("name", ["vit-mean", "beit"])
def test_timms_own_weights(name):
    """timm's unfused attention hands its weights to attn_drop."""
    model = FAMILIES[name]()  # its kernels are exchanged
    maps = legrad(model)
    module = model.module.requires_grad_(True)
    weights = list[Tensor]()
    streams = list[Tensor]()
    for block in module.blocks:
        block.attn.fused_attn = False
        block.register_forward_hook(lambda _m, _i, output: streams.append(output))
        block.attn.attn_drop.register_forward_hook(lambda _m, _i, output: weights.append(output))
    model(batch_of(model))
    same(maps, summed(model, zip(map(head_of(module), streams), weights, strict=True)))


def test_attention_pooling_is_run_on_every_block():
    model = shared_model("siglip")
    pooling = model.module.attn_pool
    blocks = list[tuple[Tensor, Tensor]]()
    captured = vitlens.capture(model, batch_of(model), "blocks.*.residual", graph=True)
    for stream in captured.values():
        query = (
            pooling.q(pooling.latent.expand(3, -1, -1))
            .unflatten(-1, (pooling.num_heads, -1))
            .transpose(1, 2)
        )
        both = pooling.kv(model.module.norm(stream)).unflatten(-1, (2, pooling.num_heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) * pooling.scale).softmax(-1)
        pooled = pooling.proj((weights @ value).transpose(1, 2).flatten(2))
        pooled = pooled + pooling.mlp(pooling.norm(pooled))
        blocks.append((model.module.head(model.module.fc_norm(pooled[:, 0])), weights))
    torch.testing.assert_close(blocks[-1][0], captured.logits, atol=1e-5, rtol=0)
    same(legrad(model), summed(model, blocks))


@pytest.mark.parametrize(("readout", "first"), [(None, None), ("cls", 1)])
def test_clip_reads_a_block_by_projection_norm_and_texts(readout, first):
    """By default by the mean of all tokens, and in the last two blocks."""
    model = prompted(tiny("tiny-clip-deep"))
    maps = legrad(model, readout=readout, **({} if first is None else {"start_layer": first}))
    visual = model.module.visual

    def read(stream: Tensor) -> Tensor:
        pooled = stream[:, 0] if readout == "cls" else stream.mean(1)
        embedding = visual.ln_post(pooled) @ visual.proj
        return (
            model.module.text.scale
            * embedding
            / embedding.norm(dim=-1, keepdim=True)
            @ model.module.prompts.T
        )

    assert len(model.anatomy.blocks) > LAST_BLOCKS
    same(maps, by_graph(model, read, first=-LAST_BLOCKS if first is None else first))


def test_language_image_models_prefer_it():
    for name, method in (
        ("tiny-clip", "legrad"),
        ("tiny-sigmoid", "legrad"),
        ("tiny-resnet", "gradcam"),
    ):
        model = vitlens.zero_shot(tiny(name), ("cat", "dog"))
        assert vitlens.look(model, batch_of(model)[:1]).method == method


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("ours", {"start_layer": 2}, InputError),
        ("ours", {"readout": "pool"}, UnsupportedError),
        ("ours", {"readout": "clss"}, UnknownNameError),
        ("siglip", {"readout": "mean"}, UnsupportedError),
    ],
)
def test_refusals(monkeypatch, name, options, error):
    # the tests' own check of types would be first
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(error):
        legrad(shared_model(name), **options)


class AddedToLogits(nn.Module):
    """A second classifier that reads the first block as well."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.inner = module
        self.early: list[Tensor] = []
        module.blocks[0].register_forward_hook(lambda _m, _i, output: self.early.append(output))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inner(pixels) + self.inner.head(self.early.pop()[:, 0])


def test_a_classifier_that_reads_more_than_one_block_is_refused():
    module = AddedToLogits(timm_model("vit_tiny_patch16_224").module)
    model = vitlens.wrap(
        module,
        image_size=(32, 32),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        classes=tuple("abcde"),
        alias="early",
    )
    with pytest.raises(UnsupportedError):
        legrad(model)
