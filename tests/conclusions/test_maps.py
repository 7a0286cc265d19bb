"""A map passes only if it passes every check; otherwise the verdict says what it lacks. Rows are built by hand."""

from dataclasses import replace

import pytest
import torch

from tests.kit.contradictions import contradictions
from tests.kit.map_rows import FALLING, STAYING, checks
from vitlens import load_data
from vitlens.analysis.faithfulness import league
from vitlens.analysis.faithfulness.checks import judged_stability
from vitlens.commands.shared.maps.measure import CheckedMaps, map_rows, on_object_rows
from vitlens.commands.shared.maps.record import (
    BASELINES,
    CENTRE,
    IMPUTED,
    RANDOM,
    SHIFTS,
    SHUFFLED,
    WEIGHTS,
    JudgedMap,
    OnObjectRow,
    judged_by,
    judged_maps,
    map_check,
    object_check,
)
from vitlens.commands.shared.maps.report import map_claims, uniform_claim
from vitlens.report.claims import shown
from vitlens.uncertainty import Estimate, student_mean


def judged(**changes: object) -> JudgedMap:
    return judged_maps(checks(**changes))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "state", "lacks"),
    [
        ({}, "pass", ""),
        ({"over": {CENTRE: 0.04}}, "warn", "a map of the centre with patches imputed and in the mean colour"),
        ({"over": {SHUFFLED: 0.04}}, "warn", "its maps of other images"),
        ({"second": {SHUFFLED: -0.2}}, "warn", "its maps of other images with patches in the mean colour"),
        ({"over": {RANDOM: 0.04, CENTRE: -0.2}}, "fail", "a random map or a map of the centre with patches"),
        ({"without": (SHUFFLED,)}, "inconclusive", "was not compared with its maps of other images"),
        ({"cascade": STAYING}, "fail", "ignores the weights"),
        ({"cascade": None}, "inconclusive", "not finite"),
        ({"kept": 0.95}, "inconclusive", "keep 90 % or more of the predictions"),
        ({"randomised": 4}, "inconclusive", "fewer than 10 images"),
        ({"n": 5}, "inconclusive", "fewer than 10 images"),
        ({"usable": 0}, "fail", "uniform maps"),
        ({"jumped": 0.6}, "fail", "jumps"),
        ({"jumped": 0.25}, "inconclusive", "may move"),
        ({"jumped": None}, "inconclusive", "was not tested with shifts"),
        ({"second": None}, "inconclusive", "a second replacement"),
    ],
)
def test_states(changes: dict[str, object], state: str, lacks: str) -> None:
    found = judged(**changes)
    assert found.state == state
    assert lacks in found.lacks
    assert bool(found.lacks) == (state != "pass")
    assert bool(found.fault) == (state == "fail")


def test_the_object_does_not_count() -> None:
    off = OnObjectRow("vit", "relevance", "roc_auc", Estimate(0.4, unit=""), "a uniform map", Estimate(0.5, unit=""),
                      Estimate(-0.1, -0.2, 0.0, 50, ""))  # fmt: skip
    row = object_check(off)
    assert (row.state, row.needed) == ("warn", False)
    assert judged_maps([*checks(), row])[0].state == "pass"


def test_no_method_chooses_by_the_replacements_that_judge() -> None:
    assert judged_by({"blur", "absent", "mean", IMPUTED}) == [IMPUTED, "mean"]
    assert judged_by({"blur", IMPUTED}) == [IMPUTED, "blur"]
    assert judged_by({"blur"}) == ["blur"]


def test_the_best_is_first_and_its_equals_are_named() -> None:
    rows = [
        *checks(method="rollout", score=0.9, cascade=STAYING),
        *checks(method="gradcam", score=0.3, behind=0.02),
        *checks(method="relevance", score=0.35),
        *checks(method="saliency", score=0.2, behind=0.15),
    ]
    assert [each.method for each in judged_maps(rows)] == ["relevance", "gradcam", "saliency", "rollout"]
    first, faulty = map_claims("vit", rows, images=100)
    assert (first.subject, first.state, first.kind) == ("vit", "pass", "answer")
    assert "**relevance** may be believed" in first.says
    assert "3 of 4 methods" in first.says
    assert "gradcam** cannot be told from it" in first.says
    assert "saliency" not in first.says
    assert first.effect == judged_maps(rows)[0].margin
    assert (faulty.effect.value, "**rollout** hardly changes" in faulty.says) == (STAYING[2], True)
    assert list(contradictions([first, faulty])) == []


