import numpy as np
import pytest
from scipy import stats

from vitlens.errors import InputError
from vitlens.uncertainty import (
    POWER,
    Estimate,
    Side,
    accuracy_difference,
    apart,
    beyond,
    bootstrap_difference,
    bootstrap_mean,
    difference_of,
    holm,
    mcnemar,
    median_of,
    power_of,
    student_mean,
    student_test,
    widened,
    wilson,
)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 20), (7, 20), (20, 20), (447, 480)])
def test_wilson_is_scipys(successes: int, n: int) -> None:
    interval = stats.binomtest(successes, n).proportion_ci(method="wilson")
    ours = wilson(successes, n)
    assert (ours.value, ours.n, ours.unit) == (successes / n, n, "fraction")
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_the_bootstrap_of_the_mean_is_close_to_the_normal_interval_and_chunks_do_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(0).normal(3, 2, size=400)
    estimate = bootstrap_mean(values, seed=1, unit="nats")
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.05 * half)
    assert (estimate.n, estimate.unit) == (400, "nats")
    assert estimate != bootstrap_mean(values, seed=4, unit="nats")
    whole = bootstrap_mean(np.arange(50.0), seed=3)
    monkeypatch.setattr("vitlens.uncertainty._AT_ONCE", 50 * 7)
    assert bootstrap_mean(np.arange(50.0), seed=3) == whole


def test_groups_of_one_are_no_groups_and_copies_add_no_certainty() -> None:
    values = np.random.default_rng(0).normal(size=60)
    alone = bootstrap_mean(values, seed=0)
    assert bootstrap_mean(values, groups=np.arange(60), seed=0) == alone
    copied = bootstrap_mean(np.repeat(values, 5), groups=np.repeat(np.arange(60), 5), seed=0)
    assert copied.n == 300
    assert (copied.value, copied.low, copied.high) == pytest.approx((alone.value, alone.low, alone.high))
    naive = bootstrap_mean(np.repeat(values, 5), seed=0)
    assert naive.high - naive.low < 0.6 * (alone.high - alone.low)


def test_pairing_takes_away_what_the_images_share() -> None:
    generator = np.random.default_rng(0)
    hard = generator.normal(0, 5, size=200)
    first, second = hard + 1 + generator.normal(0, 0.1, 200), hard + generator.normal(0, 0.1, 200)
    estimate = bootstrap_difference(first, second)
    assert estimate.low < 1 < estimate.high
    assert estimate.high - estimate.low < 0.1


def test_a_difference_of_two_fractions_is_newcombes() -> None:
    """Newcombe 1998, table II, method 10: 56 of 70 and 48 of 80."""
    found = difference_of(wilson(56, 70), wilson(48, 80))
    assert (found.value, found.low, found.high) == pytest.approx((20.0, 5.24, 33.39), abs=0.005)
    assert (found.n, found.unit) == (80, "points")
    assert difference_of(Estimate(0.5), wilson(48, 80)).low is None


def test_holm_by_hand_and_bounded_by_bonferroni() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    p = np.random.default_rng(0).uniform(size=30)
    adjusted = np.array(holm(p.tolist()))
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(1, 30 * p)).all()
    assert (np.argsort(adjusted, kind="stable")[:1] == np.argsort(p)[:1]).all()
    assert holm([]) == []


def test_mcnemar_is_the_binomial_test_of_the_discordant() -> None:
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)


REFUSED = [
    (wilson, (0, 0), "found"), (wilson, (-1, 3), "found"), (wilson, (4, 3), "found"), (bootstrap_mean, ([],), "n > 0"),
    (bootstrap_mean, ([[1.0]],), "shape"), (bootstrap_mean, ([1.0, float("nan")],), "finite"),
    (bootstrap_difference, ([1, 2], [1, 2, 3]), "2 and 3"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "values", "words"), REFUSED)
def test_values_that_are_none_are_refused(function, values, words) -> None:
    with pytest.raises(InputError, match=words):
        function(*values)


@pytest.mark.parametrize("n", [6, 9, 101])
def test_the_interval_of_a_median_is_scipys(n: int) -> None:
    values = np.random.default_rng(n).exponential(size=n)
    found = median_of(values, unit="ms")
    expected = stats.quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
    assert (found.value, found.n, found.unit) == (np.median(values), n, "ms")
    assert (found.low, found.high) == (expected.low, expected.high)


@pytest.mark.parametrize(
    ("estimate", "value", "side"),
    [
        (Estimate(0.5, 0.4, 0.6), 0.3, Side.ABOVE),
        (Estimate(0.5, 0.4, 0.6), 0.7, Side.BELOW),
        (Estimate(0.5, 0.4, 0.6), 0.59, Side.UNDECIDED),
        (Estimate(0.5, 0.4, 0.6), 0.4, Side.UNDECIDED),  # the end belongs to the interval
        (Estimate(0.5, n=1), 0.0, Side.UNDECIDED),  # one image shows nothing
    ],
)
def test_a_side_is_shown_by_the_interval_alone(estimate, value, side):
    assert beyond(estimate, value) is side


