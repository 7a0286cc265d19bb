"""Our rollout beside vit-explain's (jacobgil/vit-explain, vit_rollout.py), its formula written out here."""

import torch
from torch import Tensor

from tests.analysis.attention.ways import product_by_matrices
from vitlens.analysis.attention.methods import discard_lowest, scaled_step


def vit_explain(attentions: list[Tensor]) -> Tensor:
    """Its loop for mean fusion without discard: all rows (batch, tokens, tokens)."""
    result = torch.eye(attentions[0].size(-1))
    for attention in attentions:
        fused = attention.mean(axis=1)
        a = (fused + 1.0 * torch.eye(fused.size(-1))) / 2
        a = a / a.sum(dim=-1)  # broadcast along the last axis: divides column j by the sum of row j
        result = torch.matmul(a, result)
    return result


def attentions(*, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 10, 10, generator=generator).mul(2).softmax(-1) for _ in range(4)]


def test_equal_on_rows_that_sum_to_one():
    layers = attentions()
    fused = [weights.mean(1) for weights in layers]
    for token in range(10):
        row = torch.eye(10)[[token]]
        for weights in reversed(fused):
            row = scaled_step(row, weights, 0.5)
        torch.testing.assert_close(row, vit_explain(layers)[:, token], atol=1e-6, rtol=1e-5)


def test_where_rows_do_not_sum_to_one_it_divides_columns_and_we_rows():
    layers = [discard_lowest(weights.mean(1), 0.5)[:, None] for weights in attentions()]
    ours = product_by_matrices([weights[:, 0] for weights in layers])
    theirs = vit_explain(layers)
    torch.testing.assert_close(ours.sum(-1), torch.ones(1, 10))
    assert (theirs.sum(-1) - 1).abs().max() > 0.01
    assert (ours - theirs).abs().max() > 0.005
