"""Entropy, Hoyer and Gini by their textbook formulas, rows that are nearly uniform, and the values that stand out."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlens.analysis.heads.rows import FUNCTIONS, Rows, ascending, median, outliers


def entropy_by_hand(row: list[float]) -> float:
    return -sum(p * math.log(p) for p in row if p > 0)


def hoyer_by_hand(row: list[float]) -> float:
    """(√n - Σ|w| / √Σw²) / (√n - 1), Hoyer 2004."""
    root = math.sqrt(len(row))
    return (root - sum(row) / math.sqrt(sum(p * p for p in row))) / (root - 1) if len(row) > 1 else 0.0


def gini_by_hand(row: list[float]) -> float:
    """Half the mean difference of all pairs over the mean."""
    return sum(abs(p - q) for p in row for q in row) / (2 * len(row) * sum(row))


BY_HAND = {"entropy": entropy_by_hand, "hoyer": hoyer_by_hand, "gini": gini_by_hand}
GREATEST = {"entropy": math.log, "hoyer": lambda _: 1, "gini": lambda keys: 1 - 1 / keys}


@pytest.mark.parametrize("name", BY_HAND)
@settings(max_examples=60, deadline=None)
@given(keys=st.integers(1, 30), seed=st.integers(0, 2**16), sharpness=st.floats(0, 60))
def test_is_the_textbooks_and_within_its_limits(name, keys, seed, sharpness):
    rows = (torch.randn(4, keys, generator=torch.Generator().manual_seed(seed)).double() * sharpness).softmax(-1)
    for row, found in zip(rows, FUNCTIONS[name](Rows(rows))):
        assert found.item() == pytest.approx(BY_HAND[name](row.tolist()), abs=1e-9)
        assert -1e-12 <= found.item() <= GREATEST[name](keys) + 1e-9


@pytest.mark.parametrize("keys", [1, 2, 50, 197])
def test_limits(keys):
    uniform, single = Rows(torch.full((2, keys), 1 / keys)), Rows(torch.eye(keys)[:1].expand(2, keys))
    expected = {"entropy": (math.log(keys), 0.0), "hoyer": (0, float(keys > 1)), "gini": (0, 1 - 1 / keys)}
    for name, ends in expected.items():
        for rows, value in zip((uniform, single), ends):
            assert FUNCTIONS[name](rows).tolist() == pytest.approx([value] * 2, abs=1e-5)


@pytest.mark.parametrize("spread", [1e-3, 1e-2, 1.0])
def test_nearly_uniform_rows_in_fp32_keep_their_precision(spread):
    logits = spread * torch.randn(50, 197, generator=torch.Generator().manual_seed(1))
    rows = logits.softmax(-1)
    exact = rows.double() / rows.double().sum(-1, keepdim=True)
    for name, by_hand in BY_HAND.items():
        expected = torch.tensor([by_hand(row.tolist()) for row in exact[:5]], dtype=torch.float64)
        found = FUNCTIONS[name](Rows(rows[:5]))
        torch.testing.assert_close(found.double(), expected, atol=0, rtol=3e-6 + 1e-7 / spread)


def test_ascending_is_a_sort_and_leaves_its_input():
    values = torch.randn(3, 4, 9)
    before = values.clone()
    assert torch.equal(ascending(values), values.sort(-1).values)
    assert torch.equal(values, before)


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 40), large=st.integers(0, 5), seed=st.integers(0, 2**16))
def test_what_stands_out_by_hand(size, large, seed):
    """Above the median by more than five median absolute deviations."""
    values = torch.rand(3, size, generator=torch.Generator().manual_seed(seed)).double()
    values[:, : min(large, size)] *= 30
    for row, found, middle in zip(values.tolist(), outliers(values).tolist(), median(values).tolist()):
        assert middle == pytest.approx(statistics.median(row), abs=1e-15)
        deviation = statistics.median([abs(value - middle) for value in row])
        assert found == [value > middle + 5 * deviation for value in row]


def test_those_far_above_stand_out_and_rounding_is_no_deviation():
    """Uniform attention over 197 keys, summed in fp32, differs in its last digits."""
    received = torch.full((2, 65), 0.1 / 64) + 1e-5 * torch.rand(2, 65, generator=torch.Generator().manual_seed(0))
    received[0, 17] = received[1, 0] = 0.9
    received[0, 3] = 0
    assert outliers(received).nonzero().tolist() == [[0, 17], [1, 0]]
    equal = torch.full((4, 197), 1 / 197)
    rounded = equal * (1 + 3e-7 * torch.randn(4, 197, generator=torch.Generator().manual_seed(0)))
    assert not outliers(equal).any()
    assert not outliers(rounded).any()
    rounded[0, [4, 7]] = 0.2
    assert outliers(rounded).nonzero().tolist() == [[0, 4], [0, 7]]
