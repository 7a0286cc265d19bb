"""Reports of studies: planted predictions, and the claims that they must and must not make."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.kit.axes import shown
from tests.kit.contradictions import contradictions
from tests.kit.planted_study import LABELS, UNTRIED, pretraining_record, study_record, with_curves
from tests.kit.select import select, select_one, values_of
from vitlens.commands.registry import COMMANDS
from vitlens.commands.study.kinds.record import ComparisonRow, FindingRow, TrialRow
from vitlens.commands.study.kinds.report import decision
from vitlens.commands.study.kinds.transfer.report import caught_up, reasons
from vitlens.commands.study.kinds.variants.record import PositionRow, VariantsRecord
from vitlens.commands.study.report import REPORT
from vitlens.record import Config
from vitlens.uncertainty import Estimate

# accuracies of these ways to adapt a model, in this order
WAYS = ("frozen", "last-blocks", "full", "scratch", "distilled")
WINS = (0.80, 0.82, 0.90, 0.40, 0.60)
LOSES = (0.30, 0.35, 0.40, 0.80, 0.80)
EQUAL = (0.60, 0.60, 0.60, 0.60, 0.60)


def architecture(last):
    """Return a study whose first six variants have the accuracy 0.6, the others `last`."""
    shares = {}
    for number, label in enumerate(LABELS["architecture"]):
        shares[label] = 0.6 if number < 6 else last
    return study_record("architecture", shares, seeds=4)


def transfer(accuracy, *, by_share=((0.5, 0.6, 0.3),), **more):
    """Return a study of transfer with these accuracies of the ways.

    by_share: of frozen, full and from scratch on 20 % and 50 % of the images.
    """
    shares = dict(zip(WAYS, accuracy))
    for percentage, values in zip((20, 50), by_share):
        for label, value in zip(("frozen", "full", "scratch"), values):
            shares[f"{label}-{percentage}"] = value
    return study_record("transfer", shares, **more)


def said(record):
    document = REPORT(record)
    assert list(contradictions(document.claims)) == []
    return document


def answer(record, title: str) -> str:
    """Return the first sentence of a section."""
    (section,) = (part for part in said(record).sections if title in part.title)
    return section.sentences[0].text


def differences(record):
    return select(said(record).claims, question="difference")


def test_the_step_that_matters_is_found_and_what_decides_nothing_is_no_claim():
    record = architecture(0.85)
    subjects = set(values_of(differences(record), "subject"))
    # whose accuracy was planted to rise
    assert "the block post-norm and + MLP: a whole block" in subjects
    for subject in subjects:
        assert "residual" not in subject
    assert record.metric("step/post-norm/mlp") in values_of(differences(record), "effect")
    spread = study_record("registers", dict.fromkeys(LABELS["registers"], 0.7), spread=0.05, seed=1)
    assert not differences(spread)
    assert said(spread).claims[0].state == "inconclusive"
    for mean, cls, seeds, title in (
        (0.9, 0.5, 1, "One seed decides nothing"),
        (0.2, 0.2, 3, "It is undecided"),
    ):
        document = said(study_record("pooling", {"cls": cls, "mean": mean}, seeds=seeds))
        assert document.title.startswith(title)
        assert values_of(document.claims, "state") == ["inconclusive", ""]


@pytest.mark.parametrize("kind", LABELS)
def test_every_kind_says_its_range_and_what_was_not_tried(kind):
    shares = {label: 0.5 + 0.01 * number for number, label in enumerate(LABELS[kind])}
    document = said(study_record(kind, shares))
    answers = " ".join(values_of(document.first.answer, "text"))
    assert "100 training images of 32×32 px" in answers
    unknown = " ".join(values_of(document.first.unknown, "text"))
    assert UNTRIED[kind] in unknown.replace("\\", "")  # without markdown's escapes


def test_each_share_has_its_own_answer_and_a_planned_pair_one_verdict():
    """The CNN wins at 5 %, nothing is seen at 25 %, the ViT wins at 100 %; a quarter of the images
    is enough.
    """
    shares = {
        "vit-5": 0.3,
        "cnn-5": 0.5,
        "vit-25": 0.9,
        "cnn-25": 0.9,
        "vit-100": 0.9,
        "cnn-100": 0.7,
    }
    record = study_record("data", shares)
    winners = {}
    for row in record.comparisons:
        if row.images and row.family == "difference":
            winners[row.images] = row.winner
    assert winners == {5: "CNN, 5 %", 25: None, 100: "ViT, 100 %"}
    # fewer images count before fewer operations
    assert decision(record).cheapest.name.endswith("25 %")
    assert "2 of 3" in answer(record, "Does the number of images decide?")
    document = REPORT(record)
    (lead,) = [claim for claim in document.claims if claim.question == "images"]
    assert document.title.startswith(lead.title)
    assert lead.title.index("CNN leads ViT with 5 ") < lead.title.index("ViT leads CNN with 100 ")
    assert "with 25 it is undecided" in lead.says
    # the CNN against the ViT on all images is one of 3 planned pairs and one of 5 against the best
    shares = {
        "vit-5": 0.3,
        "cnn-5": 0.9,
        "vit-25": 0.6,
        "cnn-25": 0.9,
        "vit-100": 0.8,
        "cnn-100": 0.9,
    }
    record = study_record("data", shares)
    rows = []
    for row in record.comparisons:
        is_full_pair = {row.label, row.against} == {"vit-100", "cnn-100"}
        p_holm = 0.04 if row.family == "difference" else 0.06
        rows.append(replace(row, p_holm=p_holm) if is_full_pair else row)
    choice = decision(replace(record, comparisons=tuple(rows)))
    assert "ViT, 100 %" in values_of(choice.worse, "name")


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
def test_whether_transfer_wins_and_what_to_take_follow_from_the_differences(
    accuracy, state, chosen
):
    record = transfer(accuracy, spread=0.003)
    claim = select_one(said(record).claims, question="transfer")
    opening = f"Transfer {state}" if state else "It is undecided whether transfer wins"
    assert claim.says.startswith(opening)
    assert claim.state == ("" if state else "inconclusive")
    assert claim.effect == record.metric("difference/full/scratch")
    assert chosen is None or decision(record).cheapest.name == chosen


def test_each_reason_has_the_state_of_its_number_and_a_way_the_epoch_at_which_it_reached_the_best():
    wins = reasons(transfer(WINS, by_share=((0.7, 0.8, 0.2),), spread=0.003))
    assert values_of(wins, "state") == ["supported"] * 5
    loses = reasons(transfer(LOSES, by_share=((0.3, 0.4, 0.35),), gain=(-9.0, -15.0, -2.0)))
    assert values_of(loses, "state") == [
        "contradicted",
        "contradicted",
        "supported",
        "not decided",
        "supported",
    ]
    equal = reasons(transfer(EQUAL, by_share=((0.5, 0.5, 0.5),), gain=(1.0, -4.0, 6.0)))
    assert set(values_of(equal, "state")) == {"not decided"}
    record = with_curves(transfer(WINS), {"full": (0.5, 0.76, 0.8), "scratch": (0.3, 0.4, 0.5)})
    rows = record.reached
    assert values_of(rows, "label", "epochs", "seconds") == [
        ("full", 2, 4.0),
        ("scratch", None, None),
    ]
    assert values_of(rows, "accuracy") == pytest.approx([0.76, 0.76])


def test_a_variant_whose_seeds_ended_far_apart_is_named_as_a_limit():
    record = study_record("pooling", {"cls": 0.6, "mean": 0.6})
    accuracies = {"cls": (0.4, 0.9, 0.5), "mean": (0.6, 0.65, 0.55)}
    trials = []
    for label, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            trials.append(TrialRow(label, seed, accuracy, seconds=1.0, images_per_second=1.0))
    before = said(record).first.unknown
    after = said(replace(record, trials=tuple(trials))).first.unknown
    (added,) = (sentence for sentence in after if sentence not in before)
    assert "CLS token" in added.text
    assert "mean of the patches" not in added.text
    assert "40 %" in added.text
    assert "90 %" in added.text


def behind_at(images, low, high):
    """Return by how much training from scratch is behind on this number of images, in points."""
    return ComparisonRow(
        family="share",
        label="full",
        against="scratch",
        words="full",
        against_words="from scratch",
        difference=Estimate(0.0, low, high),
        images=images,
    )


def test_from_scratch_has_caught_up_only_where_the_whole_interval_says_so_which_is_told():
    behind = behind_at(20, 20.0, 40.0)
    caught = behind_at(50, -2.0, 5.0)
    undecided = behind_at(100, -4.0, 10.0)
    assert caught_up([behind, caught]) == caught
    assert caught_up([behind, caught, undecided]) is None  # more images must not undo it
    always = [behind_at(50, -2.0, 2.0), behind_at(100, -2.0, 2.0)]
    assert caught_up(always) == always[0]
    assert caught_up([behind]) is None
    catches_up = transfer((0.9,) * 5, by_share=((0.8, 0.8, 0.4), (0.85, 0.85, 0.85)), spread=0.003)
    for record, says in (
        (catches_up, "catches up with full training at 50 images"),
        (transfer(WINS), "does not catch up"),
    ):
        assert says in answer(record, "Does the number of images decide?")


@pytest.mark.parametrize(
    ("correlation", "before", "says"),
    [
        (Estimate(0.6, 0.5, 0.7, 3, ""), 0.02, "nearer patches are more similar"),
        (Estimate(-0.6, -0.7, -0.5, 3, ""), 0.02, "nearer patches are less similar"),
        (Estimate(0.1, -0.2, 0.4, 3, ""), 0.02, "no order by distance"),
        (Estimate(0.61, unit=""), 0.61, "fixed"),
    ],
)
def test_what_the_rank_correlation_means_follows_its_interval(correlation, before, says):
    record = study_record("positions", {"none": 0.5, "learned": 0.6})
    row = PositionRow("learned", "learned", 3, correlation, None, None, before)
    assert says in answer(replace(record, position_order=(row,)), "position embeddings")


def test_similarities_of_positions_stand_at_the_places_of_their_patches():
    record = study_record("positions", {"none": 0.5, "learned": 0.6})
    values = np.eye(6, dtype=np.float32)
    values[0, 5] = values[5, 0] = 0.5  # top left with bottom right of 2 x 3 positions
    kind = VariantsRecord.contents().arrays["position_similarity"]
    row = PositionRow("learned", "learned", 3, Estimate(0.6, 0.5, 0.7, 3, ""), None, None, 0.0)
    points = (record.points[0], replace(record.points[1], grid=(2, 3)))
    planted = replace(
        record, points=points, position_order=(row,), position_similarity=kind({1: values})
    )
    figure = select_one(said(planted).figures, name="position_similarity")
    (panel,) = shown(figure.draw())
    drawn = np.ma.filled(panel.images[0].get_array().astype(float), np.nan)
    assert drawn.shape == (5, 11)  # one empty line between maps of 2 x 3
    assert drawn[1, 2] == drawn[3, 8] == 0.5
    assert drawn[0, 0] == drawn[4, 10] == 0.5  # with itself: as the greatest of two different
    assert np.nansum(drawn) == 0.5 * 8


def first_page(document) -> str:
    return " ".join(claim.says for claim in document.claims)


KNN = {"random": 0.3, "supervised": 0.8, "mae": 0.6, "dino": 0.5, "clip": 0.7}


def test_features_without_labels_are_compared_with_random_weights_and_labels():
    document = said(pretraining_record(KNN, dict.fromkeys(KNN, 0.35)))
    assert document.title == "MAE's k-NN is above random weights, below supervised"
    objects = select_one(document.claims, question="attention and objects")
    assert objects.state == "inconclusive"  # 0.35 is below the mean mask's
    alike = said(pretraining_record(dict.fromkeys(KNN, 0.5), dict.fromkeys(KNN, 0.35), spread=0.05))
    assert alike.claims[0].state == "inconclusive"


def test_attention_finds_objects_where_it_is_above_both_baselines():
    planted = pretraining_record(KNN, {**dict.fromkeys(KNN, 0.35), "dino": 0.6})
    assert [row.label for row in planted.objectness if row.finds_objects] == ["dino"]
    assert "The attention of **DINO** overlaps the objects more than" in first_page(said(planted))
    assert "**DINO** also exceeds random weights" in first_page(said(planted))


def test_attention_of_random_weights_that_overlaps_objects_as_much_is_said():
    planted = pretraining_record(KNN, {**dict.fromkeys(KNN, 0.35), "dino": 0.6, "random": 0.7})
    assert [row.label for row in planted.objectness if row.finds_objects] == ["random", "dino"]
    for row in planted.objectness:
        assert not row.learned_objects
    assert "also exceed" not in first_page(said(planted))


@pytest.mark.parametrize("kind", ["pooling", "transfer", "pretraining"])
def test_a_study_that_was_stopped_before_its_comparisons_claims_nothing(kind):
    record = COMMANDS["study"].record_class({"kind": kind})
    document = REPORT(record(config=Config(title="Stopped")))
    assert document.title == "Stopped"
    assert document.claims == ()
    assert document.sections == ()


@pytest.mark.parametrize(("seconds", "is_noted"), [(45.0, True), (60.0, False)])
def test_times_of_trainings_of_an_earlier_run_are_not_those_of_the_report(seconds, is_noted):
    record = architecture(0.6)
    trials = []
    for row in record.points:
        for seed in range(4):
            trials.append(TrialRow(row.label, seed, 0.6, seconds=1.0, images_per_second=1.0))
    record = replace(record, trials=tuple(trials), seconds=seconds)
    unknown = " ".join(sentence.text for sentence in REPORT(record).first.unknown)
    assert ("earlier run" in unknown) == is_noted


def test_a_result_of_the_literature_is_repeated_contradicted_or_undecided_in_words():
    record = study_record("pooling", {"cls": 0.6, "mean": 0.9})
    row = FindingRow(
        words="mean of the patches",
        against_words="CLS token",
        expects="equal",
        statement=(
            "both read the same tokens, which is a statement as long as that of any paper may be"
        ),
        source="Nobody 2000",
        difference=Estimate(30.0, 20.0, 40.0, 450, "points"),
        p_holm=0.001,
        agreement="contradicts",
        reason="the patches are made of paper",
    )
    says = {}
    for agreement in ("contradicts", "agrees", "undecided"):
        with_finding = replace(record, findings=(replace(row, agreement=agreement),))
        claim = select_one(REPORT(with_finding).claims, question="literature")
        says[agreement] = claim.says
        assert row.statement in claim.says
    assert "made of paper" in says["contradicts"]
    assert "made of paper" not in says["agrees"] + says["undecided"]


def test_hunger_for_images_and_for_steps_are_two_numbers():
    shares = {"vit-5": 0.5, "vit-100": 0.9, "vit-5-epochs": 0.2}
    record = study_record("data", shares)
    points = []
    for row in record.points:
        points.append(replace(row, steps=2 if row.label.endswith("epochs") else 30))
    claims = list(REPORT(replace(record, points=tuple(points))).claims)
    (hunger,) = (claim for claim in claims if claim.question == "hunger")
    numbers = re.findall(r"(\d+\.\d) points", hunger.says)
    assert 35 < float(numbers[0]) < 45  # 0.9 - 0.5: lack of images
    assert 25 < float(numbers[1]) < 35  # 0.5 - 0.2: lack of steps


def test_a_training_from_scratch_that_is_ahead_is_not_behind_by_less_than_nothing():
    record = transfer((0.5, 0.5, 0.60, 0.61, 0.5), spread=0.05)
    text = answer(record, "Does the number of images decide?")
    assert re.search(r"is [-−]\d", text) is None
    assert re.search(r"is \d", text)


def test_the_accuracy_lost_to_a_corruption_differs_by_a_number_above_nothing():
    labels = ("random", "supervised", "mae", "dino", "clip")
    record = pretraining_record(dict.fromkeys(labels, 0.5), dict.fromkeys(labels, 0.35))
    row = replace(
        select_one(record.feature_scores, label="mae"),
        measure="blur",
        over_supervised=Estimate(-5.0, -8.0, -2.0, 450, "points"),
        p_supervised=0.001,
    )
    record = replace(record, corrupted=(row,))
    claim = select_one(said(record).claims, question="accuracy lost to a corruption")
    assert "5.0 points" in claim.says
    assert "-5.0" not in claim.says
    assert "−5.0" not in claim.says
    assert claim.effect.value < 0
