"""Means of many rows, and intervals over seeds and images, against textbooks and simulation."""

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
    mean_test,
    resampled_means,
    sign_flips,
    spearman,
    studentized_p_values,
)
from vitlens.errors import InputError
from vitlens.uncertainty import bootstrap_mean, mcnemar, wilson

ANSWERS = np.array(
    [[1, 1, 0, 1, 0, 1, 1, 1], [1, 0, 0, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1, 0]], dtype=bool
)


SPREAD = np.random.default_rng(4).random((4, 30)) < np.linspace(0.1, 1, 30) * np.array(
    [[1.0], [0.9], [0.3], [0.5]]
)
# each is right on all images or on none
BY_SEED = np.repeat([[True], [True], [True], [False], [True]], 20, axis=1)


@pytest.mark.parametrize(
    ("answers", "least"),
    [
        (ANSWERS, 0),
        (np.repeat([[True] * 30 + [False] * 20], 4, axis=0), 0),
        (BY_SEED, 1),
        (SPREAD, 2),
    ],
    ids=["alike", "the same seeds", "the same images", "of varying skill"],
)
def test_the_mean_squares_are_those_of_a_table_worked_out_by_hand(answers, least):
    """ANOVA written out: variance of the mean = (MS seeds + MS images - MS rest) / (seeds x
    images); Satterthwaite.
    """
    table = answers.astype(float)
    (seeds, images), every = table.shape, table - table.mean()
    between = [images * (every.mean(1) ** 2).sum(), seeds * (every.mean(0) ** 2).sum()]
    freedoms = [seeds - 1, images - 1, (seeds - 1) * (images - 1)]
    squares = np.array([*between, (every**2).sum() - sum(between)]) / freedoms
    assert squares[least] == pytest.approx(squares.min(), abs=1e-12)
    # else the component of seeds or images is below 0: only that of the others remains
    squares[2] = squares[least]
    variance = squares[0] + squares[1] - squares[2]
    freedom = variance**2 / sum(square**2 / degrees for square, degrees in zip(squares, freedoms))
    accuracy = accuracy_over_seeds(answers)
    half = np.sqrt(variance / table.size) * stats.t.ppf(0.975, freedom)
    assert (accuracy.value, accuracy.n) == (pytest.approx(table.mean()), images)
    assert accuracy.value - accuracy.low == pytest.approx(half, rel=1e-9)
    assert accuracy.high == pytest.approx(min(1, accuracy.value + half), rel=1e-9)


def test_one_seed_has_wilsons_interval_and_mcnemars_test():
    first = ANSWERS[:1]
    second = ANSWERS[2:]
    assert accuracy_over_seeds(first) == wilson(6, 8)
    difference = difference_over_seeds(first, second)
    assert difference.p == mcnemar(2, 1)
    assert difference.estimate.value == pytest.approx(12.5)
    assert difference.estimate.unit == "points"
    assert difference.estimate.low < 12.5 < difference.estimate.high


def test_without_a_spread_to_estimate_there_is_wilsons_interval_and_no_smallest_difference():
    for right in (True, False):
        assert accuracy_over_seeds(np.full((3, 40), right)) == wilson(40 * right, 40)
    crossing = np.array([[True, False], [False, True]])  # equal means everywhere
    assert accuracy_over_seeds(crossing) == wilson(1, 2)
    assert difference_over_seeds(ANSWERS[:1], ANSWERS[1:2]).detectable() is None
    same = difference_over_seeds(ANSWERS, ANSWERS)
    bound = 100 * (wilson(0, len(ANSWERS[0])).high or 0)
    assert (same.estimate.value, same.estimate.low, same.estimate.high, same.p) == (
        0,
        -bound,
        bound,
        1,
    )
    assert same.detectable() is None


