"""Intervals and tests are those of scipy or of a paper; copies of a value add nothing."""

import numpy as np
import pytest
from scipy import stats

from vitlens import resampling
from vitlens import uncertainty as ours
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate, Side

HALF = Estimate(0.5, 0.4, 0.6)
LESS = Estimate(0.2, 0.1, 0.3)
VALUES = np.random.default_rng(0).normal(1, 2, 60)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (7, 20), (447, 480)])
def test_wilson_is_scipys(successes, n):
    interval = stats.binomtest(successes, n).proportion_ci(method="wilson")
    estimate = ours.wilson(successes, n)
    assert (estimate.value, estimate.n, estimate.unit) == (successes / n, n, "fraction")
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_wilson_of_repeated_observations_is_as_wide_as_of_their_sources():
    interval = ours.wilson(30, 40, independent=10)
    once = ours.share_of(np.repeat([1, 0], [30, 10]), groups=np.arange(40) // 4)
    sources = stats.binomtest(30, 40).proportion_ci(method="wilson")
    assert (interval.value, interval.n) == (0.75, 40)
    assert interval.low < sources.low < sources.high < interval.high
    assert interval.high - interval.low == pytest.approx(0.48, abs=0.03)  # of 7.5 in 10 sources
    assert interval.low <= once.value <= interval.high


def test_the_bootstrap_of_the_mean_is_close_to_the_normal_interval_and_chunks_do_not_show(
    monkeypatch,
):
    values = np.random.default_rng(0).normal(3, 2, size=400)
    interval = ours.bootstrap_mean(values, seed=1, unit="nats")
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert interval.value == pytest.approx(values.mean())
    assert (interval.low, interval.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.05 * half
    )
    assert (interval.n, interval.unit) == (400, "nats")
    assert interval != ours.bootstrap_mean(values, seed=4, unit="nats")
    expected = ours.bootstrap_mean(np.arange(50.0), seed=3)
    monkeypatch.setattr("vitlens.resampling._AT_ONCE", 50 * 7)
    assert ours.bootstrap_mean(np.arange(50.0), seed=3) == expected
    assert list(resampling.steps(10, 100)) == [(0, 3), (3, 3), (6, 3), (9, 1)]


@pytest.mark.parametrize("function", [ours.bootstrap_mean, ours.student_mean])
def test_groups_of_one_are_no_groups_and_copies_add_no_certainty(function):
    alone = function(VALUES)
    assert function(VALUES, groups=np.arange(60)) == alone
    copied = function(np.repeat(VALUES, 5), groups=np.repeat(np.arange(60), 5))
    assert copied.n == 300
    assert (copied.value, copied.low, copied.high) == pytest.approx(
        (alone.value, alone.low, alone.high)
    )
    assert function([1, 1, 1, 0], groups=["a", "a", "a", "b"]).value == 0.75  # the mean over images
    # few values or groups have no interval
    assert function([0.3], unit="nats") == Estimate(0.3, n=1, unit="nats")
    assert function([0.0, 1.0], groups=[4, 4]) == Estimate(0.5, n=2)
    assert function([0.0, 1.0]).low is not None


def test_a_difference_of_two_fractions_is_newcombes():
    """Newcombe 1998, table II, method 10: 56 of 70 and 48 of 80."""
    wilson = ours.wilson(48, 80)
    estimate = ours.difference_of(ours.wilson(56, 70), wilson)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (20.0, 5.24, 33.39), abs=0.005
    )
    assert (estimate.n, estimate.unit) == (80, "points")
    for pair in ((Estimate(0.5), wilson), (wilson, Estimate(0.5))):
        assert ours.difference_of(*pair).low is None


