"""The area under the ROC curve of a number: its value, its interval and its test."""

import numpy as np
import pytest
import torch
from scipy import stats

from vitlens.analysis.failures.diagnosis import separation


def made(n: int, shift: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n numbers, half of failures that lie higher by shift."""
    wrong = np.arange(n) % 2 == 1
    return np.random.default_rng(seed).normal(size=n) + shift * wrong, wrong


def delong(high: np.ndarray, low: np.ndarray) -> tuple[float, float]:
    """Area and its variance by the definition's double loop."""
    kernel = np.array([[1.0 if x > y else 0.5 if x == y else 0.0 for y in low] for x in high])
    variance = kernel.mean(1).var(ddof=1) / len(high) + kernel.mean(0).var(ddof=1) / len(low)
    return kernel.mean(), variance


def test_the_area_is_mann_whitneys_and_the_interval_delongs():
    values, wrong = made(60, 0.7)
    values = (2 * values).round()  # with ties
    found, p = separation(values, wrong)
    high, low = values[wrong], values[~wrong]
    area, variance = delong(high, low)
    assert found.value == pytest.approx(area)
    assert found.value == pytest.approx(stats.mannwhitneyu(high, low).statistic / (len(high) * len(low)))
    error, centre = np.sqrt(variance) / (area * (1 - area)), np.log(area / (1 - area))
    assert found.low == pytest.approx(1 / (1 + np.exp(1.959964 * error - centre)))
    assert found.high == pytest.approx(1 / (1 + np.exp(-1.959964 * error - centre)))
    assert p == pytest.approx(2 * stats.norm.sf(abs(centre) / error))


def test_p_values_are_even_where_nothing_differs():
    even = [separation(*made(80, 0.0, seed=seed))[1] for seed in range(200)]
    assert 0.01 <= np.mean(np.array(even) < 0.05) <= 0.1
    assert separation(*made(80, 1.5))[1] < 1e-4


def test_groups_of_equal_images_count_once():
    values, wrong = made(60, 0.5)
    five, groups = (np.tile(values, 5), np.tile(wrong, 5)), torch.arange(60).repeat(5)
    alone, repeated, ungrouped = (
        separation(*each, groups=given)[0] for each, given in (((values, wrong), None), (five, groups), (five, None))
    )
    assert repeated.value == pytest.approx(alone.value)
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low, rel=0.05)
    assert ungrouped.high - ungrouped.low < 0.6 * (alone.high - alone.low)


def test_complete_separation_none_and_too_few():
    wrong = np.arange(40) < 20
    complete, p = separation(wrong.astype(float), wrong)
    assert (complete.value, complete.low) == (1.0, None)
    assert p < 1e-9
    constant, p = separation(np.ones(40), wrong)
    assert (constant.value, p) == (0.5, 1.0)
    few, p = separation(made(40, 0.0)[0], np.arange(40) < 9)
    assert (few.n, few.low, p) == (40, None, None)
