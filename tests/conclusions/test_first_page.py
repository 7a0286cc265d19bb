"""The first page of a study: claims that show an effect, and what else it says of a planted cause."""

from pathlib import Path

import pytest

from tests.kit.planted_causes import PLANTED, factor_row, judgement
from tests.kit.reliance_rows import PAIR, misleading_row, pair_row, record_of
from vitlens import evaluate, load, load_data
from vitlens.commands.compare.report import REPORT as COMPARED
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.report import WHOLE as REPORT
from vitlens.report.claims import shown
from vitlens.uncertainty import Estimate

REPORTS = Path(__file__).parents[2] / "reports"
HUE = ("background-colour", "hue-exchanged")


@pytest.mark.parametrize("name", ["study-shortcut", "study-digits"])
def test_the_first_page_is_full_of_claims_that_show_something(name):
    claims = REPORT.register(read_folder(REPORTS / name))
    answers = shown(claims)
    assert len(answers) == 5
    assert not [claim.question for claim in answers if claim.is_null]
    assert len({(claim.question, claim.subject) for claim in answers}) == 5


def test_a_claim_that_shows_no_effect_stands_under_what_is_not_shown():
    record = read_folder(REPORTS / "study-digits")
    nulls = [claim.says for chapter in record.parts for claim in chapter.claims if claim.is_null]
    unknown = list(REPORT.unknown(record))
    assert any(says in unknown for says in nulls)
    assert not {claim.says for claim in shown(REPORT.register(record))} & set(nulls)


@pytest.mark.parametrize(("low", "high", "better"), [(4.0, 12.0, PAIR[0]), (-12.0, -4.0, PAIR[1]), (-3.0, 5.0, "")])
def test_a_misleading_cue_says_which_model_is_better_without_it(low, high, better):
    rows = [misleading_row(alias, *HUE, 20.0) for alias in PAIR]
    difference = Estimate((low + high) / 2, low, high, 200, "points")
    record = record_of(*rows, pairs=(pair_row(*rows, 0.001, accuracy=difference),))
    (claim,) = [claim for claim in COMPARED.register(record) if claim.question == "shortcut"]
    last = claim.says.rpartition(" Without it, ")[2]
    assert [alias for alias in PAIR if alias in last] == ([better] if better else [])


def test_the_models_trained_without_the_planted_cause_are_named_where_there_are_some():
    (says,) = judgement([factor_row("vit-shortcut", 30)], {"vit-shortcut": [HUE[0]]})
    assert "vit-digits" in says
    (says,) = judgement([factor_row("mine", 30)], {"mine": [HUE[0]]})
    assert "vit-digits" not in says


@pytest.mark.slow  # 1,800 scenes
@pytest.mark.parametrize(("name", "expected"), [pair for each in PLANTED.values() for pair in each.remedied.values()])
def test_the_accuracy_without_the_planted_cause_is_that_of_the_bundled_model(name, expected):
    scenes = load_data("digits")
    assert len(scenes) == 1800
    result = evaluate(load(name), scenes)
    assert round(float(result.correct.double().mean()), 3) == expected
