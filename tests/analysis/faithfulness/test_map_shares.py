import pytest
import torch

from vitlens.analysis.faithfulness.maps import as_shares, map_overlap, map_shares, usable
from vitlens.errors import InputError

SIZE, GRID = (32, 48), (4, 6)


def one_cell(row: int, column: int) -> torch.Tensor:
    maps = torch.zeros(1, *GRID)
    maps[0, row, column] = 3.0
    return maps


def test_shares_sum_to_one_and_leave_out_what_speaks_against():
    maps = torch.randn(5, *GRID, generator=torch.Generator().manual_seed(0))
    found = as_shares(maps, size=SIZE, grid=GRID)
    torch.testing.assert_close(found.sum((1, 2)), torch.ones(5).double())
    torch.testing.assert_close(found, as_shares(maps.clamp_min(0), size=SIZE, grid=GRID))


def test_an_even_map():
    """Made even by a millionth, or it would say nothing."""
    maps = torch.ones(1, *GRID)
    maps[0, 0, 0] += 1e-4
    found = map_shares(maps, size=SIZE, grid=GRID, masks=torch.zeros(1, *SIZE, dtype=torch.bool))
    assert found.usable.all()
    for name, expected in (("half", 0.5), ("central", 0.25), ("row", 0.5), ("column", 0.5), ("inside", 0.0)):
        assert getattr(found, name).item() == pytest.approx(expected, abs=1e-3), name


def test_a_single_cell_is_where_it_is():
    fine = torch.zeros(1, *SIZE)
    fine[0, 10, 30] = 1.0  # cell (1, 3) of 8 x 8 px
    masks = torch.zeros(1, *SIZE, dtype=torch.bool)
    masks[0, 8:16, 24:32] = True
    found = map_shares(fine, size=SIZE, grid=GRID, masks=masks)
    assert found.row.item() == pytest.approx(1.5 / 4)
    assert found.column.item() == pytest.approx(3.5 / 6)
    assert found.spread.item() == pytest.approx(0, abs=1e-6)
    assert found.half.item() == pytest.approx(0.5 / 24)  # half of one of 24 cells
    assert (found.central.item(), found.inside.item()) == pytest.approx((1.0, 1.0))


def test_half_of_two_unequal_cells():
    maps = torch.zeros(1, *SIZE)
    maps[0, 0, 0], maps[0, 31, 47] = 1.0, 3.0
    found = map_shares(maps, size=SIZE, grid=GRID)
    assert found.half.item() == pytest.approx((2 / 3) / 24)  # two thirds of the greater cell
    assert found.spread.item() > 0.5


def test_a_map_and_itself_share_everything():
    maps = torch.rand(3, *GRID, generator=torch.Generator().manual_seed(1))
    found = map_overlap(maps, maps, size=SIZE, grid=GRID)
    for name in ("spearman", "top", "shared"):
        torch.testing.assert_close(getattr(found, name), torch.ones(3).double())
    turned = map_overlap(maps, -maps + 1, size=SIZE, grid=GRID)
    torch.testing.assert_close(turned.spearman, -torch.ones(3).double())


def test_maps_apart_share_nothing():
    first, second = torch.zeros(1, *SIZE), torch.zeros(1, *SIZE)
    first[0, 2, 2], second[0, 28, 44] = 1.0, 1.0
    assert map_overlap(first, second, size=SIZE, grid=GRID).shared.item() == 0


def test_maps_of_two_resolutions():
    coarse = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    fine = torch.nn.functional.interpolate(coarse[None], size=(8, 8), mode="bilinear")[0]
    found = map_overlap(coarse, fine, size=(32, 32), grid=(8, 8))
    assert found.shared.item() > 0.9
    assert found.spearman.item() > 0.7


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, torch.nan, torch.inf])
def test_a_map_that_says_nothing_is_flagged(value):
    maps = torch.stack([torch.full(GRID, value), torch.rand(GRID)])
    if value != value or value == torch.inf:
        maps[0] = torch.rand(GRID)
        maps[0, 1, 1] = value
    assert usable(maps).tolist() == [False, True]
    found = map_shares(maps, size=SIZE, grid=GRID)
    assert all(getattr(found, name).isfinite().all() for name in ("row", "half", "spread", "central"))
    both = map_overlap(maps, torch.rand(2, *GRID), size=SIZE, grid=GRID)
    assert both.usable.tolist() == [False, True]
    assert (both.spearman[0], both.top[0], both.shared[0]) == (0, 0, 0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="grid that divides"):
        as_shares(torch.rand(1, 4, 4), size=(30, 30), grid=(4, 4))
    with pytest.raises(InputError, match="maps of the same images"):
        map_overlap(torch.rand(1, 4, 4), torch.rand(2, 4, 4), size=(32, 32), grid=(4, 4))
