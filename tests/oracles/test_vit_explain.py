"""Our rollout beside vit-explain's (jacobgil/vit-explain, vit_rollout.py), its formula written out here."""

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.made import made_model, numbered, random_weights


def vit_explain(attentions: list[Tensor], discard: float) -> Tensor:
    """Its loop for mean fusion: the mask of the CLS row (batch, patches). It discards in the whole matrix of one image,
    but for the lowest place; here in every row, as we do."""
    result = torch.eye(attentions[0].size(-1))
    for attention in attentions:
        fused = attention.mean(axis=1)
        lowest = fused.clone()
        lowest[..., 0] = torch.inf  # CLS is kept
        count = int(fused.size(-1) * discard)
        if count:
            fused = fused.scatter(-1, lowest.topk(count, -1, False).indices, 0)
        a = (fused + 1.0 * torch.eye(fused.size(-1))) / 2
        a = a / a.sum(dim=-1)  # broadcast along the last axis: divides column j by the sum of row j
        result = torch.matmul(a, result)
    return result[:, 0, 1:]


@pytest.mark.parametrize("discard", [0.0, 0.5])
def test_equal_on_rows_that_sum_to_one_and_where_not_it_divides_columns_and_we_rows(discard):
    layers = [random_weights(1, 3, 10, seed=seed) for seed in range(4)]
    model = made_model(*layers, grid=(3, 3), prefix=1)
    ours = vitlens.rollout(model, numbered(model, 1), discard=discard, readout="cls").flatten(1)
    theirs = vit_explain(layers, discard)
    if discard == 0:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert ours.std() > 1e-3
    else:
        assert ours.sum() < 1  # the rest of a row that sums to one is on CLS
        assert (ours - theirs).abs().max() > 0.005
