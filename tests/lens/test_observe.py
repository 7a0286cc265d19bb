"""Observation: what it hands on, what it refuses, and that its gradients are those of attention written by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.lens.oracles import ATTENTIVE, MODELS
from tests.lens.tiny import CLASSES, images, model_of, ours, timm_model, torchvision_vit
from vitlens.errors import LensError, NonFiniteError, UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observe, observing, require_one_softmax
from vitlens.lens.trace import layers
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model


@pytest.mark.parametrize("make", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224"), torchvision_vit])
def test_rows_are_the_rows_of_all_weights(make):
    model = make()
    batch = images(model.input_size)
    everything = capture_attention(model, batch)
    for rows in ((0,), (3, 1)):
        few = capture_attention(model, batch, rows=rows)
        assert torch.equal(few.logits, everything.logits)
        for some, all_ in zip(few.layers, everything.layers):
            torch.testing.assert_close(some, all_[:, :, list(rows)], atol=1e-6, rtol=0)


def test_shapes_of_pooling_queries_and_of_the_smallest_model():
    """A pooling query has one row, whatever is asked."""
    pooled = capture_attention(timm_model("cait_xxs24_224"), images(), rows=(2,)).layers
    assert [layer.shape for layer in pooled] == [(2, 2, 1, 16)] * 2 + [(2, 2, 1, 17)] * 2
    captured = capture_attention(ours(heads=1, depth=1), torch.full((1, 3, 32, 48), 0.5))
    assert [layer.shape for layer in captured.layers] == [(1, 1, 13, 13)]
    assert captured.logits.shape == (1, len(CLASSES))


class Tampered(nn.Module):
    """Our attention by hand, with a known change added to the weights of one layer."""

    def __init__(self, attention: MultiHeadSelfAttention, change: Tensor) -> None:
        super().__init__()
        self.attention, self.change = attention, change

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.attention.qkv(tokens).unflatten(-1, (3, self.attention.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) + self.change
        return self.attention.proj((weights @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("layer", [0, 1])
def test_gradients_are_those_of_attention_written_by_hand(layer):
    """Also inside no_grad, and the images are left alone."""
    model, batch = ours(), images((32, 48))
    before = batch.clone()
    with torch.no_grad():
        explicit = capture_attention(model, batch, explicit=True)
    assert torch.equal(batch, before)
    assert not batch.requires_grad
    gradient = torch.autograd.grad(explicit.logits[:, 2].sum(), explicit.layers[layer])[0]
    change = torch.zeros_like(gradient, requires_grad=True)
    block = model.module.blocks[layer]
    block.attn = Tampered(block.attn, change)
    expected = torch.autograd.grad(model(batch)[:, 2].sum(), change)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


class Linear(nn.Module):
    """Attention that the lens does not see: weights from a plain normalisation, not from a softmax."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = (tokens @ tokens.mT).square()
        return self.project(scores / scores.sum(-1, keepdim=True) @ tokens)


class Lying(MultiHeadSelfAttention):
    """Computes something else the second time."""

    times = 0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.times += 1
        return super().forward(tokens * self.times, mask)


class Infinite(MultiHeadSelfAttention):
    """Scores that are not finite."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].mT
        scores[:, :, 0] = torch.nan
        return self.proj((F.softmax(scores, -1) @ qkv[2]).transpose(1, 2).flatten(2))


def with_attention(attention: nn.Module) -> Model:
    model = ours()
    model.module.blocks[1].attn = attention.eval()
    return model


def cnn() -> Model:
    return model_of(nn.Sequential(nn.Conv2d(3, 5, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(-1)))


REFUSED = {
    "missed": (lambda: with_attention(Linear()), LensError, r"none from 1 \(first 'blocks.1.attn'\)"),
    "other logits": (lambda: with_attention(Lying(16, 2)), LensError, "unchanged under observation"),
    "not finite": (lambda: with_attention(Infinite(16, 2)), NonFiniteError, r"layer 1 \(blocks.1.attn\)"),
    "no attention": (lambda: ours(attention=False), UnsupportedError, "in the forward pass of .*found none"),
    "a cnn": (cnn, UnsupportedError, "in the forward pass of .*found none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_self_check_refuses(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        observe(model := make(), images(model.input_size), lambda _call: None)


class Masked(MultiHeadSelfAttention):
    """Lets one token attend to nothing."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        mask[4] = False
        return super().forward(tokens, mask)