def test_faults_are_named_where_no_map_passes() -> None:
    edges = checks(method="edges", cascade=(1.0,) * 6)
    below = checks(method="gradcam", over={RANDOM: -0.2, CENTRE: -0.3})
    claims = list(map_claims("vit", [*edges, *below], images=50))
    assert [each.question for each in claims] == ["maps", "maps that ignore the weights", "maps below a baseline"]
    assert [each.state for each in claims] == ["fail", "", ""]
    assert "No map of **vit** passes" in claims[0].says
    assert len(shown(claims)) == 3
    assert claims[2].effect.value == pytest.approx(-0.3)
    assert BASELINES[CENTRE] in claims[2].says
    (few,) = map_claims("vit", [*edges, *below], images=19)
    assert (few.state, few.says) == ("inconclusive", "")
    assert list(map_claims("vit", [], images=100)) == []


@pytest.mark.parametrize(("unusable", "images", "said"), [(60, 100, 1), (5, 100, 0), (0, 100, 0), (12, 12, 0)])
def test_uniform_maps(unusable: int, images: int, said: int) -> None:
    claims = list(uniform_claim("vit", {"relevance": unusable, "gradcam": 0}, images))
    assert len(claims) == said
    assert all(claim.is_shown and claim.effect.value == 0.6 for claim in claims)


def test_a_shift_is_judged_by_the_rule_of_the_analysis() -> None:
    still, jumped = Estimate(0.9, 0.85, 0.95, 16, ""), Estimate(0.0, 0.0, 0.19, 16)
    row = map_check("vit", "relevance", SHIFTS, judged_stability(still, jumped))
    assert (row.check, row.state, row.value) == (SHIFTS, "pass", jumped)
    assert [each.check for each in checks()] == [IMPUTED, "mean", WEIGHTS, SHIFTS]
    (randomised,) = (each for each in checks(cascade=FALLING) if each.check == WEIGHTS)
    assert randomised.value == Estimate(FALLING[2], FALLING[2] - 0.05, FALLING[2] + 0.05, 32, "")


@pytest.mark.parametrize("sources", [None, torch.tensor([0, 0, 0, 0, 1, 2, 2])])
def test_other_images_are_of_other_sources(sources: torch.Tensor | None) -> None:
    count = 7
    found = CheckedMaps(None, torch.zeros(count, 3, 2, 2), None, {}, (), league.Settings(seed=3), sources=sources)  # type: ignore[arg-type]
    other = found.other_images()
    assert other is not None
    own = torch.arange(count) if sources is None else sources
    assert not bool((own[other] == own).any())
    alone = CheckedMaps(None, torch.zeros(2, 3, 2, 2), None, {}, (), league.Settings(), sources=torch.zeros(2).int())  # type: ignore[arg-type]
    assert alone.other_images() is None


def test_intervals_end_at_what_is_possible() -> None:
    maps = torch.ones(9, 4, 4)
    maps[0, 0, 0] = 400.0  # one sharp map among uniform ones
    split = replace(load_data("digits", limit=len(maps)), masks=None)
    (row,) = map_rows("m", [("relevance", maps)], split)
    assert row.information.low == 0.0
    assert row.by_place is not None
    assert 0.0 <= (row.by_place.low or 0.0) <= (row.by_place.high or 0.0) <= 1.0
    free = student_mean([1.0, 1.0, 0.5])
    assert free.high > 1.0
    assert student_mean([1.0, 1.0, 0.5], most=1.0).high == 1.0


def test_maps_on_the_object_exceed_all_that_ignore_the_image() -> None:
    masks = torch.zeros(12, 8, 8, dtype=torch.bool)
    for at in range(12):
        masks[at, at % 3 * 2 : at % 3 * 2 + 2, at % 4 * 2 : at % 4 * 2 + 2] = True
    inside, centre = masks.float(), torch.zeros(12, 8, 8)
    centre[:, 3:5, 3:5] = 1.0
    own, fixed = on_object_rows("vit", [("own", inside), ("fixed", centre)], "roc_auc", masks)
    assert (object_check(own).state, object_check(fixed).state) == ("pass", "warn")
    assert own.estimate.value == 1.0