def test_seeds_are_the_unit_of_a_comparison_however_many_images():
    """Welch's test of SciPy over three seeds; ten copies of every image change nothing. The
    smallest difference that is found adds the quantiles of level and power.
    """
    generator = np.random.default_rng(3)
    skill = np.array([[0.90], [0.91], [0.93]])
    first = generator.random((3, 2000)) < skill
    second = generator.random((3, 2000)) < skill - 0.15
    expected = stats.ttest_ind(100 * first.mean(1), 100 * second.mean(1), equal_var=False)
    ends = expected.confidence_interval()
    quantile = stats.t(expected.df).ppf
    error = (ends.high - ends.low) / 2 / quantile(0.975)
    for copies in (1, 10):
        difference = difference_over_seeds(np.tile(first, copies), np.tile(second, copies))
        assert difference.p == pytest.approx(expected.pvalue, rel=1e-6)
        assert (difference.estimate.low, difference.estimate.high) == pytest.approx(
            (ends.low, ends.high), rel=1e-6
        )
        for level in (0.05, 0.05 / 8):
            smallest = error * (quantile(1 - level / 2) + quantile(0.8))
            assert difference.detectable(level) == pytest.approx(smallest, rel=1e-6)
    assert difference.detectable() == difference.detectable(0.05)
    back = difference_over_seeds(second, first)
    assert (back.estimate.value, back.estimate.low) == pytest.approx(
        (-difference.estimate.value, -difference.estimate.high)
    )


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "groups"), [(30, None), (30, torch.arange(30) // 4), (1000, None)])
def test_each_rows_interval_and_p_value_are_those_it_has_alone(
    n: int, groups: Tensor | None
) -> None:
    """Of a thousand values 4,000 draws are made at once."""
    values = (
        noise(3 if n < 1000 else 1, n)
        + torch.tensor([0.0, 0.2, 2.0][: 3 if n < 1000 else 1])[:, None]
    )
    low, high = intervals(values, groups=groups, seed=5)
    p = sign_flips(values, groups=groups, seed=5)
    members = None if groups is None else groups.numpy()
    for row, row_values in enumerate(values.numpy()):
        alone = bootstrap_mean(row_values, groups=members, seed=5)
        assert (float(low[row]), float(high[row])) == pytest.approx(
            (alone.low, alone.high), abs=1e-12
        )
        assert float(p[row]) == pytest.approx(
            sign_flip_test(row_values, groups=members, seed=5), abs=1e-12
        )
    assert resampled_means(values, draws=7).shape == (7, len(values))


def test_sign_flips_agree_with_counting_them_all() -> None:
    differences = torch.tensor([0.3, -0.1, 0.8, 0.4, 0.2, 0.9, -0.2, 0.5], dtype=torch.float64)
    flips = torch.tensor([*itertools.product([1.0, -1.0], repeat=8)], dtype=torch.float64)
    exact = float(((flips @ differences).abs() >= differences.sum().abs() - 1e-12).double().mean())
    assert float(sign_flips(differences[None])[0]) == pytest.approx(exact, abs=0.02)
    copied = differences.repeat_interleave(4)[None]  # flip together
    assert float(
        sign_flips(copied, groups=torch.arange(8).repeat_interleave(4))[0]
    ) == pytest.approx(exact, abs=0.02)
    assert float(sign_flips(torch.zeros(1, 5))[0]) == 1.0
    assert float(sign_flips(torch.full((1, 40), 0.1))[0]) == 1 / 10_001


def test_skewed_differences_of_mean_zero_are_rarely_declared_effects() -> None:
    """Of 8 exponential differences of mean 0, sign flips reject in 10 % of the cases."""
    draws = torch.distributions.Exponential(torch.tensor(1.0, dtype=torch.float64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        differences = draws.sample((1500, 8)) - 1
    flips = sign_flips(differences)
    held = mean_test(differences)
    assert torch.equal(held, torch.maximum(flips, studentized_p_values(differences)))
    assert (flips <= 0.05).double().mean() > 0.085
    assert (held <= 0.05).double().mean() < 0.075


def test_what_has_no_interval() -> None:
    with pytest.raises(InputError):
        intervals(torch.tensor([[0.0, torch.nan]], dtype=torch.float64))
    with pytest.raises(InputError):
        sign_flips(noise(1, 2), groups=torch.zeros(3))
    for one in (intervals(noise(2, 1)), intervals(noise(2, 3), groups=torch.zeros(3))):
        for end in one:
            assert end.isnan().all()
            assert end.shape == (2,)


def test_a_rank_correlation_has_ties_at_their_mean_rank_and_is_undefined_of_equal_values() -> None:
    assert math.isnan(spearman(torch.ones(1, 4), torch.arange(4)[None]).item())
    assert math.isnan(spearman(torch.ones(1, 1), torch.ones(1, 1)).item())
    ties = torch.tensor([[1.0, 2.0, 2.0, 5.0]]), torch.tensor([[3.0, 1.0, 4.0, 4.0]])
    assert spearman(*ties).item() == pytest.approx(
        stats.spearmanr(*(tied[0].numpy() for tied in ties)).statistic
    )
