"""The attention of our models against torch's own module: fused and by matrix products, masks, dropout, gradients."""

import pytest
import torch
from torch import Tensor, nn

from tests.kit.tiny import ours

TOKENS, DIM, HEADS = 5, 12, 3
DRAWN = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
EMPTY = torch.ones(TOKENS, TOKENS, dtype=torch.bool).index_fill(0, torch.tensor([2]), value=False)
BOOLEAN = (DRAWN < 0.5) | torch.eye(TOKENS, dtype=torch.bool)  # True = take part


def attention(*, fused: bool = False, **options: object) -> nn.Module:
    return ours(fused=fused, dim=DIM, heads=HEADS, **options).module.blocks[0].attn


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("fused", "bias", "mask"),
    [(True, False, BOOLEAN), (True, True, DRAWN), (False, True, BOOLEAN), (False, False, DRAWN)],
    ids=range(4),
)
def test_output_and_gradients_are_those_of_torchs_module(fused: bool, bias: bool, mask: Tensor):
    own = attention(fused=fused, qkv_bias=bias).requires_grad_(True)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(own.qkv.weight)
        theirs.in_proj_bias.copy_(own.qkv.bias if bias else torch.zeros(3 * DIM))
        theirs.out_proj.load_state_dict(own.proj.state_dict())
    opposite = ~mask if mask.dtype == torch.bool else mask  # there, True = leave out
    expected, found = theirs(*[tokens()] * 3, attn_mask=opposite)[0], own(tokens(), mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own.qkv.weight.grad, theirs.in_proj_weight.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own.proj.weight.grad, theirs.out_proj.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", [EMPTY, torch.zeros(TOKENS, TOKENS).masked_fill(~EMPTY, -torch.inf)])
def test_a_token_that_may_attend_to_nothing_reads_nothing_and_has_no_gradient(mask: Tensor):
    own, given = attention().requires_grad_(True), tokens().requires_grad_()
    found = own(given, mask)
    torch.testing.assert_close(found[:, 2], own.proj.bias.expand(2, -1))
    torch.testing.assert_close(found, attention(fused=True)(given, mask), atol=1e-5, rtol=0)
    found[:, 2].sum().backward()
    assert not given.grad.any()  # and no NaN
    own(given, mask).square().sum().backward()
    assert given.grad.isfinite().all()


def test_dropout_falls_on_the_weights():
    """With equal keys and one-hot values, twice, the output is the weights twice: each 1/tokens, or dropped; dropout of
    the output instead would treat the two copies differently."""
    count, dropout = 64, 0.25
    own = ours(dim=2 * count, heads=1, attention_dropout=dropout, fused=False).module.blocks[0].attn.train()
    for parameter in own.parameters():
        parameter.zero_()
    own.qkv.weight.view(3, 2 * count, 2 * count)[2, :, :count] = torch.eye(count).repeat(2, 1)
    own.proj.weight.copy_(torch.eye(2 * count))
    one_hot = torch.cat((torch.eye(count), torch.zeros(count, count)), dim=1)[None]
    torch.manual_seed(0)
    weights, twice = own(one_hot).chunk(2, dim=-1)
    assert torch.equal(weights, twice)
    dropped = weights == 0
    torch.testing.assert_close(weights[~dropped], torch.full_like(weights[~dropped], 1 / count / (1 - dropout)))
    assert dropped.float().mean().item() == pytest.approx(dropout, abs=4 * (dropout * (1 - dropout) / count**2) ** 0.5)
    torch.testing.assert_close(own.eval()(one_hot)[..., :count], torch.full((1, count, count), 1 / count))
