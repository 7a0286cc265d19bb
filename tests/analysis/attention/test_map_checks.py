"""analysis/attention/map_checks.py: identities on maps whose information is known."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from vitlens.analysis.attention.map_checks import alike, fixed_share, map_bits


def noise(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 4, 5, generator=torch.Generator().manual_seed(seed))


def test_information_is_log2_of_the_patches_for_one_and_zero_for_all() -> None:
    one, half = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    one[0, 1, 2], half[0, :2] = 3.0, 1.0
    assert map_bits(one).item() == pytest.approx(4)
    assert map_bits(half).item() == pytest.approx(1)
    assert map_bits(torch.full((1, 4, 4), 0.2)).item() == pytest.approx(0, abs=1e-12)
    assert map_bits(torch.zeros(1, 4, 4)).item() == 0
    expected = [math.log2(20) - stats.entropy(each.flatten().double().numpy(), base=2) for each in noise(3)]
    np.testing.assert_allclose(map_bits(7 * noise(3)).numpy(), expected, atol=1e-6)


def test_equal_maps_are_fixed_and_maps_at_random_places_are_not() -> None:
    same = torch.zeros(40, 6, 6)
    same[:, 0, 0] = 1
    assert fixed_share(same).min() > 0.95  # but for the weight of one image
    placed = torch.zeros(40, 36)
    placed[torch.arange(40), torch.randint(36, (40,), generator=torch.Generator().manual_seed(0))] = 1
    assert fixed_share(placed.view(40, 6, 6)).mean() < 0.1
    assert fixed_share(torch.full((5, 4, 4), 0.1)).tolist() == [0] * 5


def test_heads_are_alike_where_their_maps_are() -> None:
    maps = torch.stack((noise(2), noise(2, seed=1), noise(2, seed=2)), 1)
    flat = maps.flatten(2)
    pairs = torch.stack(
        [F.cosine_similarity(flat[:, a], flat[:, b], dim=1).double() for a, b in ((0, 1), (0, 2), (1, 2))]
    )
    assert torch.allclose(alike(maps), pairs.mean(0))
    assert alike(maps[:, :1].expand(-1, 4, -1, -1)).tolist() == pytest.approx([1, 1])
    assert alike(maps[:, :1]).tolist() == [1, 1]
