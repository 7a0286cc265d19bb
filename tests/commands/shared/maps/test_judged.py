"""Which map may be trusted follows from the paired differences and the whole cascade, at the interval's worse end."""

import pytest

from tests.commands.map_rows import STAYING, map_check
from vitlens.analysis.faithfulness import league
from vitlens.commands.shared.maps.findings import listed, map_findings, uniform_finding
from vitlens.commands.shared.maps.judged import explanation_verdict, judged_map, judged_maps
from vitlens.commands.shared.maps.rows import BASELINES, MapCheck
from vitlens.report.findings import ranked
from vitlens.uncertainty import Estimate


def test_the_baselines_are_those_of_the_checks() -> None:
    assert BASELINES == league.BASELINES


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (map_check(), "pass"),
        (map_check(over_centre=0.04), "warn"),  # its interval holds 0
        (map_check(over_random=0.04, over_centre=-0.2), "fail"),
        (map_check(cascade=STAYING), "fail"),
        (map_check(cascade=None), "inconclusive"),
        (map_check(kept=0.95), "inconclusive"),
        (map_check(randomised=4), "inconclusive"),
        (map_check(randomised=0), "inconclusive"),
        (map_check(n=5), "inconclusive"),
        (map_check(unusable=100), "fail"),
    ],
)
def test_states(check: MapCheck, state: str) -> None:
    assert judged_map(check).state == state


def test_a_difference_must_hold_for_as_many_looks_as_there_are_methods() -> None:
    check = map_check(over_centre=0.06)
    assert judged_map(check).state == "pass"
    assert judged_map(check, 19).state == "warn"


def test_the_verdict_is_that_of_the_best_map() -> None:
    checks = [
        map_check(method="rollout", over_random=0.5, over_centre=0.4, cascade=STAYING),
        map_check(method="gradcam", over_random=0.3, over_centre=0.2),
        map_check(method="relevance", over_random=0.35, over_centre=0.25),
    ]
    assert [each.check.method for each in judged_maps(checks)] == ["relevance", "gradcam", "rollout"]
    verdict = explanation_verdict("vit", checks, untested="add --verify")
    assert (verdict.state, verdict.value and verdict.value.value) == ("pass", 0.25)
    assert verdict.because.startswith("relevance")
    assert explanation_verdict("vit", checks[:1], untested="").state == "fail"
    unchecked = explanation_verdict("vit", [], untested="add --verify")
    assert (unchecked.state, unchecked.because) == ("not tested", "add --verify")


def test_a_method_that_ignores_the_weights_is_named_first() -> None:
    checks = [map_check(method="edges", over_random=0.31, cascade=(1.0,) * 6), map_check()]
    first = ranked(map_findings("vit", checks))[0]
    assert "**edges**" in first.claim.text
    assert first.effect.value == 1.0
    assert checks[0] in first.claim.rows


def test_a_method_below_a_baseline_is_named_with_the_largest_shortfall() -> None:
    checks = [map_check(), map_check(method="gradcam", over_random=0.05, over_centre=-0.3)]
    (found,) = ranked(map_findings("vit", checks))
    assert "**gradcam**" in found.claim.text
    assert "`centre`" in found.claim.text
    assert found.effect.value == pytest.approx(-0.3)


@pytest.mark.parametrize(("gap", "support"), [(0.2, "two methods agree"), (0.6, "methods disagree")])
def test_a_clear_best_is_named_with_its_lead_and_what_insertion_says(gap: float, support: str) -> None:
    second = map_check(method="gradcam", over_random=0.2, leader=("relevance", -0.15), road=0.3, gap=gap)
    (found,) = ranked(map_findings("vit", [map_check(over_random=0.35, road=0.4), second]))
    assert found.effect.value == pytest.approx(0.15)
    assert found.support == support
    near = map_check(method="gradcam", over_random=0.3, leader=("relevance", -0.05))
    assert not ranked(map_findings("vit", [map_check(over_random=0.35), near]))


def test_uniform_maps() -> None:
    row = map_check(unusable=60)
    found = uniform_finding("vit", {"relevance": 60, "gradcam": 1}, 100, [row])
    assert found is not None
    assert found.effect.value == 0.6
    assert uniform_finding("vit", {"relevance": 0}, 100, [row]) is None
    assert uniform_finding("vit", {"relevance": 5}, 100, [row]) is None
    assert uniform_finding("vit", {}, 0, []) is None


def test_names_in_a_sentence() -> None:
    assert [listed(list("abcdef")[:count]) for count in (1, 2, 4, 6)] == [
        "a", "a and b", "a, b, c and d", "a, b, c, d and 2 more",
    ]  # fmt: skip


def test_the_similarity_is_that_of_the_decisive_stage() -> None:
    check = map_check(cascade=STAYING)
    assert check.cascade is not None
    assert check.cascade.similarity == Estimate(0.92, 0.92 - 0.05, 0.92 + 0.05, 32, "")
