"""ROAD's curves against a plain loop."""

import pytest
import torch

from tests.analysis.linear import GRID, linear_model, worth
from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.imputation import imputed
from vitlens.analysis.faithfulness.masking import pixel_masks
from vitlens.analysis.faithfulness.road import road
from vitlens.errors import InputError


def test_the_curves_are_a_plain_loops():
    model, batch, targets = ours(), images((32, 48)), torch.tensor([1, 4])
    maps = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0))
    (found,) = road(model, batch, targets, [maps], shares=(0.25, 0.5))
    assert found.deletion.shares.tolist() == [0.25, 0.5]
    for curve, sign in ((found.deletion, 1), (found.least_first, -1)):
        for point, count in enumerate((3, 6)):
            gone = torch.zeros(2, 12, dtype=torch.bool)
            gone.scatter_(1, (sign * maps).flatten(1).topk(count, 1).indices, True)
            seen = imputed(batch, pixel_masks(gone, (4, 3), (32, 48)))
            with torch.no_grad():
                expected = model(seen).softmax(-1).gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(curve.probability[:, point], expected, atol=1e-4, rtol=1e-3)


def test_a_true_map_beats_its_opposite():
    model = linear_model()
    batch = images((16, 16), batch=4)
    truth = worth(model, batch)
    found, opposite = road(model, batch, torch.zeros(4, dtype=torch.long), [truth, -truth])
    assert found.gaps.mean() > 0.05
    torch.testing.assert_close(found.gaps, -opposite.gaps)
    assert GRID == (8, 8)


def test_wrong_calls():
    model, batch, targets = ours(), images((32, 48)), torch.tensor([1, 4])
    maps = torch.rand(2, 4, 3)
    for shares in ((1.0,), (-0.1, 0.5), ()):
        with pytest.raises(InputError, match="shares from 0 to below 1"):
            road(model, batch, targets, [maps], shares=shares)
