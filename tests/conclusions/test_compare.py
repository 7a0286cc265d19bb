"""The first page of a comparison: the paired difference first, with its numbers; nothing found where nothing is."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.first_page import states
from tests.kit.map_rows import CENTRE, RANDOM, STAYING, checks
from tests.kit.planted_answers import answers, compare_record
from vitlens.commands.compare.record import CompareRecord, DisturbedPairRow, HarderRow
from vitlens.commands.compare.report import REPORT
from vitlens.report.claims import Claim, shown
from vitlens.uncertainty import Estimate, mcnemar

PAIR = ("vit", "cnn")
VIT, CNN = checks("vit", "relevance"), checks("cnn", "gradcam")
N = 1000


def recorded(errors, *, seed=0, map_checks=(*VIT, *CNN), methods=("relevance", "gradcam"), n=N) -> CompareRecord:
    """Two models of these shares of errors on n images, with rows of their maps."""
    generator = np.random.default_rng(seed)
    models = {alias: answers(generator.random(n) >= share) for alias, share in zip(PAIR, errors)}
    return replace(compare_record(models, methods=methods, seed=seed), map_checks=tuple(map_checks))


def found(record: CompareRecord) -> list[Claim]:
    """The claims of the first page but for those that no difference is shown."""
    return [claim for claim in shown(REPORT(record).claims, 9) if claim.question != "no difference"]


def test_a_vit_that_loses_to_its_cnn_comes_first():
    """Also where a fault of the maps is found."""
    record = recorded((0.25, 0.10), map_checks=(*checks("vit", "relevance", cascade=STAYING), *CNN))
    first, second = found(record)
    wrong_vit, wrong_cnn = (record.metric(f"cell/vit/cnn/only-{each}-wrong").value * N for each in ("first", "second"))
    assert first.effect.value == pytest.approx((wrong_vit - wrong_cnn) * 100 / N)
    assert first.effect.value > 0
    assert first.p == pytest.approx(mcnemar(round(wrong_cnn), round(wrong_vit)))
    assert REPORT(record).title.startswith("cnn")
    assert (second.question, second.subject) == ("explanation", "vit")
    judged = states(REPORT(record))
    assert [judged[f"accuracy of {alias}"] for alias in PAIR] == ["fail", "pass"]
    assert [judged[f"explanation of {alias}"] for alias in PAIR] == ["fail", "pass"]


@pytest.mark.parametrize(("errors", "allowed"), [(0.1, {"pass", "inconclusive"}), (0.0, {"pass"})])
def test_nothing_planted_nothing_found(errors, allowed):
    record = recorded((errors, errors), seed=1)
    assert record.metric("mcnemar_p/vit/cnn").value > 0.05
    assert not found(record)
    assert {states(REPORT(record))[f"accuracy of {alias}"] for alias in PAIR} == allowed


def test_few_images_are_inconclusive():
    record = recorded((0.5, 0.0), n=10, map_checks=(*checks("vit", "relevance", n=1), *checks("cnn", "gradcam", n=1)))
    assert set(states(REPORT(record)).values()) == {"inconclusive"}
    assert not shown(REPORT(record).claims)


@pytest.mark.parametrize(
    ("accuracies", "better", "clear"),
    [
        ((0.44, 0.29), "vit", True),
        ((0.44, 0.29), "undecided", False),
        ((0.11, 0.04), "vit", False),  # the better one is at chance
    ],
)
def test_disturbed_images(accuracies, better, clear):
    gap = 100 * (accuracies[0] - accuracies[1])
    harder = tuple(
        HarderRow(alias, "shuffle", 4.0, Estimate(value, value - 0.03, value + 0.03, 500), 0.1)
        for alias, value in zip(PAIR, accuracies)
    )
    apart = Estimate(gap, gap - 4, gap + 4, 500, "points")
    row = DisturbedPairRow(
        *PAIR, 0, 0, 0, 0, p=1e-6, p_holm=1e-6, difference=apart, better=better, kind="shuffle", level=4.0
    )
    named = found(replace(recorded((0.1, 0.1), seed=1), robustness=harder, disturbed_pairs=(row,)))
    assert [(claim.question, claim.subject, claim.effect) for claim in named] == [
        ("disturbed images", "vit", apart)
    ] * clear


def test_maps_by_two_methods_are_compared_only_where_both_are_verified():
    def compares(**how: object) -> bool:
        sections = {section.title: section for section in REPORT(recorded((0.1, 0.1), **how)).sections}
        text = " ".join(each.text for each in sections["Do both models mark the same places?"].sentences)
        return "**vit** are more concentrated" in text

    unverified = (*VIT, *checks("cnn", "gradcam", over={CENTRE: 0.0}))
    same = (*checks("vit", "saliency", over={RANDOM: 0.0}), *checks("cnn", "saliency"))
    assert compares()
    assert not compares(map_checks=unverified)
    assert compares(methods=("saliency", "saliency"), map_checks=same)


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_difference_comes_first_and_equal_models_are_seldom_told_apart():
    for seed in range(20):
        assert found(recorded((0.18, 0.10), seed=seed))[0].says.startswith("**cnn**")
    assert sum(bool(found(recorded((0.1, 0.1), seed=seed))) for seed in range(20)) <= 3  # at a level of 5 %
