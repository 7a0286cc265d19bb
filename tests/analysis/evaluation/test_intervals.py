"""Running sums: numpy on all images at once, Student's interval by scipy, parts joined."""

import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from vitlens.analysis.evaluation.intervals import Moments

KEY = ("distance", 2)


def values(images: int = 40, heads: int = 3, *, seed: int = 0) -> torch.Tensor:
    spread = torch.randn(images, heads, generator=torch.Generator().manual_seed(seed)).double()
    return 100 + spread * torch.tensor([1.0, 10.0, 1e-3])[:heads]


def taken(parts: list[torch.Tensor]) -> Moments:
    moments = Moments()
    for part in parts:
        moments.add({KEY: part}, len(part))
    return moments


@pytest.mark.parametrize("images", [2, 3, 40])
def test_the_mean_is_numpys_and_the_interval_students(images):
    found, everything = taken([values(images)]), values(images).numpy()
    low, high = stats.t.interval(0.95, images - 1, loc=everything.mean(0), scale=stats.sem(everything))
    np.testing.assert_allclose(found.mean(KEY).numpy(), everything.mean(0), rtol=1e-13)
    np.testing.assert_allclose((found.mean(KEY) - found.half_width(KEY)).numpy(), low, rtol=1e-8)
    np.testing.assert_allclose((found.mean(KEY) + found.half_width(KEY)).numpy(), high, rtol=1e-8)
    assert found.count == images


def test_one_image_has_a_mean_and_no_interval():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = taken([values(1)])
        assert torch.equal(found.mean(KEY), values(1)[0])
        assert found.half_width(KEY).isnan().all()


def test_sums_are_float64_of_whatever_comes_and_let_go_of_autograd():
    found = taken([values().float().requires_grad_(), values().bfloat16()])
    assert found.sums[KEY].dtype == found.squares[KEY].dtype == torch.float64
    expected = values().float().double().sum(0) + values().bfloat16().double().sum(0)
    assert torch.equal(found.sums[KEY], expected)


def test_parts_joined_are_the_whole():
    """Two processes: total adds this one's tensor to what the other has at the same moment."""
    first, second = taken([values()[:15]]), taken([values()[15:]])
    for part in (first, second):
        part.add({("entropy", 0): values(2, 2)}, 0)  # more than one name, so that their order matters
    second.sums = dict(reversed(second.sums.items()))  # a process may have met the layers in another order
    second.squares = dict(reversed(second.squares.items()))
    said: list[torch.Tensor] = []
    second_sent = Moments(second.count, dict(second.sums), dict(second.squares))
    second_sent.join(lambda tensor: said.append(tensor) or tensor)
    others = iter(said)
    first.join(lambda tensor: tensor + next(others))
    whole = taken([values()])
    assert first.count == 40
    torch.testing.assert_close(first.sums[KEY], whole.sums[KEY], atol=0, rtol=1e-14)
    torch.testing.assert_close(first.half_width(KEY), whole.half_width(KEY), atol=0, rtol=1e-5)
