"""The first page of a study: claims that show an effect, and a planted cause."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.commands import report
from tests.kit.first_page_answers import (
    BETTER,
    BREAKS,
    CAUSES,
    HEADS,
    MAPS,
    ModelEntry,
    answer_to,
    calibration_words,
    chapter_of,
    first_page,
    frequency,
    judged_maps,
    misleading,
    number,
    percent,
    score_row,
    took,
)
from tests.kit.planted_causes import PLANTED, factor_row, judgement
from tests.kit.reliance_rows import PAIR, misleading_row, pair_row, record_of
from tests.kit.select import select, select_one, values_of
from vitlens import evaluate, load, load_data
from vitlens.commands.compare.report import REPORT as COMPARED
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.report import WHOLE as REPORT
from vitlens.report.claims import Claim, first_page_claims
from vitlens.uncertainty import Estimate

REPORTS = Path(__file__).parents[2] / "reports"
HUE = ("background-colour", "hue-exchanged")


STUDIES = ("study-shortcut", "study-digits")
WORDS = 300  # of the answers and of what is not shown, as in tests/kit/first_page.py


@pytest.mark.parametrize("name", STUDIES)
def test_the_first_page_is_full_of_claims_that_show_something(name):
    claims = REPORT.register(read_folder(REPORTS / name))
    answers = first_page_claims(claims)
    assert len(answers) == 5
    assert not [claim.question for claim in answers if claim.is_null]
    assert len(set(values_of(answers, "question", "subject"))) == 5


@pytest.mark.parametrize("name", STUDIES)
def test_each_question_is_answered_once_or_said_not_to_be_and_in_few_words(name):
    first = first_page(read_folder(REPORTS / name))
    leads = values_of(first.answer, "lead")
    assert all(leads)
    assert len(set(leads)) == len(leads)
    not_shown = values_of(first.unknown, "lead")
    for slot in (CAUSES, BETTER, HEADS, BREAKS, MAPS):
        assert (slot.lead in leads) != (slot.lead in not_shown), slot.lead
    assert sum(len(sentence.text.split()) for sentence in (*first.answer, *first.unknown)) <= WORDS
    assert len(first.glance.rows) <= 6


@pytest.mark.parametrize(
    "left_out",
    [
        ("evaluate", "compare", "features"),
        ("attack",),
        ("explain", "compare"),
        ("ablate", "stats", "compare"),
    ],
)
def test_a_study_without_some_chapters_answers_the_other_questions(left_out):
    complete = read_folder(REPORTS / "study-shortcut")
    record = replace(
        complete, chapters=tuple(row for row in complete.chapters if row.word not in left_out)
    )
    first = first_page(record)
    leads = set(values_of((*first.answer, *first.unknown), "lead"))
    for slot in (CAUSES, BETTER, HEADS, BREAKS, MAPS):
        is_measured = any(word not in left_out for word, _ in slot.sources)
        assert (slot.lead in leads) == is_measured, slot.lead
    texts = values_of(first.answer, "text")
    assert len(set(texts)) == len(texts)
    assert all(texts)


def test_the_cause_of_errors_has_what_was_fixed_and_broken_next_to_the_control():
    record = read_folder(REPORTS / "study-shortcut")
    compared = chapter_of(record, "compare")
    row = misleading(compared)[0]
    text = answer_to(record, CAUSES)
    for count in (row.fixed, row.errors, row.broken, row.control_fixed, row.control_broken, row.n):
        assert str(count) in text
    second = next(
        claim for claim in record.of("compare")[0].claims if claim.question == "why it fails"
    )
    assert text.endswith(second.brief)
    cells = list(chain.from_iterable(first_page(record).glance.rows))
    for model in compared.aliases:
        (other,) = select(compared.reliance, model=model, change=row.change)[-1:]
        assert any(
            str(other.fixed) in str(cell) and str(other.errors) in str(cell) for cell in cells
        )


@pytest.mark.parametrize("name", STUDIES)
def test_which_is_better_comes_with_how_sure_that_is_and_whether_confidence_is_right(name):
    record = read_folder(REPORTS / name)
    text = answer_to(record, BETTER)
    for score in chapter_of(record, "evaluate").scores:
        assert percent(score.accuracy.value, 1) in text
        assert number(100 * score.calibration_error.value, 1) in text


def test_heads_are_named_with_what_they_do():
    record = read_folder(REPORTS / "study-shortcut")
    text = answer_to(record, HEADS)
    units = chapter_of(record, "ablate").heads
    lead = max(units, key=lambda unit: unit.rank.value)
    carriers = [head for head in chapter_of(record, "compare").cue_heads if head.carries]
    assert lead.unit in text
    assert any(head.name in text for head in carriers)


@pytest.mark.parametrize("name", STUDIES)
def test_the_answer_on_maps_names_one_of_every_model(name):
    record = read_folder(REPORTS / name)
    text = answer_to(record, MAPS)
    for chapter in record.of("explain"):
        alias = chapter.row.alias
        best = judged_maps(chapter.record.checks)[0]
        assert f"**{best.method}** for **{alias}**" in text


def test_only_a_model_without_a_map_that_passes_is_said_to_have_none():
    record = read_folder(REPORTS / "study-digits")
    text = answer_to(record, MAPS)
    is_trusted = {}
    for chapter in record.of("explain"):
        is_trusted[chapter.row.alias] = judged_maps(chapter.record.checks)[0].state == "pass"
    assert set(is_trusted.values()) == {True, False}
    for alias, passes in is_trusted.items():
        # of a model without such a map: that it has none, and its closest
        assert text.count(f"**{alias}**") == (1 if passes else 2)


def test_the_answers_from_the_fewest_images_are_called_the_weakest():
    record = read_folder(REPORTS / "study-shortcut")
    weakest = first_page(record).unknown[0].text
    counts = sorted(claim.effect.n for claim in first_page_claims(REPORT.register(record)))
    for count in counts[:2]:
        assert f"{count} images" in weakest
    assert f"{counts[-1]:,}" not in weakest


class Answered:
    """A study with one chapter and one answer, which rests on few images."""

    studied = ("a", "b")
    left_out = ()
    training = ()
    parts = ()

    def __init__(self, effect: Estimate) -> None:
        claim = Claim("robustness", "a", "a is robust", effect=effect, kind="answer")
        self.chapter = SimpleNamespace(
            claims=(claim,), figure=lambda place: place, record=SimpleNamespace(scores=())
        )

    def of(self, word: str) -> list[SimpleNamespace]:
        return [self.chapter] if word == "attack" else []


@pytest.mark.parametrize(
    ("unit", "low", "high"),
    [("AUC", "0.12", "0.3"), ("fraction", "12.0", "30.0 %"), ("points", "0.1", "0.3 points")],
)
def test_both_ends_of_a_doubtful_effect_have_one_unit(unit, low, high):
    weakest, *_ = REPORT.unknown(Answered(Estimate(0.2, 0.12, 0.3, 30, unit)))
    assert f" {low} to {high}" in weakest.text


@pytest.mark.parametrize("name", STUDIES)
def test_the_time_stands_with_the_machine_that_took_it(name):
    record = read_folder(REPORTS / name)
    (machine,) = chapter_of(record, "profile").machine
    assert machine.name in took(record)
    assert str(machine.threads) in took(record)
    assert took(replace(record, status="failed")) == ""


def test_a_misleading_cue_leads_to_the_models_without_it_or_to_a_training_of_ones_own():
    rows = [misleading_row(alias, *HUE, 20.0) for alias in PAIR]
    record = record_of(*rows)
    for names, command in (
        (("vit-shortcut", "cnn-shortcut"), "study vit-digits cnn-digits"),
        (PAIR, "train vit"),
    ):
        models = tuple(ModelEntry(alias, name) for alias, name in zip(PAIR, names))
        config = replace(record.config, models=models, options={"models": names, "data": "digits"})
        claim = select_one(COMPARED.register(replace(record, config=config)), question="shortcut")
        assert f"vitlens {command}" in claim.next_step


@pytest.mark.parametrize(
    ("p", "words"),
    [(1e-9, "fewer than 1 of 1,000"), (0.0049, "about 5 of 1,000"), (0.3, "about 30 of 100")],
)
def test_a_p_is_said_as_how_often_chance_does_this(p, words):
    assert frequency(p) == words


@pytest.mark.parametrize(
    ("error", "n", "right"), [(0.01, 1000, True), (0.2, 1000, False), (0.2, 200, None)]
)
def test_whether_models_are_calibrated_follows_from_their_verdicts(error, n, right):
    scores = [score_row(alias, Estimate(error, error - 0.005, error + 0.005, n)) for alias in PAIR]
    text = calibration_words(scores)
    assert ("calibrated" in text) == (right is not None)
    assert ("not calibrated" in text or "Neither" in text) == (right is False)
    mixed = [scores[0], score_row("cnn", Estimate(0.01, 0.005, 0.015, n))]
    assert ("**vit** is not" in calibration_words(mixed)) == (right is False)


@pytest.mark.parametrize("name", ["reversal-sort", "attack-deit-tiny"])
def test_a_next_step_stands_once_on_a_page(name):
    document = report(read_folder(REPORTS / name))
    steps = list(document.first.next)
    for section in document.sections:
        steps += section.next
    assert steps
    assert len(set(steps)) == len(steps)


@pytest.mark.parametrize(("count", "word"), [(2, "Both"), (3, "All 3")])
@pytest.mark.parametrize("error", [0.01, 0.2])
def test_the_words_on_calibration_fit_the_number_of_models(error, count, word):
    estimate = Estimate(error, error - 0.005, error + 0.005, 1000)
    text = calibration_words([score_row(f"model-{index}", estimate) for index in range(count)])
    assert text.startswith(word) == (error == 0.01)
    assert ("Both" in text or "Neither" in text) <= (count == 2)


def test_a_claim_that_shows_no_effect_stands_under_what_is_not_shown():
    record = read_folder(REPORTS / "study-digits")
    nulls = []
    for chapter in record.parts:
        nulls += [claim.brief or claim.says for claim in chapter.claims if claim.is_null]
    unknown = values_of(REPORT.unknown(record), "text")
    assert any(says in unknown for says in nulls)
    assert not set(values_of(first_page_claims(REPORT.register(record)), "says")) & set(nulls)


@pytest.mark.parametrize(
    ("low", "high", "better"), [(4.0, 12.0, PAIR[0]), (-12.0, -4.0, PAIR[1]), (-3.0, 5.0, "")]
)
def test_a_misleading_cue_says_which_model_is_better_without_it(low, high, better):
    rows = [misleading_row(alias, *HUE, 20.0) for alias in PAIR]
    difference = Estimate((low + high) / 2, low, high, 200, "points")
    record = record_of(*rows, pairs=(pair_row(*rows, 0.001, accuracy=difference),))
    claim = select_one(COMPARED.register(record), question="shortcut")
    last = claim.says.rpartition(" Without it, ")[2]
    assert [alias for alias in PAIR if alias in last] == ([better] if better else [])


def test_the_models_trained_without_the_planted_cause_are_named_where_there_are_some():
    (says,) = judgement([factor_row("vit-shortcut", 30)], {"vit-shortcut": [HUE[0]]})
    assert "vit-digits" in says
    (says,) = judgement([factor_row("mine", 30)], {"mine": [HUE[0]]})
    assert "vit-digits" not in says


@pytest.mark.slow  # 1,800 scenes
@pytest.mark.parametrize(
    ("name", "expected"),
    [pair for planted in PLANTED.values() for pair in planted.remedied.values()],
)
def test_the_accuracy_without_the_planted_cause_is_that_of_the_bundled_model(name, expected):
    scenes = load_data("digits")
    assert len(scenes) == 1800
    result = evaluate(load(name), scenes)
    assert round(float(result.correct.double().mean()), 3) == expected
