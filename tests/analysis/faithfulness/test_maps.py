"""Maps before any check: resolutions, faults, where their mass lies, and their agreement beside scipy's."""

import pytest
import torch
from scipy import stats

from vitlens.analysis.faithfulness.maps import (
    as_shares,
    enlarged,
    map_faults,
    map_iou,
    map_overlap,
    map_shares,
    on_grid,
    spearman,
    top_overlap,
    usable,
)

SIZE, GRID = (32, 48), (4, 6)


def drawn(count: int, *, seed: int = 0, grid: tuple[int, int] = GRID) -> torch.Tensor:
    return torch.randn(count, *grid, generator=torch.Generator().manual_seed(seed))


def test_maps_at_another_resolution():
    fine = torch.arange(16.0).view(1, 4, 4)
    assert torch.equal(on_grid(fine, (2, 2)), torch.tensor([[[2.5, 4.5], [10.5, 12.5]]]))
    assert on_grid(fine, (4, 4)) is fine
    coarse = torch.tensor([[[0.0, 1.0]]])
    assert torch.equal(enlarged(coarse, (1, 4)), torch.tensor([[[0.0, 0.25, 0.75, 1.0]]]))
    assert on_grid(torch.ones(2, 7, 3), (4, 8)).eq(1).all()


def test_faults_of_maps():
    maps = torch.rand(5, 2, 3)
    maps[1], maps[2], maps[3, 0, 0], maps[4, 1, 1] = 0.0, 0.7, torch.nan, torch.inf
    faults = map_faults(maps)
    assert faults.constant.tolist() == [False, True, True, False, False]
    assert faults.not_finite.tolist() == [False, False, False, True, True]
    assert faults.sound.tolist() == [True, False, False, False, False]
    assert faults.words == "2 of 5 not finite, 2 of 5 constant"
    assert map_faults(torch.rand(2, 3, 3)).words == ""
    assert not map_faults(1e-9 * torch.rand(2, 3, 3)).constant.any()  # small is not constant


def test_agreement():
    first, second = (drawn(4, seed=seed).round(decimals=1) for seed in (0, 1))  # with ties
    expected = [stats.spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(first.numpy(), second.numpy())]
    assert spearman(first, second).tolist() == pytest.approx(expected, abs=1e-6)
    assert spearman(first, first.exp()).tolist() == pytest.approx([1.0] * 4)  # ranks alone count
    assert spearman(first, torch.zeros(4, *GRID)).isnan().all()
    assert map_iou(first, first).tolist() == [1.0] * 4
    assert map_iou(first, -first).max() < 0.1
    rising = torch.arange(20.0).view(1, 4, 5)
    changed = rising.clone()
    changed[0, 3, 4] = -1  # the highest of the first is the lowest of the second
    assert top_overlap(rising, rising).tolist() == [1.0]
    assert top_overlap(rising, changed).tolist() == [0.5]
    fine = first.repeat_interleave(8, 1).repeat_interleave(8, 2)
    assert spearman(first, fine).tolist() == pytest.approx([1.0] * 4)  # two resolutions meet at the coarser


def test_shares_sum_to_one_and_leave_out_negative_values():
    maps = drawn(5)
    found = as_shares(maps, size=SIZE, grid=GRID)
    torch.testing.assert_close(found.sum((1, 2)), torch.ones(5).double())
    torch.testing.assert_close(found, as_shares(maps.clamp_min(0), size=SIZE, grid=GRID))


def test_an_even_map():
    """Made uneven by a little, or it would say nothing; of an image that the grid does not divide."""
    maps = torch.ones(1, *GRID)
    maps[0, 0, 0] += 1e-4
    found = map_shares(maps, size=(30, 47), grid=GRID, masks=torch.zeros(1, *SIZE, dtype=torch.bool))
    assert found.usable.all()
    for name, expected in (("half", 0.5), ("central", 0.25), ("row", 0.5), ("column", 0.5), ("inside", 0.0)):
        assert getattr(found, name).item() == pytest.approx(expected, abs=1e-3), name
    assert found.spread.item() == pytest.approx(((1 - 1 / 16) / 12 + 1.5**2 * (1 - 1 / 36) / 12) ** 0.5, abs=1e-3)


def test_a_single_cell_is_where_it_is():
    fine = torch.zeros(2, *SIZE)
    fine[0, 10, 30] = 1.0  # cell (1, 3) of 8 x 8 px
    fine[1, 0, 0], fine[1, 31, 47] = 1.0, 3.0
    masks = torch.zeros(2, *SIZE, dtype=torch.bool)
    masks[:, 8:16, 24:32] = True
    found = map_shares(fine, size=SIZE, grid=GRID, masks=masks)
    assert found.row.tolist() == pytest.approx([1.5 / 4, (0.5 + 3 * 3.5) / 16])
    assert found.column.tolist() == pytest.approx([3.5 / 6, (0.5 + 3 * 5.5) / 24])
    assert found.spread[0].item() == pytest.approx(0, abs=1e-6)
    assert found.half.tolist() == pytest.approx([0.5 / 24, (2 / 3) / 24])  # half of one cell, two thirds of the greater
    assert found.central.tolist() == pytest.approx([1.0, 0.0])
    assert found.inside.tolist() == pytest.approx([1.0, 0.0])


def test_overlap_of_two_models_maps():
    maps = drawn(3).abs()
    found = map_overlap(maps, maps, size=SIZE, grid=GRID)
    for name in ("spearman", "top", "shared"):
        torch.testing.assert_close(getattr(found, name), torch.ones(3).double())
    first, second = torch.zeros(1, *SIZE), torch.zeros(1, *SIZE)
    first[0, 2, 2], second[0, 28, 44] = 1.0, 1.0
    assert map_overlap(first, second, size=SIZE, grid=GRID).shared.item() == 0
    coarse = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    fine = torch.nn.functional.interpolate(coarse[None], size=(8, 8), mode="bilinear")[0]
    assert map_overlap(coarse, fine, size=(32, 32), grid=(8, 8)).shared.item() > 0.9


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, torch.nan, torch.inf])
def test_a_map_that_says_nothing_is_flagged(value):
    maps = torch.stack([torch.full(GRID, value), torch.rand(GRID)])
    if value != value or value == torch.inf:
        maps[0] = torch.rand(GRID)
        maps[0, 1, 1] = value
    assert usable(maps).tolist() == [False, True]
    found = map_shares(maps, size=SIZE, grid=GRID)
    assert [getattr(found, name)[0].item() for name in ("row", "half", "spread", "central")] == [0.0] * 4
    both = map_overlap(maps, torch.rand(2, *GRID), size=SIZE, grid=GRID)
    assert both.usable.tolist() == [False, True]
    assert (both.spearman[0], both.top[0], both.shared[0]) == (0, 0, 0)
