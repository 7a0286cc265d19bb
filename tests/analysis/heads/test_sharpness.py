"""Entropy, Hoyer and Gini: textbook formulas by hand, their limits, and rows that are nearly uniform."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlens.analysis.heads.sharpness import ascending, entropy, gini, hoyer

ROWS = {"keys": st.integers(1, 30), "seed": st.integers(0, 2**16), "sharpness": st.floats(0, 60)}


def random_rows(keys: int, seed: int, sharpness: float) -> torch.Tensor:
    return (torch.randn(4, keys, generator=torch.Generator().manual_seed(seed)).double() * sharpness).softmax(-1)


def entropy_by_hand(row: list[float]) -> float:
    return -sum(p * math.log(p) for p in row if p > 0)


def hoyer_by_hand(row: list[float]) -> float:
    """(√n - Σ|w| / √Σw²) / (√n - 1), Hoyer 2004."""
    root = math.sqrt(len(row))
    return (root - sum(row) / math.sqrt(sum(p * p for p in row))) / (root - 1) if len(row) > 1 else 0.0


def gini_by_hand(row: list[float]) -> float:
    """Half the mean difference of all pairs over the mean."""
    return sum(abs(p - q) for p in row for q in row) / (2 * len(row) * sum(row))


@pytest.mark.parametrize("keys", [1, 2, 50, 197])
def test_uniform_rows_reach_the_logarithm(keys):
    uniform = torch.full((2, 3, keys), 1 / keys)
    torch.testing.assert_close(entropy(uniform), torch.full((2, 3), math.log(keys)), atol=1e-5, rtol=0)


def test_uniform_over_197_keys_is_the_published_number():
    assert entropy(torch.full((197,), 1 / 197)).item() == pytest.approx(5.2832, abs=5e-5)


def test_one_key_is_zero():
    assert torch.equal(entropy(torch.eye(7)), torch.zeros(7))


@settings(max_examples=60, deadline=None)
@given(**ROWS)
def test_entropy_is_the_sum_by_hand(keys, seed, sharpness):
    rows = random_rows(keys, seed, sharpness)
    for row, found in zip(rows, entropy(rows)):
        assert found.item() == pytest.approx(entropy_by_hand(row.tolist()), abs=1e-9)
        assert -1e-12 <= found.item() <= math.log(keys) + 1e-9


@settings(max_examples=60, deadline=None)
@given(**ROWS)
def test_hoyer_is_the_textbooks(keys, seed, sharpness):
    rows = random_rows(keys, seed, sharpness)
    for row, found in zip(rows, hoyer(rows)):
        assert found.item() == pytest.approx(hoyer_by_hand(row.tolist()), abs=1e-9)
        assert -1e-12 <= found.item() <= 1 + 1e-12


@settings(max_examples=60, deadline=None)
@given(**ROWS)
def test_gini_is_half_the_mean_difference(keys, seed, sharpness):
    rows = random_rows(keys, seed, sharpness)
    for row, found in zip(rows, gini(rows)):
        assert found.item() == pytest.approx(gini_by_hand(row.tolist()), abs=1e-9)
        assert -1e-12 <= found.item() <= 1 - 1 / keys + 1e-12


@pytest.mark.parametrize("keys", [2, 5, 197])
def test_limits(keys):
    uniform, single = torch.full((keys,), 1 / keys), torch.eye(keys)
    assert hoyer(uniform).item() == pytest.approx(0, abs=1e-6)
    assert gini(uniform).item() == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(hoyer(single), torch.ones(keys))
    torch.testing.assert_close(gini(single), torch.full((keys,), 1 - 1 / keys))


def test_a_single_key_has_no_sparsity():
    assert hoyer(torch.ones(3, 1)).tolist() == gini(torch.ones(3, 1)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("spread", [1e-3, 1e-2, 1.0])
def test_nearly_uniform_rows_in_fp32_keep_their_precision(spread):
    logits = spread * torch.randn(50, 197, generator=torch.Generator().manual_seed(1))
    rows = logits.softmax(-1)
    exact = rows.double() / rows.double().sum(-1, keepdim=True)
    for measure, by_hand in ((hoyer, hoyer_by_hand), (gini, gini_by_hand), (entropy, entropy_by_hand)):
        expected = torch.tensor([by_hand(row.tolist()) for row in exact[:5]], dtype=torch.float64)
        torch.testing.assert_close(measure(rows[:5]).double(), expected, atol=0, rtol=3e-6 + 1e-7 / spread)


def test_ascending_is_a_sort_and_leaves_its_input():
    values = torch.randn(3, 4, 9)
    before = values.clone()
    assert torch.equal(ascending(values), values.sort(-1).values)
    assert torch.equal(values, before)
