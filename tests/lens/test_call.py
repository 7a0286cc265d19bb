"""AttentionCall, and nn.MultiheadAttention by its formula: masks, causality, grouped queries, joined heads."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionCall, AttentionInputs
from vitlens.lens.observe import observing
from vitlens.lens.site import Site, decide_kind

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


class Attends(nn.Module):
    """A module that calls F.scaled_dot_product_attention exactly as told; its child makes it no leaf."""

    num_heads = 4

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options
        self.value = nn.Identity()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, self.value(value), **self.options)


class Holds(nn.Module):
    """A model of one attention layer."""

    def __init__(self, attn: nn.Module, **options: object) -> None:
        super().__init__()
        self.attn, self.options = attn, options

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.attn(*tensors, **self.options)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(model: nn.Module, *tensors: Tensor, explicit: bool = False) -> tuple[AttentionCall, object]:
    calls: list[AttentionCall] = []
    with observing(model, calls.append, explicit=explicit):
        output = model(*tensors)
    assert len(calls) == 1
    return calls[0], output


def triple() -> tuple[Tensor, Tensor, Tensor]:
    return random(2, 4, 6, 8), random(2, 4, 6, 8, seed=1), random(2, 4, 6, 8, seed=2)


BOOLEAN = random(6, 6, seed=3) > -0.5
PER_IMAGE = torch.stack([BOOLEAN, ~BOOLEAN])[:, None]
ADDITIVE = random(1, 4, 6, 6, seed=4)
CASES = {  # options, which keys take part, bias, scale
    "none": ({}, torch.ones(6, 6), 0.0, 8**-0.5),
    "boolean": ({"attn_mask": BOOLEAN}, BOOLEAN, 0.0, 8**-0.5),
    "boolean per image": ({"attn_mask": PER_IMAGE}, PER_IMAGE, 0.0, 8**-0.5),
    "one row for all queries": ({"attn_mask": BOOLEAN[:1]}, BOOLEAN[:1], 0.0, 8**-0.5),
    "additive": ({"attn_mask": ADDITIVE}, torch.ones(6, 6), ADDITIVE, 8**-0.5),
    "causal": ({"is_causal": True}, torch.ones(6, 6).tril(), 0.0, 8**-0.5),
    "a scale of its own": ({"scale": 0.5}, torch.ones(6, 6), 0.0, 0.5),
    "grouped": ({"enable_gqa": True}, torch.ones(6, 6), 0.0, 8**-0.5),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_definition(case, explicit):
    """exp(score) over the sum of the allowed keys."""
    options, allowed, bias, scale = CASES[case]
    query, key, value = triple()
    given = (key[:, ::2], value[:, ::2]) if case == "grouped" else (key, value)
    if case == "grouped":  # two queries share a key, in order
        key, value = (each[:, [0, 0, 2, 2]] for each in (key, value))
    call, output = seen(Holds(Attends(**options)), query, *given, explicit=explicit)
    exponentials = (torch.einsum("bhqd,bhkd->bhqk", query, key) * scale + bias).exp() * allowed
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-30)
    expected = F.scaled_dot_product_attention(query, *given, **options)
    torch.testing.assert_close(call.weights(), weights, **CLOSE)
    torch.testing.assert_close(call.rows((2, 0)), weights[..., (2, 0), :], **CLOSE)
    torch.testing.assert_close(call.weights() @ value, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(call.pick(1).weights(), weights[1:], **CLOSE)
    torch.testing.assert_close(output, expected, **CLOSE)
    assert explicit or torch.equal(output, expected)


def test_a_row_that_is_masked_everywhere_is_zeros_and_has_a_finite_gradient():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[3] = False
    query, key, value = triple()
    for given in (mask, torch.zeros(6, 6).masked_fill(~mask, -torch.inf)):
        call, output = seen(Holds(Attends(attn_mask=given)), query.requires_grad_(), key, value, explicit=True)
        assert (call.weights()[:, :, 3] == 0).all()
        torch.testing.assert_close(call.weights().sum(-1)[:, :, (0, 1, 2, 4, 5)], torch.ones(2, 4, 5))
        assert torch.isfinite(torch.autograd.grad(output.sum(), query)[0]).all()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("leading", [(8,), (2, 3, 4), (2, 4, 3)], ids=["joined", "windows first", "heads first"])
def test_other_layouts_of_the_axes(leading, explicit):
    """(batch x heads, ..), (batch, windows, heads, ..) and Hiera's (batch, heads, windows, ..), each with a mask."""
    query, key, value = (random(*leading, 6, 8, seed=seed) for seed in range(3))
    mask = random(*leading, 6, 6, seed=5) > -0.7
    hiera = leading == (2, 4, 3)
    model = Holds(Attends(**({} if hiera else {"attn_mask": mask})))
    call, output = seen(model, query, key, value, explicit=explicit)
    torch.testing.assert_close(output, model(query, key, value), **CLOSE)
    scores = query @ key.transpose(-1, -2) * 8**-0.5
    weights = (scores if hiera else scores.masked_fill(~mask, -torch.inf)).softmax(-1).nan_to_num()
    weights = weights.transpose(1, 2) if hiera else weights
    torch.testing.assert_close(call.weights(), weights.reshape(-1, 4, 6, 6), **CLOSE)
    assert call.site.heads == 4


