"""Limits judge by the worse end of an interval; a difference by its whole interval."""

import pytest

from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import Estimate


@pytest.mark.parametrize(
    ("value", "limit", "state"),
    [
        (Estimate(0.9, 0.5, 0.95), "robustness", "pass"),
        (Estimate(0.9, 0.49, 0.95), "robustness", "warn"),
        (Estimate(0.9, 0.09, 0.95), "robustness", "fail"),
        (Estimate(0.01, 0.0, 0.03), "calibration", "pass"),
        (Estimate(0.01, 0.0, 0.031), "calibration", "warn"),
        (Estimate(0.01, 0.0, 0.081), "calibration", "fail"),
        (Estimate(0.05), "calibration", "warn"),
        (Estimate(0.5, -0.9, 1.0, unit="points"), "accuracy", "pass"),
        (Estimate(0.5, -5.1, 1.0, unit="points"), "accuracy", "fail"),
    ],
)
def test_states(value: Estimate, limit: str, state: str) -> None:
    assert LIMITS[limit].judge(value) == state


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [(-0.9, 1.0, "pass"), (-9.0, 1.0, "inconclusive"), (-9.0, -2.0, "warn"), (-9.0, -5.1, "fail")],
)
def test_a_difference_is_judged_by_both_ends(low: float, high: float, state: str) -> None:
    assert LIMITS["accuracy"].judge_difference(Estimate((low + high) / 2, low, high, unit="points")) == state
