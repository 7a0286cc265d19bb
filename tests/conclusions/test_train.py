"""Planted facts of a training: overfitting, accuracy that still rises, a baseline that wins."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.kit.commands import typed_line
from tests.kit.contradictions import contradictions
from tests.kit.first_page import judged
from tests.kit.select import index_by, select_one, values_of
from vitlens.commands.run.options import RunOptions
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions, Tuning
from vitlens.commands.train.record import ScoreRow, SetupRow, TrainRecord, last_tenth
from vitlens.commands.train.report import REPORT
from vitlens.record import Config
from vitlens.report.claims import Claim, first_page_claims
from vitlens.uncertainty import Estimate, difference_of, wilson

ROWS = TrainRecord.contents().tables
TESTED = 1000
TRAINED = 5000
SETUP = SetupRow(TRAINED, TESTED, 50, 0.1, 50, 0.1, chosen=True, computed=("fp32",))
LEVEL = (0.9,) * 12


def accuracy_of(share: float) -> Estimate:
    return wilson(round(share * TESTED), TESTED)


def record_of(train, test, *, worst: int = 92) -> TrainRecord:
    """Return a finished training with these accuracies and ten classes of 100 test images each."""
    history = tuple(
        ROWS["history"](
            place,
            place,
            place * TRAINED,
            0.1,
            1.0,
            train_accuracy,
            1.0,
            other,
            10.0 * (place + 1),
            100.0,
        )
        for place, (train_accuracy, other) in enumerate(zip(train, test))
    )
    accuracy = accuracy_of(test[-1] or 0.0)
    ends = last_tenth(history)
    gain = (
        None
        if ends is None
        else difference_of(*(accuracy_of(end.test_accuracy) for end in reversed(ends)))
    )
    score = ScoreRow(
        "m",
        accuracy,
        gap=difference_of(wilson(round(train[-1] * TRAINED), TRAINED), accuracy),
        gain=gain,
        best=accuracy,
        seconds=Estimate(30.0, unit="s"),
        images_per_second=Estimate(100.0, unit="images/s"),
    )
    correct = dict.fromkeys(range(10), 92) | {3: worst}
    classes = [
        ROWS["per_class"]("m", f"<{digit}>", 100, wilson(count, 100))
        for digit, count in correct.items()
    ]
    return TrainRecord(scores=(score,), history=history, per_class=tuple(classes), setup=(SETUP,))


def found_in(record: TrainRecord) -> dict[str, Claim]:
    claims = REPORT(record).claims
    assert list(contradictions(claims)) == []
    return index_by(first_page_claims(claims), "question")


def test_an_overfitted_training_and_one_that_had_not_converged_and_the_worst_class():
    claims_by_question = found_in(record_of((*LEVEL, 0.99), (*LEVEL[:-1], 0.7, 0.7), worst=60))
    assert claims_by_question["overfitting"].effect == difference_of(
        wilson(4950, TRAINED), wilson(700, TESTED)
    )
    assert claims_by_question["overfitting"].effect.value == pytest.approx(29.0)
    record = record_of((0.5, 0.6, 0.7), (0.5, 0.62, 0.75))
    claims_by_question = found_in(record)
    assert claims_by_question["convergence"].effect == difference_of(
        wilson(750, TESTED), wilson(620, TESTED)
    )
    assert "from 62.0 % to 75.0 %" in claims_by_question["convergence"].says
    assert "still improving" in REPORT(record).title
    assert "--epochs 6" in claims_by_question["next"].says
    worst = found_in(record_of(LEVEL, LEVEL, worst=60))["worst class"]
    assert worst.effect.value == 0.6
    assert "<3>" in worst.says
    assert "worst class" not in found_in(record_of(LEVEL, LEVEL))


@pytest.mark.parametrize("name", ["train", "train a head alone"])
def test_gap_and_rise_of_a_run_are_those_of_its_epochs(golden, name):
    """Of three epochs, and of one."""
    record = golden(name).record
    (score, *_), (setup,), last = record.scores, record.setup, record.history[-1]
    trained = wilson(round(last.train_accuracy * setup.training), setup.training)
    assert score.gap == difference_of(trained, score.accuracy)
    ends = last_tenth(record.history)
    assert (score.gain is None) == (ends is None) == (len(record.history) == 1)
    if ends is not None:
        before, after = (wilson(round(end.test_accuracy * setup.test), setup.test) for end in ends)
        assert score.gain == difference_of(after, before)


@pytest.mark.parametrize(
    ("test", "title"),
    [
        (LEVEL, "levelled off"),
        ((*LEVEL[:-1], 0.915), "is undecided"),
        ((*LEVEL[:-1], 0.7), "is undecided"),  # it fell
        (LEVEL[:3], "is undecided"),
        ((None, None, 0.9), "on held-out images"),
    ],
)
def test_nothing_planted_nothing_found(test, title):
    record = record_of((0.65,) * len(test), test)
    assert set(found_in(record)) <= {"accuracy", "convergence", "next"}
    assert title in REPORT(record).title
    assert not judged(REPORT(record))
    by_chance = REPORT(
        record_of((*LEVEL[:-1], 0.92), LEVEL)
    ).claims  # 2 points more in training, or as few as 0.1
    assert "overfitting" not in values_of(by_chance, "question")
    # it cannot rise by a point
    assert "levelled off" in REPORT(record_of((0.9, 0.9), (0.995, 0.995))).title


def test_an_accuracy_at_chance_is_called_so_and_of_few_images_nothing_is_claimed():
    assert "no better than chance" in REPORT(record_of((0.1,) * 12, (0.11,) * 12, worst=11)).title
    better = record_of((0.2,) * 12, (0.2,) * 12)
    assert "chance" not in REPORT(better).title
    # always guessing it is 25 % correct
    classes = (
        replace(better.per_class[0], n=300),
        *better.per_class[1:],
    )
    assert "chance" in REPORT(replace(better, per_class=classes)).title
    record = record_of(LEVEL, LEVEL)
    few = replace(record, scores=(replace(record.scores[0], accuracy=wilson(18, 19)),))
    assert found_in(few) == {}
    assert "too few" in "\n".join(values_of(REPORT(few).first.unknown, "text"))


@pytest.mark.parametrize(
    ("p", "words"), [(1e-6, "more held-out images"), (0.4, "not differ significantly")]
)
def test_the_gain_of_a_teacher_is_told_with_its_test(p, words):
    record = record_of(LEVEL, LEVEL)
    pair = ROWS["pairs"]
    references = (
        ScoreRow("big", accuracy_of(0.95), "teacher"),
        ScoreRow("alone", accuracy_of(0.86), "without a teacher"),
    )
    gap = Estimate(4.0, 2.0, 6.0, TESTED, "points")
    pairs = (
        pair("m", "alone", 850, 50, 10, 90, p, p, gap, "m" if p < 0.05 else "undecided"),
        pair("m", "big", 890, 10, 60, 40, 0.3, 0.3, gap),
    )
    record = replace(
        record, scores=(replace(record.scores[0], role="student"), *references), pairs=pairs
    )
    # the teacher's is not shown
    claim = select_one(REPORT(record).claims, question="comparison")
    assert (claim.subject, claim.effect, claim.kind) == ("m and alone", gap, "answer")
    assert words in claim.says
    assert ("borderline" in claim.says) == (p > 0.05)  # the interval excludes 0 in both cases


def test_the_command_that_checks_a_failed_training_has_its_model_recipe_and_images():
    options = TrainOptions(
        "odd=my.py:build",
        data="my photos",
        model_file=("my.py:build",),
        recipe=RecipeChanges(settings=("mixup=0.8", "accumulate=2"), epochs=3, learning_rate=0.5),
        tuning=Tuning(weights="w 1.pt", last=2),
        shape=Shape(image_size=(64, 96)),
        run=RunOptions(seed=4, labels=Path("l.csv"), data_dir=Path("sets"), limit=50),
    )
    # what is written, and how it is kept, is nothing to check
    run = replace(options.run, out=Path("out"), quiet=True)
    saved = asdict(replace(options, run=run, keep_every=2, track=("tensorboard",)))
    failed = replace(
        record_of((0.1,) * 12, (0.1,) * 12),
        config=Config(options=json.loads(json.dumps(saved, default=str))),
    )
    says = found_in(failed)["next"].says
    assert f"`{typed_line('train', options)} --check`" in says
