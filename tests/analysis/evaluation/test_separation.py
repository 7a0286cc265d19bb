import numpy as np
import pytest
import torch
from scipy import stats

from vitlens.analysis.failures.diagnosis import separation, separations


def made(n: int, shift: float, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n numbers, half of failures that lie higher by shift."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    correct = torch.arange(n) % 2 == 0
    return values + shift * ~correct, correct


def delong(high: np.ndarray, low: np.ndarray) -> tuple[float, float]:
    """Area and its variance by the definition's double loop."""
    kernel = np.array([[1.0 if x > y else 0.5 if x == y else 0.0 for y in low] for x in high])
    variance = kernel.mean(1).var(ddof=1) / len(high) + kernel.mean(0).var(ddof=1) / len(low)
    return kernel.mean(), variance


def test_the_area_is_mann_whitneys_and_the_interval_delongs():
    values, correct = made(60, 0.7)
    values = (2 * values).round()  # with ties
    found = separation(values, correct)
    high, low = values[~correct].numpy(), values[correct].numpy()
    area, variance = delong(high, low)
    assert found.area.value == pytest.approx(area)
    assert found.area.value == pytest.approx(stats.mannwhitneyu(high, low).statistic / (len(high) * len(low)))
    half = 1.959964 * np.sqrt(variance) / (area * (1 - area))
    centre = np.log(area / (1 - area))
    assert found.area.low == pytest.approx(1 / (1 + np.exp(half - centre)))
    assert found.area.high == pytest.approx(1 / (1 + np.exp(-half - centre)))


def test_p_values_are_even_where_nothing_differs_and_small_where_something_does():
    even = [separation(*made(80, 0.0, seed=seed)).p for seed in range(200)]
    assert 0.01 <= np.mean(np.array(even) < 0.05) <= 0.1
    values, correct = made(80, 1.5)
    assert separation(values, correct).p < 1e-4
    assert stats.mannwhitneyu(values[~correct].numpy(), values[correct].numpy()).pvalue < 1e-4


def test_groups_of_equal_images_count_once():
    values, correct = made(60, 0.5)
    alone = separation(values, correct)
    groups = torch.arange(60).repeat(5)
    repeated = separation(values.repeat(5), correct.repeat(5), groups=groups)
    ungrouped = separation(values.repeat(5), correct.repeat(5))
    assert repeated.area.value == pytest.approx(alone.area.value)
    assert repeated.area.high - repeated.area.low == pytest.approx(alone.area.high - alone.area.low, rel=0.05)
    assert ungrouped.area.high - ungrouped.area.low < 0.6 * (alone.area.high - alone.area.low)


def test_the_ends():
    correct = torch.arange(40) < 20
    found = separation((~correct).double(), correct)
    assert (found.area.value, found.area.low) == (1.0, None)
    assert found.p < 1e-9
    constant = separation(torch.ones(40).double(), correct)
    assert (constant.area.value, constant.p) == (0.5, 1.0)
    few = separation(made(40, 0.0)[0], torch.arange(40) >= 9, name="blur")  # said and not tested
    assert (few.failures, few.area.n, few.p, few.area.low) == (9, 40, None, None)
    assert separations({"blur": torch.ones(40)}, torch.ones(40, dtype=torch.bool)) == ()
