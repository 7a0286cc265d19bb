"""Sinks: the rule by hand, clear cases, and equal values of which none stands out."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlens.analysis.heads.sinks import median, stand_out


def by_hand(values: list[float]) -> list[bool]:
    """Above the median by more than five median absolute deviations."""
    middle = statistics.median(values)
    deviation = statistics.median([abs(value - middle) for value in values])
    return [value > middle + 5 * deviation for value in values]


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 40), outliers=st.integers(0, 5), seed=st.integers(0, 2**16))
def test_is_median_and_deviations_by_hand(size, outliers, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(3, size, generator=generator).double()
    values[:, : min(outliers, size)] *= 30
    assert stand_out(values).tolist() == [by_hand(row.tolist()) for row in values]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_median_of_even_and_odd_numbers(size, seed):
    values = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)).double()
    for row, found in zip(values, median(values)):
        assert found.item() == pytest.approx(statistics.median(row.tolist()), abs=1e-15)


def test_one_that_receives_much_is_found_alone():
    received = torch.full((2, 65), 0.1 / 64) + 1e-5 * torch.rand(2, 65, generator=torch.Generator().manual_seed(0))
    received[0, 17] = received[1, 0] = 0.9
    assert stand_out(received).nonzero().tolist() == [[0, 17], [1, 0]]


def test_among_equals_none_stands_out():
    """Rounding is no deviation: uniform attention over 197 keys, summed in fp32, differs in its last digits."""
    equal = torch.full((4, 197), 1 / 197)
    assert not stand_out(equal).any()
    rounded = equal * (1 + 3e-7 * torch.randn(4, 197, generator=torch.Generator().manual_seed(0)))
    assert not stand_out(rounded).any()
    assert not stand_out(torch.zeros(1, 5)).any()


def test_few_low_ones_do_not_stand_out():
    values = torch.linspace(1, 1.1, 30)
    values[3] = 0.0
    assert not stand_out(values).any()


def test_two_of_many_equal_ones():
    values = torch.full((20,), 0.01)
    values[[4, 7]] = 0.2
    assert stand_out(values).nonzero().flatten().tolist() == [4, 7]
