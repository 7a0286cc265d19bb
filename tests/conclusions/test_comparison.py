"""Two models on the same images: the row against an independent computation, and the judgement of its interval."""

import numpy as np
import pytest
from scipy.stats import binomtest

from vitlens.commands.shared.comparison import UNDECIDED, accuracy_claims, in_pairs, which_is_better
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import Estimate, wilson

N = 400


def correct(seed: int, **errors: float) -> dict[str, np.ndarray]:
    """Which images each model classifies correctly: errors of its own at this share."""
    generator = np.random.default_rng(seed)
    return {name: generator.random(N) >= share for name, share in errors.items()}


def test_rows_are_counts_with_exact_tests_corrected_together():
    outcomes = correct(0, a=0.05, b=0.2, c=0.06)
    rows = in_pairs(outcomes)
    assert [(row.first, row.second) for row in rows] == [("a", "b"), ("a", "c"), ("b", "c")]
    tests = []
    for row in rows:
        one, two = outcomes[row.first], outcomes[row.second]
        alone = sum(one & ~two), sum(two & ~one)
        assert (row.only_first_right, row.only_second_right) == alone
        assert (row.both_right, row.both_wrong) == (sum(one & two), sum(~one & ~two))
        assert row.difference.value == pytest.approx(100 * (one.mean() - two.mean()))
        assert row.p == pytest.approx(binomtest(int(alone[0]), int(sum(alone))).pvalue)
        assert row.gain(row.second).value == -row.difference.value
        assert (row.gain(row.second).low, row.gain(row.second).high) == (-row.difference.high, -row.difference.low)
        tests.append(row.p)
    smallest = int(np.argmin(tests))
    assert rows[smallest].p_holm == pytest.approx(min(1.0, 3 * tests[smallest]))
    assert [row.better for row in rows] == ["a", UNDECIDED, "c"]


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [
        (-0.9, 0.4, "pass"),
        (-1.5, 0.5, "inconclusive"),
        (-9.0, -0.5, "inconclusive"),
        (-4.0, -1.5, "warn"),
        (-9.0, -1.5, "warn"),
        (-9.0, -5.5, "fail"),
    ],
)
def test_a_difference_is_judged_by_its_whole_interval(low: float, high: float, state: str):
    gap = Estimate((low + high) / 2, low, high, N, "points")
    assert LIMITS["accuracy"].judge_difference(gap) == state


@pytest.mark.parametrize("share", [0.05, 0.07, 0.12, 0.3])
def test_what_is_not_decided_is_neither_warned_of_nor_failed(share: float):
    """No significant lead, and no warning beside it; over seeds."""
    states = set()
    for seed in range(10):
        outcomes = correct(seed, a=0.05, b=share)
        accuracies = {name: wilson(int(each.sum()), N) for name, each in outcomes.items()}
        rows = in_pairs(outcomes, seed=seed)
        questions = {claim.question for claim in which_is_better(accuracies, rows)}
        judged = {claim.state for claim in accuracy_claims(accuracies, rows)}
        assert questions == {"which is better" if rows[0].decided else "no difference"}
        assert rows[0].decided or judged <= {"pass", "inconclusive"}
        states |= judged
    assert ("fail" in states) if share == 0.3 else ("fail" not in states or share == 0.12)
