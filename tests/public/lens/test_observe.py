"""Observation: what it hands on, what it refuses, and that its gradients are those of attention written by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.lens import ATTENTIVE, MODELS, changed, module_paths, of
from tests.kit.models.handwritten import half
from tests.kit.tiny import images, model_of, ours, timm_model, with_kernel
from vitlens import AttentionCall, Model
from vitlens.errors import LensError, NonFiniteError, UnsupportedError

OurAttention = type(ours().module.blocks[0].attn)


class Unseen(nn.Module):
    """Attention that the lens does not see: weights from a plain normalisation, not from a softmax."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = (tokens @ tokens.mT).square()
        return self.project(scores / scores.sum(-1, keepdim=True) @ tokens)


class Lying(OurAttention):
    """Computes something else the second time."""

    times = 0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.times += 1
        return super().forward(tokens * self.times, mask)


class Infinite(OurAttention):
    """Scores that are not finite."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].mT
        scores[:, :, 0] = torch.nan
        return self.proj((F.softmax(scores, -1) @ qkv[2]).transpose(1, 2).flatten(2))


class Masked(OurAttention):
    """Lets one token attend to nothing."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        mask[4] = False
        return super().forward(tokens, mask)


class Mixing(OurAttention):
    """Attends to the other images of its batch."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(tokens + tokens.flip(0), mask)


def with_attention(attention: nn.Module) -> Model:
    model = ours()
    model.module.blocks[1].attn = attention.eval()
    return model


SPELLED = {
    "a method": lambda scores: scores.softmax(-1),
    "a method, the axis by name": lambda scores: scores.softmax(dim=3),
    "of torch": lambda scores: torch.softmax(scores, 3),
    "a function": lambda scores: F.softmax(scores, -1),
    "a module": nn.Softmax(dim=-1),
}


@pytest.mark.parametrize("softmax", SPELLED)
def test_a_softmax_is_seen_however_it_is_spelled(softmax):
    class Spelled(OurAttention):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            weights = SPELLED[softmax](query @ key.mT * query.shape[-1] ** -0.5)
            return self.proj((weights @ value).transpose(1, 2).flatten(2))

    model, batch = ours(), images((32, 48))
    expected = vitlens.attention(model, batch)
    model = ours()
    for block in model.module.blocks:
        block.attn.__class__ = Spelled
    for found, own in zip(vitlens.attention(model, batch), expected, strict=True):
        torch.testing.assert_close(found, own, atol=1e-6, rtol=1e-5)


def a_cnn() -> Model:
    return model_of(nn.Sequential(nn.Conv2d(3, 5, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(-1)))


REFUSED = {
    "missed": (lambda: with_attention(Unseen()), LensError, "blocks.1.attn"),
    "other logits": (lambda: with_attention(Lying(16, 2)), LensError, "unchanged under observation"),
    "not finite": (lambda: with_attention(Infinite(16, 2)), NonFiniteError, r"layer 1 \(blocks.1.attn\)"),
    "of the batch": (lambda: with_attention(Mixing(16, 2)), LensError, "others of its batch"),
    "no attention": (lambda: ours(attention=False), UnsupportedError, "found none"),
    "a cnn": (a_cnn, UnsupportedError, "found none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_self_check_refuses(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        vitlens.observe(model := make(), of(model), lambda _call: None)


def test_a_masked_row_passes_the_self_check():
    rows = vitlens.attention(with_attention(Masked(16, 2)), images((32, 48)))[1].sum(-1)
    assert (rows[:, :, 4] == 0).all()
    torch.testing.assert_close(rows[:, :, 5:], torch.ones_like(rows[:, :, 5:]))


def test_calls_come_in_order_with_the_heads_output():
    model, batch = ours(), images((32, 48))
    calls: list[AttentionCall] = []
    logits = vitlens.observe(model, batch, calls.append)
    assert torch.equal(logits, changed(model, batch, {}))
    sites = [(call.site.layer, call.site.module, call.site.part, call.site.kind) for call in calls]
    assert sites == [(0, "blocks.0.attn", 0, "patch"), (1, "blocks.1.attn", 0, "patch")]
    entered = vitlens.capture(model, batch, "blocks.*.attention").values()
    for call, block, output in zip(calls, model.module.blocks, entered):
        torch.testing.assert_close(call.weights() @ call.inputs.value, call.output, atol=1e-5, rtol=1e-5)
        joined = call.output.transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attn.proj(joined), output, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_what_reads_places_around_an_observation_sees_what_it_sees(name, explicit):
    model = MODELS[name]()
    batch, outer, inner = of(model), [], []
    alone = vitlens.attention(model, batch)

    def keep(weights: Tensor) -> Tensor:
        outer.append(weights.detach())
        return weights

    with vitlens.intervene(model, {"blocks.*.attention.weights": keep}):
        outer.clear()
        logits = vitlens.observe(model, batch, lambda call: inner.append(call.weights()), explicit=explicit)
    torch.testing.assert_close(logits.detach(), changed(model, batch, {}), atol=1e-5, rtol=1e-5)
    for seen, also, expected in zip(outer, inner, alone, strict=True):
        torch.testing.assert_close(seen.flatten(0, -4), expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(also.detach(), expected, atol=1e-6, rtol=1e-5)


def test_another_model_can_be_observed_from_within_a_reducer():
    outside, inside = ours(), timm_model("vit_tiny_patch16_224")
    found: list[int] = []
    vitlens.observe(outside, images((32, 48)), lambda _call: found.append(len(vitlens.attention(inside, images()))))
    assert found == [2, 2]


READ = {
    "attention": vitlens.attention,
    "observe": lambda model, batch: vitlens.observe(model, batch, lambda _: None),
    "relevance": vitlens.relevance,
    "rollout": vitlens.rollout,
    "explorer": vitlens.explorer,
    "statistics": vitlens.statistics,
    "best": lambda model, batch: vitlens.explain(model, batch, method="best"),
    "legrad": lambda model, batch: vitlens.explain(model, batch, method="legrad"),
    "walkthrough": lambda model, batch: vitlens.walkthrough(model, batch[:1]),
}
DIFFERENTIAL = {
    "sequential": partial(timm_model, "vit_dwee_patch16_reg1_gap_256"),
    "parallel": partial(timm_model, "vit_dpwee_patch16_reg1_gap_256"),
}
# by content and by position, two calls in a layer; CLS comes in later
CONVIT = {"convit": partial(timm_model, "convit_tiny", local_up_to_layer=1)}


def differential(blocks: str, *, fused: bool = True, wrapped: bool = False) -> Model:
    """A tiny ViT of two blocks, each of whose heads subtracts one softmax from another; ConViT's adds two."""
    model = with_kernel((DIFFERENTIAL | CONVIT)[blocks](), fused=fused)
    return half(model.module, 32) if wrapped else model


