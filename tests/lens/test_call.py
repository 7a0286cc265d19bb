"""AttentionCall and the door's function: masks, causality, grouped queries, masked rows, joined heads."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.call import AttentionCall, Scored, per_head
from vitlens.lens.site import Site, decide_kind
from vitlens.lens.tap import tapped


class Attends(nn.Module):
    """A module that calls F.scaled_dot_product_attention exactly as told; its child makes it no leaf."""

    num_heads = 4

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options
        self.value = nn.Identity()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, self.value(value), **self.options)


class Wrapped(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attn = Attends(**options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attn(query, key, value)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(query: Tensor, key: Tensor, value: Tensor, *, explicit: bool = False, **options: object):
    calls: list[AttentionCall] = []
    model = Wrapped(**options)
    with tapped(model, calls.append, explicit=explicit):
        output = model(query, key, value)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    return calls[0], output, expected


def triple(heads: int = 4, key_heads: int = 4, tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return random(2, heads, tokens, 8), random(2, key_heads, tokens, 8, seed=1), random(2, key_heads, tokens, 8, seed=2)


def softmax_by_hand(query: Tensor, key: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    """Element by element, from the definition: exp(score) over the allowed keys' sum."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1]) + bias
    exponentials = scores.exp() * allowed
    return exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-30)


BOOLEAN = random(6, 6, seed=3) > -0.5
ADDITIVE = random(1, 4, 6, 6, seed=4)
CASES = {
    "none": ({}, torch.ones(6, 6), torch.zeros(6, 6)),
    "boolean": ({"attn_mask": BOOLEAN}, BOOLEAN.float(), torch.zeros(6, 6)),
    "boolean per image": (
        {"attn_mask": torch.stack([BOOLEAN, ~BOOLEAN])[:, None]},
        torch.stack([BOOLEAN, ~BOOLEAN])[:, None].float(),
        torch.zeros(6, 6),
    ),
    "one row for all queries": ({"attn_mask": BOOLEAN[:1]}, BOOLEAN[:1].float(), torch.zeros(6, 6)),
    "additive": ({"attn_mask": ADDITIVE}, torch.ones(6, 6), ADDITIVE),
    "causal": ({"is_causal": True}, torch.ones(6, 6).tril(), torch.zeros(6, 6)),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_masks(case, explicit):
    options, allowed, bias = CASES[case]
    query, key, value = triple()
    call, output, expected = seen(query, key, value, explicit=explicit, **options)
    weights = softmax_by_hand(query, key, allowed, bias)
    torch.testing.assert_close(call.weights(), weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(call.rows((2, 0)), weights[..., (2, 0), :], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(call.weights() @ value, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(call.pick(1).weights(), weights[1:], atol=1e-6, rtol=1e-5)
    if explicit:
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    else:
        assert torch.equal(output, expected)


def test_a_row_that_is_masked_everywhere_is_zeros_and_has_a_finite_gradient():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[3] = False
    query, key, value = triple()
    for given in (mask, torch.zeros(6, 6).masked_fill(~mask, -torch.inf)):
        call, output, _ = seen(query.requires_grad_(), key, value, explicit=True, attn_mask=given)
        assert (call.weights()[:, :, 3] == 0).all()
        torch.testing.assert_close(call.weights().sum(-1)[:, :, (0, 1, 2, 4, 5)], torch.ones(2, 4, 5))
        assert torch.isfinite(torch.autograd.grad(output.sum(), query)[0]).all()


def test_grouped_queries_share_keys_in_order():
    query, key, value = triple(heads=4, key_heads=2)
    call, output, expected = seen(query, key, value, enable_gqa=True)
    assert torch.equal(output, expected)
    for head in range(4):
        own = (query[:, head] @ key[:, head // 2].transpose(-1, -2) / math.sqrt(8)).softmax(-1)
        torch.testing.assert_close(call.weights()[:, head], own, atol=1e-6, rtol=1e-5)


def test_a_scale_of_its_own():
    query, key, value = triple()
    call, _, _ = seen(query, key, value, scale=0.5)
    expected = (0.5 * query @ key.transpose(-1, -2)).softmax(-1)
    torch.testing.assert_close(call.weights(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("leading", [(8,), (2, 3, 4), (2, 4, 3)], ids=["joined", "windows first", "heads first"])
def test_other_layouts_of_the_axes(leading, explicit):
    """(batch x heads, ..), (batch, windows, heads, ..) and Hiera's (batch, heads, windows, ..), each with a mask."""
    query, key, value = (random(*leading, 6, 8, seed=seed) for seed in range(3))
    mask = random(*leading, 6, 6, seed=5) > -0.7
    calls: list[AttentionCall] = []
    options = {} if leading == (2, 4, 3) else {"attn_mask": mask}
    model = Wrapped(**options)
    plain = model(query, key, value)
    with tapped(model, calls.append, explicit=explicit):
        output = model(query, key, value)
    torch.testing.assert_close(output, plain, atol=1e-6, rtol=1e-5)
    expected = query @ key.transpose(-1, -2) / math.sqrt(8)
    if options:
        expected = expected.masked_fill(~mask, -torch.inf)
    expected = expected.softmax(-1).nan_to_num()
    if leading == (2, 4, 3):
        expected = expected.transpose(1, 2)
    torch.testing.assert_close(calls[0].weights(), expected.reshape(-1, 4, 6, 6), atol=1e-6, rtol=1e-5)
    assert calls[0].site.heads == 4


def test_per_head_joins_and_parts():
    assert per_head(torch.zeros(2, 3, 4, 5, 6)).shape == (6, 4, 5, 6)
    assert per_head(torch.zeros(8, 5, 6), 4).shape == (2, 4, 5, 6)
    assert per_head(torch.zeros(8, 5, 6), 3).shape == (8, 1, 5, 6)  # 8 is no multiple of 3 heads
    assert per_head(torch.zeros(2, 4, 5, 6)).shape == (2, 4, 5, 6)


def test_pick_takes_the_windows_of_an_image_and_its_bias():
    scored = Scored(*(random(6, 2, 5, 4, seed=seed) for seed in range(3)), random(6, 1, 5, 5, seed=9), 0.5)
    site = Site(0, "attn", 0, "window", 2, 5, 5)
    call = AttentionCall(site, 2, scored, None, random(6, 2, 5, 4, seed=7))
    assert torch.equal(call.pick(1).weights(), call.weights()[3:])
    assert torch.equal(call.pick(0).output, call.output[:3])
    made = AttentionCall(site, 2, None, call.weights())
    assert torch.equal(made.pick(1).weights(), call.weights()[3:])


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"calls": 1, "queries": 17, "keys": 17, "tokens": 17, "channels": False}, "patch"),
        ({"calls": 1, "queries": 17, "keys": 17, "tokens": 17, "channels": True}, "patch"),
        ({"calls": 4, "queries": 16, "keys": 16, "tokens": 16, "channels": False}, "window"),
        ({"calls": 1, "queries": 1, "keys": 17, "tokens": 17, "channels": False}, "class"),
        ({"calls": 1, "queries": 32, "keys": 32, "tokens": 196, "channels": True}, "channel"),
        ({"calls": 1, "queries": 196, "keys": 49, "tokens": 196, "channels": False}, "pooled"),
        ({"calls": 1, "queries": 49, "keys": 49, "tokens": 196, "channels": False}, "pooled"),
        ({"calls": 1, "queries": 1, "keys": 1, "tokens": 1, "channels": False}, "patch"),
    ],
)
def test_what_looks_at_what(shape, kind):
    assert decide_kind(**shape) == kind