def test_holm_and_mcnemar_by_hand():
    assert ours.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (ours.holm([0.9, 0.4, 0.8]), ours.holm([])) == ([1.0, 1.0, 1.0], [])
    assert ours.mcnemar(0, 0) == ours.mcnemar(5, 5) == 1.0
    assert ours.mcnemar(1, 9) == ours.mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (ours.wilson, (0, 0)),
        (ours.wilson, (-1, 3)),
        (ours.wilson, (4, 3)),
        (ours.bootstrap_mean, ([],)),
        (ours.bootstrap_mean, ([[1.0]],)),
        (ours.bootstrap_mean, ([1.0, float("nan")],)),
        (ours.bootstrap_difference, ([1, 2], [1, 2, 3])),
    ],
)
def test_values_that_are_none_are_refused(function, values):
    with pytest.raises(InputError):
        function(*values)


@pytest.mark.parametrize("n", [6, 9, 101])
def test_the_interval_of_a_median_is_scipys(n):
    values = np.random.default_rng(n).exponential(size=n)
    estimate = ours.median_of(values, unit="ms")
    expected = stats.quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
    assert (estimate.value, estimate.n, estimate.unit) == (np.median(values), n, "ms")
    assert (estimate.low, estimate.high) == (expected.low, expected.high)
    assert ours.median_of(values[:5]).low is None


def test_copies_of_a_value_make_a_median_no_more_certain():
    values = np.random.default_rng(0).exponential(size=40)
    alone = ours.median_of(values)
    copied = ours.median_of(np.repeat(values, 10), groups=np.repeat(np.arange(40), 10))
    assert copied.value == alone.value
    assert copied.n == 400
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high), abs=0.1)
    assert ours.median_of(np.repeat(values, 10)).low > copied.low
    assert ours.median_of(np.repeat(values[:5], 10), groups=np.repeat(np.arange(5), 10)).low is None


