"""How well planted confidences separate errors: the area under the ROC curve, its interval and its test."""

import numpy as np
import pytest
import torch
from scipy import stats

import vitlens
from tests.kit.reader import confident
from tests.kit.splits import split_of
from vitlens.uncertainty import Estimate


def separation(sure: np.ndarray, wrong: np.ndarray) -> tuple[Estimate, float | None]:
    """The area of the confidence (n,), in 255ths, for errors, and its p."""
    pixels = torch.zeros(len(sure), 3, 4, 6, dtype=torch.uint8)
    pixels[:, 1] = torch.from_numpy(sure.astype(np.uint8))[:, None, None]
    split = split_of(pixels, torch.from_numpy(wrong.astype(np.int64)), tuple("abcde"))
    found = vitlens.failures(confident(), split, method="saliency")
    (row,) = [row for row in found.covariates if row.covariate == "confidence"]
    assert row.errors == wrong.sum()
    return row.area, row.p


def made(n: int, shift: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n numbers with ties, half of errors that lie higher by shift."""
    wrong = np.arange(n) % 2 == 1
    numbers = np.random.default_rng(seed).normal(size=n) + shift * wrong
    return (170 + 10 * numbers).round().clip(130, 250), wrong


def delong(high: np.ndarray, low: np.ndarray) -> tuple[float, float]:
    """Area and its variance by the definition's double loop."""
    kernel = np.array([[1.0 if x > y else 0.5 if x == y else 0.0 for y in low] for x in high])
    variance = kernel.mean(1).var(ddof=1) / len(high) + kernel.mean(0).var(ddof=1) / len(low)
    return kernel.mean(), variance


@pytest.mark.parametrize(("n", "shift"), [(60, 0.7), (31, -0.2)])
def test_the_area_is_mann_whitneys_and_the_interval_delongs(n, shift):
    values, wrong = made(n, shift)
    found, p = separation(values, wrong)
    high, low = values[wrong], values[~wrong]
    area, variance = delong(high, low)
    assert found.value == pytest.approx(area)
    assert found.value == pytest.approx(stats.mannwhitneyu(high, low).statistic / (len(high) * len(low)))
    error, centre = np.sqrt(variance) / (area * (1 - area)), np.log(area / (1 - area))
    assert found.low == pytest.approx(1 / (1 + np.exp(1.959964 * error - centre)))
    assert found.high == pytest.approx(1 / (1 + np.exp(-1.959964 * error - centre)))
    assert p == pytest.approx(2 * stats.norm.sf(abs(centre) / error))


def test_complete_separation_none_and_too_few():
    wrong = np.arange(40) < 20
    complete, p = separation(150 + 80.0 * wrong, wrong)
    assert (complete.value, complete.low) == (1.0, None)
    assert 0 < p < 1e-9
    mirrored = np.where(np.arange(40) % 2 == 0, 150.0, 200.0)  # as many errors as successes at each
    none, p = separation(mirrored, wrong)
    assert (none.value, p) == (0.5, pytest.approx(1.0))
    few, p = separation(made(40, 0.0)[0], np.arange(40) < 9)
    assert (few.n, few.low, p) == (40, None, None)
