"""What is said of the causes of a difference in robustness follows the tests."""

import pytest

from tests.conclusions.test_attack import claimed, curve
from vitlens.commands.attack.record import CandidateRow, RobustnessGapRow, UntestedGapRow
from vitlens.uncertainty import Estimate

CURVES = [
    curve(model, epsilon, right)
    for model in ("a", "b")
    for epsilon, right in ((0, 190), (1, 120), (8, 5))
]


def gap(points: float, p: float) -> RobustnessGapRow:
    difference = Estimate(points, points - 5, points + 5, 100, "points")
    return RobustnessGapRow("a", "b", "PGD", 4.0, difference, 0.7, 0.4, p)


def candidate(name: str, points: float, p_holm: float) -> CandidateRow:
    def near(value: float) -> Estimate:
        return Estimate(value, value - 5, value + 5, 100, "points")

    return CandidateRow(
        "a", "b", name, 1.0, 2.0, near(30.0), near(30.0 - points), near(points), p_holm, p_holm
    )


def test_a_candidate_is_named_with_its_part_and_what_its_control_leaves():
    rows = (candidate("margin", 20, 0.001), candidate("frequency", 1, 0.9))
    (claim,) = claimed(
        "why robustness differs",
        *CURVES,
        robustness_gap=(gap(30, 0.001),),
        robustness_candidates=rows,
    )
    assert (claim.state, claim.evidence, claim.effect.value) == ("pass", "intervened", 20)
    assert "The margin accounts for 20.0 points" in claim.says
    assert "10.0 points are left" in claim.says
    assert "1 of 2 candidates" in claim.because


@pytest.mark.parametrize(
    ("points", "p", "state"), [(30.0, 0.001, "inconclusive"), (2.0, 0.7, "not tested")]
)
def test_without_a_significant_part_or_a_difference_nothing_is_a_cause(points, p, state):
    (claim,) = claimed(
        "why robustness differs",
        *CURVES,
        robustness_gap=(gap(points, p),),
        robustness_candidates=(candidate("margin", 9, 0.2),),
    )
    assert claim.state == state
    assert claim.is_null
    assert claim.effect is None


def test_models_without_common_correct_images_are_not_tested_with_the_reason():
    row = UntestedGapRow("a", "b", "both models classify only 3 attacked images correctly")
    (claim,) = claimed("why robustness differs", *CURVES, robustness_untested=(row,))
    assert (claim.state, claim.because) == ("not tested", row.reason)