def test_a_change_of_correctness_that_is_the_same_everywhere_has_a_width():
    nothing = ours.mean_points([0.0] * 20)
    largest = ours.wilson(0, 20).high
    assert (nothing.low, nothing.value, nothing.high) == (
        -nothing.high,
        0,
        pytest.approx(100 * largest),
    )
    copied = ours.mean_points([0.0] * 20, groups=np.arange(20) // 4)
    assert copied.high == pytest.approx(100 * ours.wilson(0, 5).high)
    assert ours.mean_points([100.0] * 20).high == 100
    varied = ours.mean_points([100.0, 0.0, 0.0, -100.0, 0.0])
    assert varied == ours.student_mean(
        [100.0, 0.0, 0.0, -100.0, 0.0], unit="points", least=-100.0, most=100.0
    )


@pytest.mark.parametrize(
    ("estimate", "value", "side"),
    [
        (HALF, 0.3, Side.ABOVE),
        (HALF, 0.7, Side.BELOW),
        (HALF, 0.4, Side.UNDECIDED),  # the ends belong to the interval
        (HALF, 0.6, Side.UNDECIDED),
        (Estimate(0.5, n=1), 0.0, Side.UNDECIDED),  # one image shows nothing
        (HALF, LESS, Side.ABOVE),
        (LESS, HALF, Side.BELOW),
        (HALF, Estimate(0.3, 0.1, 0.4), Side.UNDECIDED),
        (Estimate(0.3, 0.1, 0.4), HALF, Side.UNDECIDED),
        (HALF, Estimate(0.1, n=1), Side.UNDECIDED),
    ],
)
def test_a_side_is_shown_by_the_intervals_alone(estimate, value, side):
    assert (ours.apart if isinstance(value, Estimate) else ours.beyond)(estimate, value) is side


def test_students_interval_and_test_are_scipys():
    values = VALUES[:6]
    estimate = ours.student_mean(values, unit="px")
    assert (estimate.low, estimate.high) == pytest.approx(
        stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
    )
    assert (estimate.n, estimate.unit) == (6, "px")
    free = ours.student_mean([1.0, 1.0, 0.5])
    ended = ours.student_mean([1.0, 1.0, 0.5], least=0.6, most=1.0)
    assert free.low < 0.6 < 1.0 < free.high
    assert (ended.low, ended.high) == (0.6, 1.0)
    for row in VALUES.reshape(15, 4):
        assert ours.student_test(row) == pytest.approx(
            float(stats.ttest_1samp(row, 0).pvalue), abs=1e-12
        )
    assert ours.student_test([0.1, 0.1, 0.1]) < 1e-12
    assert ours.student_test([0.0, 0.0]) == ours.student_test([3.0]) == 1.0


def test_an_interval_is_widened_by_bonferronis_correction():
    one = Estimate(1.0, 0.5, 2.0, 9, "nats")
    assert ours.widened(one, 1) == one
    wide = ours.widened(one, 10)
    factor = stats.norm.ppf(1 - 0.05 / 20) / stats.norm.ppf(0.975)
    assert (wide.low, wide.high) == pytest.approx((1 - 0.5 * factor, 1 + factor))
    assert (wide.n, wide.unit) == (9, "nats")
    assert ours.widened(Estimate(1.0), 10) == Estimate(1.0)


def test_a_detectable_difference_is_that_of_a_power_of_80_percent_and_copies_add_none():
    power = ours.power_of(VALUES)
    assert power.error == pytest.approx(float(stats.sem(VALUES)))
    quantiles = stats.t.ppf([0.975, 0.8], 59).sum()
    assert power.detectable == pytest.approx(quantiles * power.error)
    copied = ours.power_of(np.repeat(VALUES, 5), groups=np.repeat(np.arange(60), 5))
    assert copied.detectable == pytest.approx(power.detectable)
    assert (copied.n, copied.groups) == (300, 60)
    assert ours.power_of([1.0]) is ours.power_of([1.0, 2.0], groups=[3, 3]) is None


def test_models_that_never_differ_are_not_shown_to_be_equal():
    """Two models right on both of two images: the interval of their difference is not 0 points
    wide.
    """
    for n, groups, independent in ((2, None, 2), (300, None, 300), (300, np.arange(300) // 10, 30)):
        estimate = ours.accuracy_difference(np.ones(n), np.ones(n), groups=groups)
        assert (estimate.value, estimate.high, estimate.n) == (
            0,
            100 * ours.wilson(0, independent).high,
            n,
        )
        assert estimate.low == -estimate.high
    assert ours.accuracy_difference([1], [1]).low is None
    first = np.array([1, 1, 0, 1] * 2)
    second = np.array([1, 0, 0, 1] * 2)
    estimate = ours.accuracy_difference(first, second, seed=1)
    differing = ours.bootstrap_mean([0, 1, 0, 0] * 2, seed=1)
    assert estimate == ours.bootstrap_difference(100 * first, 100 * second, seed=1, unit="points")
    assert (estimate.value, estimate.high) == pytest.approx((25, 100 * differing.high))


def test_a_difference_that_is_the_same_everywhere_has_an_interval():
    always = ours.accuracy_difference([1, 1], [0, 0])
    assert (always.value, always.high) == (100, 100)
    assert always.low < 0  # two images do not show that the first is better
    cancelling = ours.accuracy_difference([1, 0, 1, 0], [0, 1, 0, 1], groups=[0, 0, 1, 1])
    assert cancelling.low < 0 < cancelling.high


def test_groups_count_once_in_a_paired_test():
    first = np.array([1, 1, 1, 0, 1])
    second = np.array([0, 0, 0, 1, 1])
    assert ours.paired_test(first, second) == ours.mcnemar(3, 1)
    assert ours.paired_test(first, second, groups=[0, 0, 0, 1, 2]) == ours.mcnemar(1, 1)
    with pytest.raises(InputError):
        ours.paired_test(first, second, groups=[0])


@pytest.mark.parametrize("sizes", [[8] * 4, [40, 5, 5, 5, 5, 5, 5, 5], [1, 1, 2, 2, 4, 4, 8, 8]])
def test_unequal_groups_weigh_as_their_images_do(sizes):
    """The error is the delete-a-group jackknife's, the degrees of freedom those of as many groups
    of equal size.
    """
    members = np.repeat(np.arange(len(sizes)), sizes)
    values = np.random.default_rng(1).normal(size=len(sizes))[members] + VALUES[0]
    left_out = [values[members != group].mean() for group in range(len(sizes))]
    error = np.sqrt((len(sizes) - 1) * np.var(left_out))
    worth = np.sum(sizes) ** 2 / np.sum(np.square(sizes))
    half = error * stats.t.ppf(0.975, worth - 1)
    estimate = ours.student_mean(values, groups=members)
    assert (estimate.low, estimate.high) == pytest.approx(
        (values.mean() - half, values.mean() + half)
    )
    assert ours.student_test(values, groups=members) == pytest.approx(
        2 * stats.t.sf(abs(values.mean()) / error, worth - 1)
    )
    few = ours.bootstrap_mean(values, groups=members)  # worth too few to draw from
    assert (few.low, few.high) == pytest.approx((estimate.low, estimate.high))


def test_a_bootstrap_interval_is_expanded_for_the_number_of_values():
    """Hesterberg (2015): the quantile of n values is that of a normal approximation with n - 1
    degrees of freedom.
    """
    values = VALUES[:8]
    means = resampling.resampled_means(values, np.ones(8), seed=3, draws=10_000)
    below = stats.norm.cdf(-np.sqrt(8 / 7) * stats.t.ppf(0.975, 7))
    estimate = ours.bootstrap_mean(values, seed=3)
    assert (estimate.low, estimate.high) == pytest.approx(
        tuple(np.quantile(means, [below, 1 - below]))
    )
    few = ours.bootstrap_mean([0.9, 1.0, 0.2], least=0.0, most=1.0)
    free = ours.student_mean([0.9, 1.0, 0.2])
    assert (few.low, few.high) == (max(free.low, 0.0), 1.0)


def test_the_share_of_grouped_successes_is_bounded_and_copies_add_no_certainty():
    right = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    alone = ours.share_of(right)
    assert alone == ours.wilson(8, 10)
    copied = ours.share_of(np.repeat(right, 6), groups=np.repeat(np.arange(10), 6))
    assert (copied.value, copied.n) == (0.8, 60)
    # Student's quantile instead of the normal one
    assert copied.low < alone.low < alone.high < copied.high < 1
    nearly = ours.share_of([1] * 59 + [0], groups=np.repeat(np.arange(3), 20))
    assert 0 <= nearly.low < nearly.high <= 1


def test_the_exact_test_of_calibration_is_the_binomial_test_of_equal_confidences():
    chances = stats.binom.pmf(np.arange(51), 50, 0.9)
    expected = chances[np.abs(np.arange(51) - 45) >= 5].sum()
    assert ours.calibration_test([0.9] * 50, 40) == pytest.approx(expected, abs=1e-12)
    normal = ours.calibration_test(np.full(6000, 0.9), 5340)  # beyond the limit of the exact test
    assert normal == pytest.approx(2 * stats.binom.cdf(5340, 6000, 0.9), rel=0.1)
    for n in (5000, 6000):  # exact, and beyond its limit
        assert (ours.calibration_test([1.0] * n, n), ours.calibration_test([1.0] * n, n // 2)) == (
            1,
            0,
        )


def test_fractions_in_points_and_numbers_that_json_lacks():
    assert ours.in_points(Estimate(0.5, 0.25, 0.75, 8)) == Estimate(50, 25, 75, 8, "points")
    assert ours.in_points(Estimate(0.5)) == Estimate(50, unit="points")
    assert ours.in_points(Estimate(0.5, unit="nats")) == Estimate(0.5, unit="nats")
    assert [ours.finite(value) for value in (1, float("nan"), float("-inf"))] == [1.0, None, None]


def test_welchs_difference_is_scipys_and_what_does_not_vary_shows_nothing():
    draw = np.random.default_rng(0)
    one = draw.normal(1, 2, 5)
    other = draw.normal(0, 0.3, 9)
    gap, p = ours.welch(one, other, unit="points")
    test = stats.ttest_ind(one, other, equal_var=False)
    assert (gap.low, gap.high) == pytest.approx(tuple(test.confidence_interval()))
    assert (gap.value, gap.n, p) == (
        pytest.approx(one.mean() - other.mean()),
        14,
        pytest.approx(test.pvalue),
    )
    for pair in (([1.0], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0 + 1e-12])):
        gap, p = ours.welch(*pair, unit="points")
        assert (gap.low, p) == (None, 1.0)