def test_a_masked_row_passes_the_self_check():
    rows = capture_attention(with_attention(Masked(16, 2)), images((32, 48))).layers[1].sum(-1)
    assert (rows[:, :, 4] == 0).all()
    torch.testing.assert_close(rows[:, :, 5:], torch.ones_like(rows[:, :, 5:]))


def test_calls_come_in_order_with_the_heads_output():
    model, batch = ours(), images((32, 48))
    calls: list[AttentionCall] = []
    observe(model, batch, calls.append)
    sites = [(call.site.layer, call.site.module, call.site.part) for call in calls]
    assert sites == [(0, "blocks.0.attn", 0), (1, "blocks.1.attn", 0)]
    seen = []
    model.module.blocks[1].attn.register_forward_hook(lambda _m, _i, output: seen.append(output))
    model(batch)
    for call in calls:
        torch.testing.assert_close(call.weights() @ call.inputs.value, call.output, atol=1e-5, rtol=1e-5)
    joined = calls[1].output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(model.module.blocks[1].attn.proj(joined), seen[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_nested_observations_both_see_everything(name, explicit):
    model = MODELS[name]()
    batch = images(model.input_size)
    alone = capture_attention(model, batch)
    outer: list[tuple[str, Tensor]] = []
    with observing(model, lambda call: outer.append((call.site.module, call.weights()))):
        inner = capture_attention(model, batch, explicit=explicit)
    torch.testing.assert_close(inner.logits.detach(), alone.logits, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in outer] == [site.module for site in inner.sites] == [site.module for site in alone.sites]
    for (_, seen), also, expected in zip(outer, inner.layers, alone.layers):
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(also.detach(), expected, atol=1e-6, rtol=1e-5)


def test_another_model_can_be_observed_from_within_a_reducer():
    outside, inside = ours(), timm_model("vit_tiny_patch16_224")
    found: list[int] = []
    observe(outside, images((32, 48)), lambda _call: found.append(len(capture_attention(inside, images()).layers)))
    assert found == [2, 2]


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
DIFFERENTIAL = {"sequential": "vit_dwee_patch16_reg1_gap_256", "parallel": "vit_dpwee_patch16_reg1_gap_256"}


def differential(blocks: str, *, fused: bool = True, wrapped: bool = False) -> Model:
    """A tiny ViT of two blocks, each of whose heads subtracts one softmax from another."""
    model = timm_model(DIFFERENTIAL[blocks])
    for module in model.module.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return vitlens.wrap(model.module, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3) if wrapped else model


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("blocks", DIFFERENTIAL)
def test_a_difference_of_softmaxes_is_not_read_as_either(blocks, fused, wrapped):
    for read in READ.values() if blocks == "sequential" else [vitlens.attention]:
        with pytest.raises(UnsupportedError, match=r"one softmax|side by side|has, found"):
            read(differential(blocks, fused=fused, wrapped=wrapped), images())


@pytest.mark.parametrize("blocks", DIFFERENTIAL)
def test_heads_of_a_difference_are_those_that_the_projection_reads(blocks):
    """Replaced by zero, a head is as if its columns were zero; of the four softmaxes of two heads, none is a head."""
    model, batch = differential(blocks), images()
    projection = model.module.get_submodule(model.anatomy.parts[layers(model)[1].attention].projection)
    with torch.no_grad():
        with vitlens.intervene(model, {"blocks.1.head.1": "zero"}):
            found = model(batch)
        projection.weight[:, projection.in_features // 2 :] = 0
        torch.testing.assert_close(found, model(batch))
    with pytest.raises(UnsupportedError, match="expected heads"):
        vitlens.ablate(differential(blocks, fused=False), batch, "predicted")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cait_xxs24_224", "eva02_tiny_patch14_224"])
def test_one_softmax_is_found_to_be_one(name):
    require_one_softmax(timm_model(name), images())