@pytest.mark.parametrize(
    ("read", "blocks", "fused", "wrapped"),
    [
        *((read, "sequential", True, False) for read in READ),
        *((read, "convit", True, False) for read in ("attention", "rollout", "statistics")),
        *(("attention", *form) for form in (("sequential", False, True), ("parallel", True, False))),
        *(("attention", *form) for form in (("sequential", True, True), ("parallel", False, True))),
    ],
)
def test_a_difference_of_softmaxes_is_not_read_as_either(read, blocks, fused, wrapped):
    with pytest.raises(UnsupportedError, match=r"one softmax|side by side|has, found"):
        READ[read](differential(blocks, fused=fused, wrapped=wrapped), images())


@pytest.mark.parametrize("blocks", DIFFERENTIAL)
def test_heads_of_a_difference_are_those_that_the_projection_reads(blocks):
    """Replaced by zero, a head is as if its columns were zero; of the four softmaxes of two heads, none is a head."""
    model, batch = differential(blocks), images()
    projection = model.module.get_submodule(module_paths(model, 1)[1])
    found = changed(model, batch, {"blocks.1.head.1": "zero"})
    projection.weight[:, projection.in_features // 2 :] = 0
    torch.testing.assert_close(found, changed(model, batch, {}))
    with pytest.raises(UnsupportedError, match="expected heads"):
        vitlens.ablate(differential(blocks, fused=False), batch, "predicted")
