"""Entropy, Hoyer and Gini by their textbook formulas, rows that are nearly uniform, and the values that stand out."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlens.analysis.heads.rows import FUNCTIONS, Rows, ascending, median, outliers

ROWS = {"keys": st.integers(1, 30), "seed": st.integers(0, 2**16), "sharpness": st.floats(0, 60)}


def entropy(weights: torch.Tensor) -> torch.Tensor:
    return FUNCTIONS["entropy"](Rows(weights))


def hoyer(weights: torch.Tensor) -> torch.Tensor:
    return FUNCTIONS["hoyer"](Rows(weights))


def gini(weights: torch.Tensor) -> torch.Tensor:
    return FUNCTIONS["gini"](Rows(weights))


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


def stands_out_by_hand(values: list[float]) -> list[bool]:
    """Above the median by more than five median absolute deviations."""
    middle = statistics.median(values)
    deviation = statistics.median([abs(value - middle) for value in values])
    return [value > middle + 5 * deviation for value in values]


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 40), large=st.integers(0, 5), seed=st.integers(0, 2**16))
def test_is_median_and_deviations_stands_out_by_hand(size, large, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(3, size, generator=generator).double()
    values[:, : min(large, size)] *= 30
    assert outliers(values).tolist() == [stands_out_by_hand(row.tolist()) for row in values]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_median_of_even_and_odd_numbers(size, seed):
    values = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)).double()
    for row, found in zip(values, median(values)):
        assert found.item() == pytest.approx(statistics.median(row.tolist()), abs=1e-15)


def test_one_that_receives_much_is_found_alone():
    received = torch.full((2, 65), 0.1 / 64) + 1e-5 * torch.rand(2, 65, generator=torch.Generator().manual_seed(0))
    received[0, 17] = received[1, 0] = 0.9
    assert outliers(received).nonzero().tolist() == [[0, 17], [1, 0]]


def test_among_equals_none_stands_out():
    """Rounding is no deviation: uniform attention over 197 keys, summed in fp32, differs in its last digits."""
    equal = torch.full((4, 197), 1 / 197)
    assert not outliers(equal).any()
    rounded = equal * (1 + 3e-7 * torch.randn(4, 197, generator=torch.Generator().manual_seed(0)))
    assert not outliers(rounded).any()
    assert not outliers(torch.zeros(1, 5)).any()


def test_few_low_ones_do_not_stand_out():
    values = torch.linspace(1, 1.1, 30)
    values[3] = 0.0
    assert not outliers(values).any()


def test_two_of_many_equal_ones():
    values = torch.full((20,), 0.01)
    values[[4, 7]] = 0.2
    assert outliers(values).nonzero().flatten().tolist() == [4, 7]
