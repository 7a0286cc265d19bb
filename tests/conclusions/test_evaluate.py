"""Reports of models on the same images: planted facts come first, with their numbers."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.kit.first_page import check_first_page, judged, states
from tests.kit.planted_answers import NAMES, Answers, answers, evaluate_record
from tests.kit.select import select, select_one, values_of
from vitlens.cli.main import run
from vitlens.commands.evaluate.report import REPORT
from vitlens.report.claims import Claim, first_page_claims
from vitlens.uncertainty import Estimate

N = 400


def first_page(record) -> list[Claim]:
    document = REPORT(record)
    check_first_page(document)
    return list(first_page_claims(document.claims))


def with_errors(seed: int = 0, n: int = N, **shares: float) -> dict[str, Answers]:
    """Return models that make independent errors at these shares."""
    generator = np.random.default_rng(seed)
    return {name: answers(generator.random(n) >= share) for name, share in shares.items()}


def test_pairs_are_counts_with_exact_tests_corrected_together_and_the_best_comes_first():
    models = with_errors(a=0.05, b=0.2, c=0.06)
    record = evaluate_record(models)
    document = REPORT(record)
    right = {name: result.predicted == result.labels for name, result in models.items()}
    for row in record.pairs:
        one = right[row.first]
        two = right[row.second]
        alone = int(sum(one & ~two)), int(sum(two & ~one))
        assert row.p == pytest.approx(binomtest(alone[0], sum(alone)).pvalue)
    smallest = min(record.pairs, key=lambda row: row.p)
    assert smallest.p_holm == pytest.approx(min(1.0, 3 * smallest.p))
    assert values_of(record.pairs, "better") == ["a", "undecided", "c"]
    better, alike = select(first_page(record), kind="answer")
    first = record.pairs[0]
    assert (better.subject, better.effect, better.p) == ("a and b", first.difference, first.p_holm)
    swapped = evaluate_record({"b": models["b"], "a": models["a"]})
    (claim, *_), gap = first_page(swapped), swapped.pairs[0].difference
    assert (claim.effect.value, claim.effect.low, claim.effect.high) == (
        -gap.value,
        -gap.high,
        -gap.low,
    )
    assert claim.effect.value > 0
    assert REPORT(swapped).title == claim.title
    assert claim.title.startswith("a ")
    assert (alike.question, alike.effect) == ("no difference", None)
    judgements = {
        claim.subject: claim.state for claim in judged(document) if claim.question == "accuracy"
    }
    assert judgements == {"a and b": "fail", "a and c": "inconclusive"}


@pytest.mark.parametrize(
    ("low", "high", "decided", "state"),
    [
        (-0.9, 0.4, False, "pass"),
        (-1.5, 0.5, False, "inconclusive"),
        (-9.0, -0.5, True, "inconclusive"),
        (-4.0, -1.5, True, "warn"),
        (-9.0, -1.5, True, "warn"),
        (-9.0, -1.5, False, "inconclusive"),  # not after the correction for other pairs
        (-9.0, -5.5, True, "fail"),
    ],
)
def test_a_difference_is_judged_by_its_whole_interval(low, high, decided, state):
    record = evaluate_record(with_errors(best=0.05, other=0.2))
    better = "best" if decided else "undecided"
    for first, second, ends in (("best", "other", (-high, -low)), ("other", "best", (low, high))):
        gap = Estimate(sum(ends) / 2, *ends, N, "points")
        row = replace(record.pairs[0], first=first, second=second, difference=gap, better=better)
        assert (
            states(REPORT(replace(record, pairs=(row,))))[f"accuracy of {first} and {second}"]
            == state
        )


@pytest.mark.parametrize(("share", "seed"), [(0.05, 1), (0.08, 2), (0.3, 0)])
def test_what_is_not_decided_is_neither_warned_of_nor_failed(share, seed):
    record = evaluate_record(with_errors(seed, a=0.05, b=share), seed=seed)
    questions = set(values_of(select(first_page(record), kind="answer"), "question"))
    assert questions == {"which is better" if share == 0.3 else "no difference"}
    assert states(REPORT(record))["accuracy of a and b"] in (
        ("fail",) if share == 0.3 else ("pass", "inconclusive")
    )


@pytest.mark.parametrize(
    ("most", "code"), [("accuracy_difference/cnn-digits=50", 0), ("accuracy=0.001", 3)]
)
def test_requirements_decide_the_exit_code(most, code, tmp_path, capsys):
    line = [
        "evaluate",
        "vit-digits",
        "cnn-digits",
        "--limit",
        "20",
        "--out",
        str(tmp_path / "run"),
        "--quiet",
    ]
    assert run([*line, "--at-least", "accuracy=0.001", "--at-most", most]) == code
    assert (tmp_path / "run" / "report.md").is_file()
    assert ("does not hold" in capsys.readouterr().err) == (code == 3)


def calibrated(seed: int, n: int = 1000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw confidences, right with that probability, and predictions of five classes."""
    generator = np.random.default_rng(seed)
    confidence = 0.6 + 0.39 * generator.random(n)
    return confidence, generator.random(n) < confidence, generator.integers(0, 5, n)


