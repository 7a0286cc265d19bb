"""`explain --auto`: the record is what `vitlens.choose_method` gives, and the chosen method alone is drawn."""

from pathlib import Path

import pytest

import vitlens
from tests.kit.explained import BRIEF, explained, report
from tests.kit.first_page import states
from tests.kit.making import digits
from vitlens import load
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.attribution.choice import DRAWS, FAITHFULNESS, REPLACED, MethodChoice, candidates_for
from vitlens.commands.explain.record import ExplainRecord

NAMES = ("relevance", "gradcam", "saliency")
COUNT = 20
LINE = "--data digits --auto"


@pytest.fixture(scope="module")
def record(golden) -> ExplainRecord:
    return golden("explain by a chosen method").record


@pytest.fixture(scope="module")
def expected(sharp_vit: Path) -> MethodChoice:
    return vitlens.choose_method(load(str(sharp_vit)), digits("test").limit(COUNT), methods=NAMES)


def test_rows_and_metrics_are_those_of_the_function(record, expected):
    (row,) = record.chosen
    assert (row.method, row.runner_up, row.confirmation) == (expected.method, expected.runner_up, expected.confirmation)
    assert (row.candidates, row.checks, row.draws, row.reason) == (NAMES, expected.checks, DRAWS, "")
    assert (row.selection, row.report) == (len(expected.selection), len(expected.report)) == (COUNT // 2, COUNT // 2)
    certainty = record.metric("choice/sharp-vit/certainty")
    assert (certainty.value, certainty.n) == (pytest.approx(expected.certainty, abs=0.01), COUNT // 2)
    assert [each.method for each in record.choice_scores] == [each.method for each in expected.scores]
    for scored in expected.scores:
        for half, known in (("selection", scored.selection), ("report", scored.report)):
            for check, estimate in known.items():
                metric = record.metric(f"choice/sharp-vit/{half}/{check}/{scored.method}")
                assert (metric.value, metric.n) == (pytest.approx(estimate.value, abs=1e-3), estimate.n)
    margins = {(each.against, each.check): each.difference for each in record.choice_margins}
    assert set(margins) == {(each.against, each.check) for each in expected.margins}
    assert {*BASELINES, expected.runner_up} <= {against for against, _ in margins}


def test_the_chosen_method_alone_is_drawn_and_its_check_stands_in_the_table_of_checks(record, expected):
    (row,) = record.chosen
    assert [each.method for each in record.methods] == [row.method]
    (check,) = record.checks
    value = record.metric(f"choice/sharp-vit/report/{FAITHFULNESS}/{row.method}")
    assert (check.method, check.check, check.value) == (row.method, REPLACED, value)
    assert check.margin.value == min(expected.margin(name, FAITHFULNESS).value for name in BASELINES)
    document = report(record)
    claim = next(each for each in document.claims if each.question == "choice")
    assert document.title == claim.title
    assert row.method in claim.title
    assert list(states(document).values()) != ["pass"]  # the weights were not randomised
    (section,) = (each for each in document.sections if "chosen" in each.title)
    assert len(section.tables[0].rows) == len(NAMES) + len(BASELINES)
    assert [figure.name for figure in section.figures] == ["choice"]


def test_with_few_images_the_default_is_drawn_and_said_not_to_be_chosen_by_evidence(tmp_path, sharp_vit):
    record = explained(tmp_path / "out", f"{LINE} --limit 5 --engine grad-cam", sharp_vit)
    (row,) = record.chosen
    assert row.candidates == candidates_for(load(str(sharp_vit)), engine="grad-cam")
    assert row.method in row.candidates
    assert (row.certainty, row.confirmation, record.choice_scores, record.checks) == (None, None, (), ())
    assert "at least 20" in row.reason
    (answer,) = report(record).first.answer
    assert "not chosen by evidence" in answer.text


def test_verify_checks_the_chosen_method_too(tmp_path, sharp_vit):
    line = f"{LINE} --limit 20 --method {','.join(NAMES[:2])} --verify {BRIEF}"
    record = explained(tmp_path / "out", line, sharp_vit)
    assert {row.method for row in record.checks} == {record.chosen[0].method}
    assert {each.question for each in report(record).claims} >= {"choice", "maps"}
    assert not any(row.method in BASELINES for row in record.checks)
