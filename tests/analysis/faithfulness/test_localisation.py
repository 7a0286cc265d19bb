"""The pointing game on maps made to hit, to miss and to tie."""

import pytest
import torch

from vitlens.analysis.faithfulness.localisation import mask_areas, pointing_hits
from vitlens.errors import DataError


def mask() -> torch.Tensor:
    """The left half of 4x4 pixels."""
    inside = torch.zeros(1, 4, 4, dtype=torch.bool)
    inside[:, :, :2] = True
    return inside


@pytest.mark.parametrize(("column", "hit"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_highest_point_decides(column, hit):
    maps = torch.zeros(1, 4, 4)
    maps[0, 1, column] = 1
    assert pointing_hits(maps, mask()).tolist() == [hit]


def test_a_tie_counts_only_when_all_of_it_is_inside():
    maps = torch.zeros(3, 4, 4)
    maps[0, 0, 0] = maps[0, 3, 1] = 1  # both inside
    maps[1, 0, 0] = maps[1, 0, 3] = 1  # one outside; the third map is constant
    assert pointing_hits(maps, mask().expand(3, 4, 4)).tolist() == [True, False, False]


def test_the_area_is_what_a_random_point_hits():
    assert mask_areas(mask()).tolist() == [0.5]


def test_an_empty_mask_is_refused():
    with pytest.raises(DataError, match="empty"):
        pointing_hits(torch.rand(1, 2, 2), torch.zeros(1, 4, 4, dtype=torch.bool))