def one(confidence: np.ndarray, right: np.ndarray, predicted: np.ndarray):
    """Return the record of one model."""
    return evaluate_record(
        {"planted": Answers(confidence, predicted, np.where(right, predicted, (predicted + 1) % 5))}
    )


def test_the_same_model_twice_is_no_finding_nor_is_a_tiny_significant_difference():
    result = with_errors(a=0.1)["a"]
    record = evaluate_record({"a": result, "b": result})
    assert values_of(first_page(record), "question") == ["no difference"]
    assert states(REPORT(record))["accuracy of a and b"] == "pass"
    right = calibrated(2, 1400)[1]
    more = right.copy()
    more[np.flatnonzero(~right)[:6]] = True  # of 1,400 images 6 more are right: 0.4 points
    record = evaluate_record({"planted": answers(right), "more": answers(more)})
    assert record.metric("accuracy_difference/planted/more").value == pytest.approx(-600 / 1400)
    assert record.pairs[0].p_holm < 0.05
    for claim in REPORT(record).claims:
        assert claim.question != "which is better"


def test_a_calibrated_model_passes_and_overconfidence_is_named_by_class_or_as_a_whole():
    record = one(*calibrated(1, 1500))
    assert values_of(first_page(record), "question") == ["top-1 accuracy"]
    assert states(REPORT(record))["calibration of planted"] in ("pass", "warn")
    confidence, right, predicted = calibrated(0)
    # of the predictions of class 1 half are right
    half = np.random.default_rng(100).random(len(right)) < 0.5
    record = one(confidence, np.where(predicted == 1, half, right), predicted)
    finding = next(claim for claim in first_page(record) if claim.kind != "answer")
    row = next(row for row in record.by_prediction if "bee" in row.class_name)
    assert (finding.question, finding.effect) == ("confidence by class", row.gap)
    assert row.gap.value == pytest.approx(row.confidence - row.accuracy)
    assert 0.2 < row.gap.value < 0.4
    for claim in REPORT(record).claims:
        assert claim.question != "confidence"
    assert "*bee*" not in finding.says  # a name is no markup
    every = one(np.full(1000, 0.95), np.arange(1000) % 5 > 0, predicted)  # accuracy 0.8
    claims = [
        (claim.question, claim.effect) for claim in first_page(every) if claim.kind != "answer"
    ]
    assert claims == [("confidence", every.scores[0].confidence_gap)]
    assert states(REPORT(every))["calibration of planted"] == "fail"


def test_predicted_classes_are_listed_by_a_number_that_is_shown():
    document = REPORT(one(*calibrated(0)))
    section = select_one(document.sections, title="Is the confidence right?")
    (table,) = section.tables
    p_values = [cells[table.columns.index("p (Holm)")] for cells in table.rows]
    assert p_values == sorted(p_values)
    assert len(set(p_values)) > 1


@pytest.mark.parametrize(
    ("confidence", "right", "classes"),
    [
        ([0.9], [True], 5),  # one image
        # no failure: the bootstrap of the gap excludes 0, the exact test does not
        (
            [0.9] * 12,
            [True] * 12,
            5,
        ),
        ([0.999] * 4, [False] * 4, 2),
    ],
)
def test_a_few_images_judge_nothing(confidence, right, classes):
    few = answers(np.array(right), np.array(confidence), classes=classes)
    record = evaluate_record({"planted": few, "same": few}, names=NAMES[:classes])
    assert set(values_of(judged(REPORT(record)), "state")) == {"inconclusive"}
    assert not first_page(record)
    assert not {"calibration", "per_class"} & set(values_of(REPORT(record).figures, "name"))


def test_the_highest_accuracy_of_a_class_is_that_of_the_model_with_the_lowest():
    record = evaluate_record(with_errors(a=0.6, b=0.2))
    (section,) = [part for part in REPORT(record).sections if "per_class" in names_of(part)]
    worst = min(record.per_class, key=lambda row: row.accuracy.value)
    highest = max(row.accuracy.value for row in record.per_class if row.model == worst.model)
    assert f"{100 * highest:.1f} %" in section.sentences[0].text


def names_of(section):
    return values_of(section.figures, "name")
