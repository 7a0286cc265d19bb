"""Attention by offset: a loop over all pairs of patches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitlens.analysis.heads.offsets import offset_counts, offset_sums


def by_loops(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """(query, key) summed by key minus query."""
    rows, columns = grid
    sums = torch.zeros(2 * rows - 1, 2 * columns - 1, dtype=torch.float64)
    for query in range(rows * columns):
        for key in range(rows * columns):
            down, across = key // columns - query // columns, key % columns - query % columns
            sums[down + rows - 1, across + columns - 1] += float(weights[query, key])
    return sums


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_is_the_loop_over_all_pairs(rows, columns, seed):
    grid, patches = (rows, columns), rows * columns
    weights = torch.randn(2, 3, patches, patches, generator=torch.Generator().manual_seed(seed)).double()
    found = offset_sums(weights, grid)
    assert found.shape == (2, 3, 2 * rows - 1, 2 * columns - 1)
    for image in range(2):
        for head in range(3):
            torch.testing.assert_close(found[image, head], by_loops(weights[image, head], grid), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found.sum((-2, -1)), weights.sum((-2, -1)), atol=1e-11, rtol=1e-11)


def test_one_pair_is_one_offset_key_minus_query():
    weights = torch.zeros(15, 15)
    weights[0 * 5 + 1, 2 * 5 + 4] = 1  # from row 0, column 1 of 3x5 to row 2, column 4
    found = offset_sums(weights, (3, 5))
    assert found[2 + 2, 4 + 3] == found.sum() == 1


def test_the_middle_is_the_diagonal():
    weights = torch.rand(12, 12)
    torch.testing.assert_close(offset_sums(weights, (3, 4))[2, 3], weights.diagonal().sum())


@pytest.mark.parametrize("grid", [(3, 5), (1, 4), (6, 1), (1, 1)])
def test_counts_of_a_whole_map(grid):
    patches = grid[0] * grid[1]
    expected = by_loops(torch.ones(patches, patches), grid)
    assert torch.equal(offset_counts(grid), expected)
    assert expected.sum() == patches**2


def test_counts_of_some_pairs():
    pairs = (torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    assert torch.equal(offset_counts((2, 3), pairs), sum(by_loops(window, (2, 3)) for window in pairs))
