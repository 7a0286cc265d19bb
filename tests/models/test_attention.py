"""Attention from raw matrix products: against torch's own module and kernel, masks, dropout, symmetry."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.models.attention import MultiHeadSelfAttention, attention_weights, scaled_dot_product_attention

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 5, 4
DIM = HEADS * HEAD_DIM


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, BATCH, HEADS, TOKENS, HEAD_DIM, generator=generator)
    return query, key, value


def boolean_mask() -> Tensor:
    """True = take part; every query keeps itself."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(TOKENS, TOKENS, generator=generator) < 0.5) | torch.eye(TOKENS, dtype=torch.bool)


def additive_mask() -> Tensor:
    return torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))


MASKS = {"none": None, "boolean": boolean_mask(), "additive": additive_mask()}


def test_weights_are_the_formula_written_out(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, _ = qkv
    weights = attention_weights(query, key)
    scores = [float(query[1, 2, 3] @ key[1, 2, j]) / HEAD_DIM**0.5 for j in range(TOKENS)]
    exponentials = torch.tensor(scores, dtype=torch.float64).exp()
    torch.testing.assert_close(weights[1, 2, 3].double(), exponentials / exponentials.sum(), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, TOKENS))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("scale", [None, 0.3])
def test_output_is_the_fused_kernels(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, scale: float | None
) -> None:
    ours = scaled_dot_product_attention(*qkv, mask=mask, scale=scale)
    fused = F.scaled_dot_product_attention(*qkv, attn_mask=mask, scale=scale)
    torch.testing.assert_close(ours, fused, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, attention_weights(*qkv[:2], mask=mask, scale=scale) @ qkv[2])


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_fully_masked_row_is_zero_and_so_is_its_gradient(qkv: tuple[Tensor, Tensor, Tensor], kind: str) -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask[2] = False
    if kind == "additive":
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(~mask, -torch.inf)
    query, key, value = (tensor.clone().requires_grad_() for tensor in qkv)
    weights = attention_weights(query, key, mask=mask)
    assert (weights[:, :, 2] == 0).all()
    torch.testing.assert_close(weights[:, :, [0, 1, 3, 4]].sum(-1), torch.ones(BATCH, HEADS, 4))
    scaled_dot_product_attention(query, key, value, mask=mask).square().sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()
    assert (query.grad[:, :, 2] == 0).all()
    fused = F.scaled_dot_product_attention(*qkv, attn_mask=mask)
    torch.testing.assert_close(scaled_dot_product_attention(*qkv, mask=mask), fused, atol=1e-5, rtol=0)


def test_dropout_falls_on_the_weights() -> None:
    # with equal keys and the identity as values, twice, the output is the weights twice: each 1/tokens, or dropped;
    # dropout of the output instead would treat the two copies differently
    tokens, dropout = 64, 0.25
    equal = torch.zeros(1, 1, tokens, 8)
    twice = torch.eye(tokens).repeat(1, 2).view(1, 1, tokens, 2 * tokens)
    torch.manual_seed(0)
    weights, copy = scaled_dot_product_attention(equal, equal, twice, dropout=dropout).chunk(2, dim=-1)
    assert torch.equal(weights, copy)
    dropped = weights == 0
    torch.testing.assert_close(weights[~dropped], torch.full_like(weights[~dropped], 1 / tokens / (1 - dropout)))
    deviation = (dropout * (1 - dropout) / weights.numel()) ** 0.5
    assert abs(dropped.float().mean().item() - dropout) < 4 * deviation
    torch.manual_seed(0)
    again = scaled_dot_product_attention(equal, equal, twice, dropout=dropout)
    assert torch.equal(again, torch.cat((weights, copy), dim=-1))


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_is_for_training_alone(fused: bool) -> None:
    attention = MultiHeadSelfAttention(DIM, HEADS, dropout=0.5, projection_dropout=0.5, fused=fused)
    tokens = torch.randn(BATCH, TOKENS, DIM)
    assert not torch.equal(attention(tokens), attention(tokens))
    attention.eval()
    assert torch.equal(attention(tokens), attention(tokens))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("bias", [True, False])
def test_equals_torchs_module_for_copied_weights(fused: bool, mask: Tensor | None, bias: bool) -> None:
    torch.manual_seed(0)
    ours = MultiHeadSelfAttention(DIM, HEADS, qkv_bias=bias, fused=fused)
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=True, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias if bias else torch.zeros(3 * DIM))
        theirs.out_proj.weight.copy_(ours.proj.weight)
        theirs.out_proj.bias.copy_(ours.proj.bias)
    tokens = torch.randn(BATCH, TOKENS, DIM)
    opposite = ~mask if mask is not None and mask.dtype == torch.bool else mask  # there, True = leave out
    expected, weights = theirs(tokens, tokens, tokens, attn_mask=opposite, average_attn_weights=False)
    torch.testing.assert_close(ours(tokens, mask), expected, atol=1e-5, rtol=0)
    query, key, _ = ours.qkv(tokens).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(attention_weights(query, key, mask=mask), weights, atol=1e-5, rtol=0)


def test_fused_and_raw_have_equal_gradients() -> None:
    torch.manual_seed(0)
    attention = MultiHeadSelfAttention(DIM, HEADS)
    tokens = torch.randn(BATCH, TOKENS, DIM)
    gradients = []
    for fused in (True, False):
        attention.fused = fused
        attention.zero_grad()
        attention(tokens).square().sum().backward()
        gradients.append([parameter.grad for parameter in attention.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_attention_alone_is_permutation_equivariant() -> None:
    torch.manual_seed(0)
    attention = MultiHeadSelfAttention(DIM, HEADS)
    tokens, order = torch.randn(BATCH, TOKENS, DIM), torch.randperm(TOKENS)
    torch.testing.assert_close(attention(tokens[:, order]), attention(tokens)[:, order], atol=1e-6, rtol=0)


@pytest.mark.parametrize("heads", [0, 5])
def test_dim_that_heads_cannot_share_is_refused(heads: int) -> None:
    with pytest.raises(InputError, match=f"expected dim divisible by heads, found dim 12 and {heads} heads"):
        MultiHeadSelfAttention(12, heads)
