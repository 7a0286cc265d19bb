"""The separation of errors by a number, where both models are separated without an exception."""

import numpy as np
import pytest
import torch

from vitlens.analysis.failures.separation import area_difference

NUMBERS = np.tile(np.arange(60.0), (2, 1))
IS_HIGH = NUMBERS[0] >= 30
GROUPS = [None, torch.arange(60) // 3]


@pytest.mark.parametrize("groups", GROUPS, ids=["images", "groups"])
def test_opposite_perfect_separations_differ_significantly(groups):
    gap, p = area_difference(NUMBERS, np.stack((IS_HIGH, ~IS_HIGH)), groups=groups)
    assert gap.value == 1.0
    assert gap.low is None
    assert p < 0.001


@pytest.mark.parametrize("groups", GROUPS, ids=["images", "groups"])
def test_equal_perfect_separations_do_not_differ(groups):
    gap, p = area_difference(NUMBERS, np.stack((IS_HIGH, IS_HIGH)), groups=groups)
    assert (gap.value, p) == (0.0, 1.0)
