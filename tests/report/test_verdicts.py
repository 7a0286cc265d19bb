"""Verdicts are judged on the worse end of an interval."""

import pytest

from vitlens.report.document import Document
from vitlens.report.claims import finding, ranked
from vitlens.report.terminal import summary_lines
from vitlens.report.verdicts import ACCURACY, CALIBRATION, ROBUSTNESS, Threshold, judged, not_tested
from vitlens.uncertainty import Estimate


@pytest.mark.parametrize(
    ("value", "threshold", "state"),
    [
        (Estimate(0.9, 0.5, 0.95), ROBUSTNESS, "pass"),
        (Estimate(0.9, 0.49, 0.95), ROBUSTNESS, "warn"),
        (Estimate(0.9, 0.09, 0.95), ROBUSTNESS, "fail"),
        (Estimate(0.01, 0.0, 0.03), CALIBRATION, "pass"),
        (Estimate(0.01, 0.0, 0.031), CALIBRATION, "warn"),
        (Estimate(0.01, 0.0, 0.081), CALIBRATION, "fail"),
        (Estimate(0.05), CALIBRATION, "warn"),
        (Estimate(0.5, -0.9, 1.0, unit="points"), ACCURACY, "pass"),
        (Estimate(0.5, -5.1, 1.0, unit="points"), ACCURACY, "fail"),
    ],
)
def test_states(value: Estimate, threshold: Threshold, state: str) -> None:
    assert judged("it", value, threshold, "because").state == state


def test_thresholds_are_printed() -> None:
    assert ROBUSTNESS.words == "pass from 50 %, warn from 10 %"
    assert CALIBRATION.words == "pass to 3 %, warn to 8 %"
    assert ACCURACY.words == "pass from -1 points, warn from -5 points"


def test_lines_of_the_terminal_have_every_verdict_and_the_first_findings() -> None:
    verdicts = (judged("calibration", Estimate(0.01, 0.0, 0.02, 50), CALIBRATION, "of **a**"), not_tested("x", "no"))
    found = [
        finding(f"**a** is `{n}`.", Estimate(n, n - 1, n + 1, unit="points"), kind="fact") for n in (2.0, 5.0, 4.0, 3.0)
    ]
    lines = list(summary_lines(Document("t", (), verdicts=verdicts, findings=ranked(found))))
    assert len(lines) == 2 + 3
    assert lines[0].startswith("calibration  pass: 1.0 % (0.0 to 2.0, n = 50)")
    assert lines[1].startswith("x            not tested")
    assert lines[2] == "1. a is 5.0. [5.0 points (4.0 to 6.0)]"