def test_pick_takes_the_windows_of_an_image_and_its_bias():
    scored = AttentionInputs(*(random(6, 2, 5, 4, seed=seed) for seed in range(3)), random(6, 1, 5, 5, seed=9), 0.5)
    site = Site(0, "attn", 0, "window", 2, 5, 5)
    call = AttentionCall(site, 2, scored, None, random(6, 2, 5, 4, seed=7))
    assert torch.equal(call.pick(1).weights(), call.weights()[3:])
    assert torch.equal(call.pick(0).output, call.output[:3])
    assert torch.equal(AttentionCall(site, 2, None, call.weights()).pick(1).weights(), call.weights()[3:])


@pytest.mark.parametrize(
    ("calls", "queries", "keys", "tokens", "channels", "kind"),
    [
        (1, 17, 17, 17, False, "patch"),
        (1, 17, 17, 17, True, "patch"),
        (4, 16, 16, 16, False, "window"),
        (1, 1, 17, 17, False, "class"),
        (1, 32, 32, 196, True, "channel"),
        (1, 196, 49, 196, False, "pooled"),
        (1, 49, 49, 196, False, "pooled"),
        (1, 1, 1, 1, False, "patch"),
    ],
)
def test_what_attends_to_what(calls, queries, keys, tokens, channels, kind):
    assert decide_kind(calls=calls, queries=queries, keys=keys, tokens=tokens, channels=channels) == kind


MASKS = {
    "none": None,
    "boolean": random(5, 5, seed=3) > 0.5,
    "additive": random(5, 5, seed=3),
    "per head": random(2 * 4, 5, 5, seed=3) > 0.8,
}


@pytest.mark.parametrize("itself", [True, False])  # then its projections are one product
@pytest.mark.parametrize(("bias", "batch_first"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention_has_its_own_output_and_weights(mask, average, bias, batch_first, itself):
    torch.manual_seed(0)
    options = {"attn_mask": MASKS[mask], "average_attn_weights": average}
    model = Holds(nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first), **options).eval()
    query, key = random(2, 5, 16), random(2, 5, 16, seed=1)
    query, key = (query, key) if batch_first else (query.transpose(0, 1), key.transpose(0, 1))
    key = query if itself else key
    output, weights = model(query, key, key)
    call, (observed, returned) = seen(model, query, key, key)
    torch.testing.assert_close(observed, output, **CLOSE)
    torch.testing.assert_close(returned, weights, **CLOSE)
    torch.testing.assert_close(call.weights().mean(1) if average else call.weights(), weights, **CLOSE)
    assert (call.site.module, call.site.heads) == ("attn", 4)


class Direct(nn.Module):
    """Calls torch's function itself, whose boolean mask says who is left out (the module turns it into numbers)."""

    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(16, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        projections = (self.own.in_proj_weight, self.own.in_proj_bias, None, None, False, 0.0)
        out = (self.own.out_proj.weight, self.own.out_proj.bias)
        function, options = F.multi_head_attention_forward, {"need_weights": False, "attn_mask": mask}
        return function(tokens, tokens, tokens, 16, 4, *projections, *out, training=False, **options)[0]


def test_the_function_called_with_a_boolean_mask():
    model, tokens, mask = Holds(Direct()).eval(), random(5, 5, 16), random(5, 5, seed=3) > 0.5
    call, output = seen(model, tokens, mask)
    torch.testing.assert_close(output, model(tokens, mask), **CLOSE)
    assert (call.weights()[..., mask] == 0).all()


def test_added_keys_are_refused():
    model = Holds(nn.MultiheadAttention(16, 4, add_bias_kv=True, batch_first=True)).eval()
    with pytest.raises(UnsupportedError, match="added keys"):
        seen(model, *[random(2, 5, 16)] * 3)
