"""Agreement of maps against scipy and by hand."""

import pytest
import torch
from scipy import stats

from vitlens.analysis.faithfulness.maps import map_iou, spearman, top_overlap
from vitlens.errors import InputError


def two(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, 5, 6, generator=generator).round(decimals=1) for _ in range(2))  # type: ignore[return-value]


def test_spearman_is_scipys():
    first, second = two()
    expected = [stats.spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(first.numpy(), second.numpy())]
    assert spearman(first, second).tolist() == pytest.approx(expected, abs=1e-6)


def test_a_map_agrees_with_itself_and_not_with_its_opposite():
    first, _ = two()
    assert spearman(first, first).tolist() == pytest.approx([1.0] * 4)
    assert spearman(first, first.exp()).tolist() == pytest.approx([1.0] * 4)  # ranks alone count
    assert spearman(first, -first).tolist() == pytest.approx([-1.0] * 4)
    assert top_overlap(first, first).tolist() == [1.0] * 4
    assert map_iou(first, first).tolist() == [1.0] * 4
    assert map_iou(first, -first).max() < 0.05


def test_a_constant_map_has_no_correlation():
    first, _ = two()
    assert spearman(first, torch.zeros(4, 5, 6)).isnan().all()


def test_overlap_by_hand():
    first = torch.arange(20.0).view(1, 4, 5)
    second = first.clone()
    second[0, 3, 4] = -1  # the highest of the first is the lowest of the second
    assert top_overlap(first, second).tolist() == [0.5]


def test_two_resolutions_meet_at_the_coarser():
    coarse = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    fine = coarse.repeat_interleave(8, 1).repeat_interleave(8, 2)
    assert spearman(coarse, fine).tolist() == pytest.approx([1.0] * 3)
    with pytest.raises(InputError, match="same images"):
        spearman(coarse, fine[:2])
