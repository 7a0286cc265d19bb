"""What a study of points says: planted predictions, and the claims that they must and must not make."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.contradictions import contradictions
from vitlens.analysis.evaluation.intervals import accuracy_over_seeds
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.kinds.measure import compared
from vitlens.commands.study.kinds.report import REPORT, caught_up, decision, reasons
from vitlens.commands.study.kinds.transfer import reached
from vitlens.commands.study.record import (
    ComparisonRow,
    CurveRow,
    DesignRow,
    PointRow,
    PositionRow,
    RecipeRow,
    StudyRecord,
)
from vitlens.uncertainty import Estimate

IMAGES = 450
RECIPE = RecipeRow("all", "adamw", 1e-3, 64, 6, "none", "")
WAYS = ("frozen", "last-blocks", "full", "scratch", "distilled")
WINS = (0.80, 0.82, 0.90, 0.40, 0.60)
LOSES = (0.30, 0.35, 0.40, 0.80, 0.80)
EQUAL = (0.60, 0.60, 0.60, 0.60, 0.60)


def predicted(shares, *, seeds, seed=0, spread=0.01):
    """Predictions (seeds, images) of each point, which find the same images hard; accuracy varies with the seed."""
    generator = np.random.default_rng(seed)
    hardness = generator.random(IMAGES)
    return {
        label: hardness + 0.03 * generator.standard_normal((seeds, IMAGES))
        < share + spread * generator.standard_normal((seeds, 1))
        for label, share in shares.items()
    }


def record_of(kind, shares, *, seeds=3, seed=0, spread=0.01, gain=(30.0, 20.0, 40.0), classes=5):
    """The record of a kind whose points have these accuracies by label."""
    correct = predicted(shares, seeds=seeds, seed=seed, spread=spread)
    points = {
        point.label: PointRow(
            point.label, point.words, point.preset, point.line, point.candidate,
            accuracy_over_seeds(correct[point.label]), 1 / classes, round(100 * (point.share or 1)), 1000,
            10 if point.trained == "head" else 1000, 20, 6, 30, 9.0, 3.0,
        )
        for point in KINDS[kind].points if point.label in shares
    }  # fmt: skip
    pairs = [pair for pair in KINDS[kind].pairs if set(pair) <= set(shares)]
    best = max((row for row in points.values() if row.candidate), key=lambda row: row.accuracy.value).label
    rows = [
        *compared(points, correct, "difference", [pair for pair in pairs if points[pair[0]].candidate]),
        *compared(points, correct, "share", [pair for pair in pairs if not points[pair[0]].candidate]),
        *compared(points, correct, "step", KINDS[kind].steps),
        *compared(
            points,
            correct,
            "best",
            [(row.label, best) for row in points.values() if row.candidate and row.label != best],
        ),
    ]
    if KINDS[kind].adapts:
        value, low, high = gain
        known = ("probe_gain", "pretrained", "random", "pretrained", "random weights")
        rows.append(ComparisonRow(*known, Estimate(value, low, high, IMAGES, "points")))
        rows.append(replace(rows[-1], label="full", against="pretrained", words="after full training"))
    model = ("vit", 12, 3) if KINDS[kind].adapts else ()
    design = DesignRow(kind, 6, seeds, 100, IMAGES, classes, (32, 32), *model)
    return StudyRecord(design=(design,), points=tuple(points.values()), comparisons=tuple(rows), recipes=(RECIPE,))


def architecture(last, *, seeds=4, seed=0, spread=0.01):
    labels = [point.label for point in KINDS["architecture"].points]
    shares = {label: 0.6 if at < 6 else last for at, label in enumerate(labels)}
    return record_of("architecture", shares, seeds=seeds, seed=seed, spread=spread)


def transfer(accuracy, *, by_share=((0.5, 0.6, 0.3),), **more):
    """accuracy: of the ways; by_share: of frozen, full and from scratch on 20 % and 50 % of the images."""
    shares = dict(zip(WAYS, accuracy))
    for part, values in zip((20, 50), by_share):
        shares |= {f"{label}-{part}": value for label, value in zip(("frozen", "full", "scratch"), values)}
    return record_of("transfer", shares, **more)


def said(record):
    document = REPORT(record)
    assert list(contradictions(document.claims)) == []
    return document


def differences(record):
    return [claim for claim in said(record).claims if claim.question == "difference"]


def test_the_step_that_matters_is_found():
    record = architecture(0.85)
    found = {claim.subject for claim in differences(record)}
    assert "the block post-norm and + MLP: a whole block" in found  # whose accuracy was planted to rise
    assert not any("residual" in subject for subject in found)
    assert record.metric("step/post-norm/mlp") in [claim.effect for claim in differences(record)]


def test_one_seed_and_guessing_decide_nothing():
    one = said(record_of("pooling", {"cls": 0.5, "mean": 0.9}, seeds=1))
    assert (one.title, [claim.state for claim in one.claims]) == ("One seed decides nothing", ["inconclusive", ""])
    guessing = said(record_of("pooling", {"cls": 0.2, "mean": 0.2}))
    assert guessing.title == "It is open whether any point is better than guessing"


def test_differences_within_the_spread_of_seeds_are_no_claim():
    record = record_of(
        "registers", dict.fromkeys(("registers-0", "registers-1", "registers-4"), 0.7), spread=0.05, seed=1
    )
    assert not differences(record)
    assert said(record).claims[0].state == "inconclusive"


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_factor_is_found_and_over_150_seldom_another():
    for seed in range(20):
        planted = architecture(0.85, seed=seed)
        assert any("post-norm and" in claim.subject for claim in differences(planted))
    labels = ("registers-0", "registers-1", "registers-4")
    invented = sum(
        bool(differences(record_of("registers", dict.fromkeys(labels, 0.7), seed=seed, spread=0.03)))
        for seed in range(150)
    )
    assert invented <= 15  # at a level of 5 %: more than 15 of 150 with a probability of 0.5 %


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_its_range_and_what_was_not_tried(kind):
    shares = {point.label: 0.5 + 0.01 * at for at, point in enumerate(KINDS[kind].points)}
    document = said(record_of(kind, shares))
    assert any("100 training images of 32×32 px" in sentence.text for sentence in document.first.answer)
    unknown = " ".join(sentence.text for sentence in document.first.unknown).replace("\\", "")
    assert f"Not tried: {KINDS[kind].untried}" in unknown


def test_each_share_has_its_own_answer():
    """The CNN wins at 5 %, nothing is seen at 25 %, the ViT wins at 100 %; a quarter of the images is enough."""
    shares = {"vit-5": 0.3, "cnn-5": 0.5, "vit-25": 0.9, "cnn-25": 0.9, "vit-100": 0.9, "cnn-100": 0.7}
    record = record_of("data", shares)
    winners = {row.images: row.winner for row in record.comparisons if row.images and row.family == "difference"}
    assert winners == {5: "CNN, 5 %", 25: None, 100: "ViT, 100 %"}
    assert decision(record).cheapest.name.endswith("25 %")  # fewer images count before fewer operations
    (section,) = (part for part in said(record).sections if part.title == "Does the number of images decide?")
    assert "2 of 3" in section.sentences[0].text


def test_a_pair_that_was_planned_has_one_verdict():
    """The CNN against the ViT on all images is one of 3 planned pairs and one of 5 against the best."""
    shares = {"vit-5": 0.3, "cnn-5": 0.9, "vit-25": 0.6, "cnn-25": 0.9, "vit-100": 0.8, "cnn-100": 0.9}
    record = record_of("data", shares)
    last = [
        (number, row)
        for number, row in enumerate(record.comparisons)
        if {row.label, row.against} == {"vit-100", "cnn-100"}
    ]
    changed = list(record.comparisons)
    for number, row in last:
        changed[number] = replace(row, p_holm=0.04 if row.family == "difference" else 0.06)
    assert "ViT, 100 %" in [each.name for each in decision(replace(record, comparisons=tuple(changed))).worse]


@pytest.mark.parametrize(
    ("accuracy", "state", "chosen"),
    [
        (WINS, "wins", "full"),
        ((0.90, 0.85, 0.80, 0.40, 0.5), "wins", "frozen"),
        ((0.90, 0.90, 0.905, 0.40, 0.5), "wins", "frozen"),
        (LOSES, "loses", None),
        (EQUAL, "", "frozen"),
        ((0.30, 0.60, 0.60, 0.60, 0.60), "", None),  # one way below is not all
    ],
)
def test_whether_transfer_wins_and_what_to_take_follow_from_the_differences(accuracy, state, chosen):
    record = transfer(accuracy, spread=0.003)
    (claim,) = (claim for claim in said(record).claims if claim.question == "transfer")
    assert claim.says.startswith(f"Transfer {state}" if state else "It is not decided whether transfer wins")
    assert claim.state == ("" if state else "inconclusive")
    assert claim.effect == record.metric("difference/full/scratch")
    assert chosen is None or decision(record).cheapest.name == chosen


def test_each_reason_has_the_state_of_its_number():
    wins = reasons(transfer(WINS, by_share=((0.7, 0.8, 0.2),), spread=0.003))
    assert [row.state for row in wins] == ["supported"] * 5
    loses = reasons(transfer(LOSES, by_share=((0.3, 0.4, 0.35),), gain=(-9.0, -15.0, -2.0)))
    assert [row.state for row in loses] == ["contradicted", "contradicted", "supported", "not decided", "supported"]
    equal = reasons(transfer(EQUAL, by_share=((0.5, 0.5, 0.5),), gain=(1.0, -4.0, 6.0)))
    assert {row.state for row in equal} == {"not decided"}
    assert reasons(architecture(0.6)) == []


def at(images, low, high):
    return ComparisonRow("share", "full", "scratch", "full", "from scratch", Estimate(0.0, low, high), images=images)


def test_from_scratch_has_caught_up_only_where_the_whole_interval_says_so():
    behind, caught, open_ = at(20, 20.0, 40.0), at(50, -2.0, 5.0), at(100, -4.0, 10.0)
    assert caught_up([behind, caught]) == caught
    assert caught_up([behind, caught, open_]) is None  # more images must not undo it
    assert caught_up([at(50, -2.0, 2.0), at(100, -2.0, 2.0)]) == at(50, -2.0, 2.0)
    assert caught_up([behind]) is None


@pytest.mark.parametrize(
    ("accuracy", "by_share", "says"),
    [
        ((0.9,) * 5, ((0.8, 0.8, 0.4), (0.85, 0.85, 0.85)), "catches up with full training at 50 images"),
        (WINS, ((0.5, 0.6, 0.3),), "does not catch up"),
    ],
)
def test_where_training_from_scratch_catches_up_is_said(accuracy, by_share, says):
    document = said(transfer(accuracy, by_share=by_share, spread=0.003))
    (section,) = (part for part in document.sections if part.title == "Does the number of images decide?")
    assert says in section.sentences[0].text


def test_a_way_reaches_the_best_at_its_first_epoch_there_or_never():
    def curve(label, *accuracies):
        return [
            CurveRow(label, label, seed, epoch, 2.0 * epoch, 1.0, value + 0.01 * (-1) ** seed)
            for seed in (0, 1)
            for epoch, value in enumerate(accuracies, start=1)
        ]

    rows = list(reached([*curve("full", 0.5, 0.76, 0.8), *curve("scratch", 0.3, 0.4, 0.5)]))
    assert [(each.label, each.epochs, each.seconds) for each in rows] == [("full", 2, 4.0), ("scratch", None, None)]
    assert [each.accuracy for each in rows] == pytest.approx([0.76, 0.76])


@pytest.mark.parametrize(
    ("found", "before", "says"),
    [
        (Estimate(0.6, 0.5, 0.7, 3, ""), 0.02, "nearer patches are more similar"),
        (Estimate(-0.6, -0.7, -0.5, 3, ""), 0.02, "nearer patches are less similar"),
        (Estimate(0.1, -0.2, 0.4, 3, ""), 0.02, "no order by distance"),
        (Estimate(0.61, unit=""), 0.61, "fixed"),
    ],
)
def test_what_the_rank_correlation_means_follows_its_interval(found, before, says):
    record = record_of("positions", {"none": 0.5, "learned": 0.6})
    row = PositionRow("learned", "learned", 3, found, None, None, before)
    document = said(replace(record, position_order=(row,)))
    (section,) = (part for part in document.sections if "position embeddings" in part.title)
    assert says in section.sentences[0].text
