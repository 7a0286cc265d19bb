"""Entropy of heads: the formula, its limits, and that streaming in batches changes nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lens.tiny import images, ours, timm_specimen
from vitlens.analysis.stats import MeanEntropy, entropy
from vitlens.lens.observe import capture, observe


@pytest.mark.parametrize("keys", [1, 2, 50, 197])
def test_uniform_rows_reach_the_logarithm(keys):
    uniform = torch.full((2, 3, keys), 1 / keys)
    torch.testing.assert_close(entropy(uniform), torch.full((2, 3), math.log(keys)), atol=1e-5, rtol=0)


def test_uniform_over_197_keys_is_the_published_number():
    assert entropy(torch.full((197,), 1 / 197)).item() == pytest.approx(5.2832, abs=5e-5)


def test_one_key_is_zero():
    assert torch.equal(entropy(torch.eye(7)), torch.zeros(7))


@settings(max_examples=40, deadline=None)
@given(keys=st.integers(1, 30), seed=st.integers(0, 2**16), sharpness=st.floats(0, 60))
def test_equals_the_sum_by_hand(keys, seed, sharpness):
    rows = (torch.randn(4, keys, generator=torch.Generator().manual_seed(seed)).double() * sharpness).softmax(-1)
    for row, found in zip(rows, entropy(rows)):
        by_hand = -sum(p * math.log(p) for p in row.tolist() if p > 0)
        assert found.item() == pytest.approx(by_hand, abs=1e-9)
        assert -1e-12 <= found.item() <= math.log(keys) + 1e-9


@pytest.mark.parametrize("make", [ours, lambda: timm_specimen("swin_tiny_patch4_window7_224")], ids=["ours", "swin"])
def test_streamed_in_any_batches_it_is_the_mean_over_queries_and_images(make):
    specimen = make()
    batch = images(specimen.input_size, batch=5)
    expected = [entropy(weights).mean((0, 2)) for weights in capture(specimen, batch).layers]
    for sizes in ((5,), (2, 3), (1, 1, 1, 1, 1)):
        reducer = MeanEntropy()
        for part in batch.split(list(sizes)):
            observe(specimen, part, reducer)
        assert len(reducer.result()) == len(expected)
        for found, mean in zip(reducer.result(), expected):
            torch.testing.assert_close(found.float(), mean, atol=1e-5, rtol=1e-5)
