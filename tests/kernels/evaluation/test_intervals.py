"""Means of many rows at once, and intervals over seeds and images: against textbooks, counting and simulation."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.kit.sign_flips import sign_flip_test
from vitlens.analysis.evaluation.intervals import (
    accuracy_over_seeds,
    difference_over_seeds,
    intervals,
    resampled_means,
    sign_flips,
    spearman,
)
from vitlens.errors import InputError
from vitlens.uncertainty import bootstrap_mean, mcnemar, wilson

ANSWERS = np.array([[1, 1, 0, 1, 0, 1, 1, 1], [1, 0, 0, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1, 0]], dtype=bool)


def textbook(values: np.ndarray) -> tuple[float, float]:
    """The t interval of a mean."""
    found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(found.low), float(found.high)


def test_where_only_images_or_only_seeds_vary_the_interval_is_students():
    row = np.repeat([True, False], [30, 20])
    found = accuracy_over_seeds(np.stack([row] * 4))
    assert (found.low, found.high) == pytest.approx(textbook(row.astype(float)), rel=1e-9)
    assert (found.value, found.n) == (0.6, 50)
    seeds = np.array([True, True, True, False, True, True, True])  # each is right on all images or on none
    found = accuracy_over_seeds(np.repeat(seeds[:, None], 20, axis=1))
    low, high = textbook(seeds.astype(float))
    assert found.low == pytest.approx(low, rel=1e-9)
    assert found.high == min(high, 1.0) == 1.0


SPREAD = np.random.default_rng(4).random((4, 30)) < np.linspace(0.1, 1, 30) * np.array([[1.0], [0.9], [0.3], [0.5]])


@pytest.mark.parametrize("answers", [ANSWERS, SPREAD], ids=["alike", "of varying skill"])
def test_the_mean_squares_are_those_of_a_table_worked_out_by_hand(answers):
    """ANOVA written out: variance of the mean = (MS seeds + MS images - MS rest) / (seeds x images); Satterthwaite."""
    table = answers.astype(float)
    (seeds, images), every = table.shape, table - table.mean()
    between = [images * (every.mean(1) ** 2).sum(), seeds * (every.mean(0) ** 2).sum()]
    freedoms = [seeds - 1, images - 1, (seeds - 1) * (images - 1)]
    rest = ((every**2).sum() - sum(between)) / freedoms[2]
    of_seeds, of_images = (each / freedom for each, freedom in zip(between, freedoms))
    assert (rest > of_seeds) == (answers is ANSWERS)  # the seeds' component is then below 0: the images' alone remains
    squares = [of_seeds, of_images, rest if answers is SPREAD else of_seeds]
    variance = of_seeds + of_images - squares[2]
    freedom = variance**2 / sum(square**2 / each for square, each in zip(squares, freedoms))
    found, half = accuracy_over_seeds(answers), np.sqrt(variance / table.size) * stats.t.ppf(0.975, freedom)
    assert found.value - found.low == pytest.approx(half, rel=1e-9)
    assert found.high == pytest.approx(min(1, found.value + half), rel=1e-9)


def test_one_seed_has_wilsons_interval_and_mcnemars_test():
    first, second = ANSWERS[:1], ANSWERS[2:]
    assert accuracy_over_seeds(first) == wilson(6, 8)
    found = difference_over_seeds(first, second)
    assert found.p == mcnemar(2, 1)
    assert found.estimate.value == pytest.approx(12.5)
    assert found.estimate.unit == "points"
    assert found.estimate.low < 12.5 < found.estimate.high


def test_without_a_spread_to_estimate_there_is_wilsons_interval_and_no_smallest_difference():
    for right in (True, False):
        assert accuracy_over_seeds(np.full((3, 40), right)) == wilson(40 * right, 40)
    crossing = np.array([[True, False], [False, True]])  # equal means everywhere
    assert accuracy_over_seeds(crossing) == wilson(1, 2)
    assert difference_over_seeds(ANSWERS[:1], ANSWERS[1:2]).detectable() is None
    same, bound = difference_over_seeds(ANSWERS, ANSWERS), 100 * (wilson(0, len(ANSWERS[0])).high or 0)
    assert (same.estimate.value, same.estimate.low, same.estimate.high, same.p) == (0, -bound, bound, 1)
    assert same.detectable() is None


def test_seeds_are_the_unit_of_a_comparison_however_many_images():
    """Welch's test of SciPy over three seeds; ten copies of every image change nothing."""
    generator = np.random.default_rng(3)
    skill = np.array([[0.90], [0.91], [0.93]])
    first, second = generator.random((3, 2000)) < skill, generator.random((3, 2000)) < skill - 0.15
    expected = stats.ttest_ind(100 * first.mean(1), 100 * second.mean(1), equal_var=False)
    for copies in (1, 10):
        found = difference_over_seeds(np.tile(first, copies), np.tile(second, copies))
        assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
        assert found.p > 1e-6
        ends = expected.confidence_interval()
        assert (found.estimate.low, found.estimate.high) == pytest.approx((ends.low, ends.high), rel=1e-6)
    back = difference_over_seeds(second, first)
    assert (back.estimate.value, back.estimate.low) == pytest.approx((-found.estimate.value, -found.estimate.high))