@pytest.mark.parametrize(
    ("one", "other", "side"),
    [
        (Estimate(0.5, 0.4, 0.6), Estimate(0.2, 0.1, 0.3), Side.ABOVE),
        (Estimate(0.2, 0.1, 0.3), Estimate(0.5, 0.4, 0.6), Side.BELOW),
        (Estimate(0.5, 0.4, 0.6), Estimate(0.3, 0.1, 0.5), Side.UNDECIDED),
        (Estimate(0.9, 0.8, 1.0), Estimate(0.1, n=1), Side.UNDECIDED),
    ],
)
def test_intervals_stand_apart_or_not(one, other, side):
    assert apart(one, other) is side


def test_students_interval_is_scipys_and_groups_count_once() -> None:
    values = np.random.default_rng(0).normal(1, 2, 6)
    found = student_mean(values, unit="px")
    expected = stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert (found.n, found.unit) == (6, "px")
    copied = student_mean(np.repeat(values, 3), groups=np.repeat(np.arange(6), 3))
    assert (copied.low, copied.high) == pytest.approx(expected)
    assert student_mean([3.0]).low is None


def test_an_interval_is_widened_by_bonferronis_correction() -> None:
    one = Estimate(1.0, 0.5, 2.0, 9, "nats")
    assert widened(one, 1) == one
    wide = widened(one, 10)
    factor = stats.norm.ppf(1 - 0.05 / 20) / stats.norm.ppf(0.975)
    assert (wide.low, wide.high) == pytest.approx((1 - 0.5 * factor, 1 + factor))
    assert widened(Estimate(1.0), 10) == Estimate(1.0)


def test_few_values_or_groups_have_no_interval():
    assert bootstrap_mean([0.3], unit="nats") == Estimate(0.3, n=1, unit="nats")
    assert bootstrap_mean([0.0, 1.0], groups=[4, 4]) == Estimate(0.5, n=2)
    assert bootstrap_mean([1, 1, 1, 0], groups=["a", "a", "a", "b"]).value == 0.75  # the mean over images
    assert median_of([3.0, 1.0, 2.0]) == Estimate(2.0, n=3)
    assert power_of([1.0]) is power_of([1.0, 2.0], groups=[3, 3]) is None


def test_students_test_of_a_few_values_is_scipys() -> None:
    values = np.random.default_rng(0).standard_normal((20, 4)) + 1
    for row in values:
        assert student_test(row) == pytest.approx(float(stats.ttest_1samp(row, 0).pvalue), abs=1e-12)
    assert student_test([0.1, 0.1, 0.1]) < 1e-12
    assert student_test([0.0, 0.0]) == student_test([3.0]) == 1.0


def test_a_detectable_difference_is_found_with_the_power_that_is_stated() -> None:
    random = np.random.default_rng(0)
    values = random.normal(0, 0.3, (2000, 56))
    known = [power_of(row) for row in values]
    assert known[0].error == pytest.approx(float(stats.sem(values[0])))
    assert known[0].detectable == pytest.approx(2.8016 * known[0].error, rel=1e-4)
    effect = 2.8016 * 0.3 / np.sqrt(56)
    found = np.mean([student_test(row + effect) < 0.05 for row in values])
    assert found == pytest.approx(POWER, abs=0.03)


def test_power_counts_groups_not_copies() -> None:
    values = np.random.default_rng(0).normal(0, 1, 20)
    alone, copied = power_of(values), power_of(np.repeat(values, 5), groups=np.repeat(np.arange(20), 5))
    assert copied.detectable == pytest.approx(alone.detectable)
    assert (copied.n, copied.groups) == (100, 20)


def test_models_that_never_differ_are_not_shown_to_be_equal() -> None:
    """Two models right on both of two images: the interval of their difference is not 0 points wide."""
    few = accuracy_difference([True, True], [True, True])
    assert (few.value, few.high, few.n) == (0, 100 * (wilson(0, 2).high or 0), 2)
    assert few.low == -few.high
    many = accuracy_difference(np.zeros(300), np.zeros(300))
    assert 1 < (many.high or 0) < 1.5
    grouped = accuracy_difference(np.zeros(300), np.zeros(300), groups=np.arange(300) // 10)
    assert grouped.high == 100 * (wilson(0, 30).high or 0)


def test_where_models_differ_their_difference_is_the_paired_bootstrap() -> None:
    first, second = np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1])
    expected = bootstrap_difference(100 * first, 100 * second, seed=1, unit="points")
    assert accuracy_difference(first, second, seed=1) == expected