def test_the_smallest_difference_that_is_seen_is_that_of_a_power_analysis():
    """Half an interval and the quantile of the power; simulated with 7 values, 80 % of tests see it."""
    random = np.random.default_rng(0)
    first, second = (random.random((6, 400)) < 0.7 for _ in range(2))
    found = difference_over_seeds(first, second)
    error, freedom = found.spread
    half = (found.estimate.high - found.estimate.low) / 2
    assert half == pytest.approx(100 * error * stats.t.ppf(0.975, freedom))
    assert found.detectable() == pytest.approx(half + 100 * error * stats.t.ppf(0.8, freedom))
    assert found.detectable(0.05 / 8) > found.detectable()
    few = found._replace(spread=(error, 6.0)).detectable()
    drawn = random.normal(few, 100 * error * np.sqrt(7), size=(4000, 7))
    seen = stats.ttest_1samp(drawn, 0, axis=1).pvalue <= 0.05
    assert float(seen.mean()) == pytest.approx(0.8, abs=0.04)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "groups"), [(30, None), (30, torch.arange(30) // 4), (1000, None)])
def test_each_rows_interval_and_p_value_are_those_it_has_alone(n: int, groups: Tensor | None) -> None:
    """Of a thousand values 4,000 draws are made at once."""
    values = noise(3 if n < 1000 else 1, n) + torch.tensor([0.0, 0.2, 2.0][: 3 if n < 1000 else 1])[:, None]
    low, high = intervals(values, groups=groups, seed=5)
    p, own = sign_flips(values, groups=groups, seed=5), None if groups is None else groups.numpy()
    for row, each in enumerate(values.numpy()):
        alone = bootstrap_mean(each, groups=own, seed=5)
        assert (float(low[row]), float(high[row])) == pytest.approx((alone.low, alone.high), abs=1e-12)
        assert float(p[row]) == pytest.approx(sign_flip_test(each, groups=own, seed=5), abs=1e-12)
    assert resampled_means(values, draws=7).shape == (7, len(values))


def test_sign_flips_agree_with_counting_them_all() -> None:
    differences = torch.tensor([0.3, -0.1, 0.8, 0.4, 0.2, 0.9, -0.2, 0.5], dtype=torch.float64)
    flips = torch.tensor([*itertools.product([1.0, -1.0], repeat=8)], dtype=torch.float64)
    exact = float(((flips @ differences).abs() >= differences.sum().abs() - 1e-12).double().mean())
    assert float(sign_flips(differences[None])[0]) == pytest.approx(exact, abs=0.02)
    copied = differences.repeat_interleave(4)[None]  # flip together
    assert float(sign_flips(copied, groups=torch.arange(8).repeat_interleave(4))[0]) == pytest.approx(exact, abs=0.02)
    assert float(sign_flips(torch.zeros(1, 5))[0]) == 1.0
    assert float(sign_flips(torch.full((1, 40), 0.1))[0]) == 1 / 10_001


def test_what_has_no_interval() -> None:
    with pytest.raises(InputError):
        intervals(torch.tensor([[0.0, torch.nan]], dtype=torch.float64))
    with pytest.raises(InputError):
        sign_flips(noise(1, 2), groups=torch.zeros(3))
    for one in (intervals(noise(2, 1)), intervals(noise(2, 3), groups=torch.zeros(3))):
        assert all(end.isnan().all() and end.shape == (2,) for end in one)


def test_a_rank_correlation_has_ties_at_their_mean_rank_and_is_undefined_of_equal_values() -> None:
    assert math.isnan(spearman(torch.ones(1, 4), torch.arange(4)[None]).item())
    assert math.isnan(spearman(torch.ones(1, 1), torch.ones(1, 1)).item())
    ties = torch.tensor([[1.0, 2.0, 2.0, 5.0]]), torch.tensor([[3.0, 1.0, 4.0, 4.0]])
    assert spearman(*ties).item() == pytest.approx(stats.spearmanr(*(each[0].numpy() for each in ties)).statistic)
