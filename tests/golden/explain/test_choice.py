"""A method that is chosen on half of the images and confirmed on the others: the record is what the function gives."""

from pathlib import Path

import pytest

import vitlens
from tests.kit.commands import figures, ran, report
from tests.kit.first_page import states
from tests.kit.making import digits
from vitlens import load
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.record import ExplainRecord

NAMES = ("relevance", "gradcam", "saliency")
BASELINES = ("random", "centre")
COUNT = 20


@pytest.fixture(scope="module")
def chosen(golden) -> ExplainRecord:
    return golden("explain by a chosen method").record


@pytest.fixture(scope="module")
def expected(sharp_vit: Path):
    return vitlens.choose_method(load(str(sharp_vit)), digits("test").limit(COUNT), methods=NAMES)


def test_rows_and_metrics_of_a_choice_are_those_of_the_function(chosen, expected):
    (row,) = chosen.chosen
    assert (row.method, row.runner_up, row.confirmation) == (expected.method, expected.runner_up, expected.confirmation)
    assert (row.candidates, row.checks, row.reason) == (NAMES, expected.checks, "")
    assert (row.selection, row.report) == (len(expected.selection), len(expected.report)) == (COUNT // 2, COUNT // 2)
    certainty = chosen.metric("choice/sharp-vit/certainty")
    assert (certainty.value, certainty.n) == (pytest.approx(expected.certainty, abs=0.01), COUNT // 2)
    assert [each.method for each in chosen.choice_scores] == [each.method for each in expected.scores]
    for scored in expected.scores:
        for half, known in (("selection", scored.selection), ("report", scored.report)):
            for check, estimate in known.items():
                metric = chosen.metric(f"choice/sharp-vit/{half}/{check}/{scored.method}")
                assert (metric.value, metric.n) == (pytest.approx(estimate.value, abs=1e-3), estimate.n)
    margins = {(each.against, each.check): each.difference for each in chosen.choice_margins}
    assert set(margins) == {(each.against, each.check) for each in expected.margins}
    assert {*BASELINES, expected.runner_up} <= {against for against, _ in margins}


def test_the_chosen_method_alone_is_drawn_and_its_check_stands_in_the_table_of_checks(chosen, expected):
    (row,) = chosen.chosen
    assert [each.method for each in chosen.methods] == [row.method]
    (check,) = chosen.checks
    own = {name: value for name, value in chosen.metrics.items() if name.startswith("choice/sharp-vit/report")}
    (faithfulness,) = {name.split("/")[3] for name, value in own.items() if value == check.value}
    assert check.method == row.method
    assert check.margin.value == min(expected.margin(name, faithfulness).value for name in BASELINES)
    document = report(chosen)
    assert row.method in document.title
    (claim,) = [claim for claim in document.claims if claim.question == "choice"]
    assert claim.effect.value == pytest.approx(expected.margin(row.runner_up, "score").value, abs=1e-3)
    assert list(states(document).values()) != ["pass"]  # the weights were not randomised
    (section,) = (each for each in document.sections if "chosen" in each.title)
    assert len(section.tables[0].rows) == len(NAMES) + len(BASELINES)
    assert [figure.name for figure in section.figures] == ["choice"]


def test_with_few_images_the_default_is_drawn_and_said_not_to_be_chosen_by_evidence(tmp_path, sharp_vit):
    record = ran(tmp_path / "out", f"explain {sharp_vit} --data digits --auto --limit 5 --engine grad-cam")
    (row,), (method,) = record.chosen, record.methods
    assert row.method in row.candidates
    assert (row.certainty, row.confirmation, record.choice_scores, record.checks) == (None, None, (), ())
    assert "at least 20" in row.reason
    (answer,) = report(record).first.answer
    assert "not chosen by evidence" in answer.text
    # the package's own maps
    assert (method.title, method.signed) == (f"{ATTRIBUTIONS[row.method].title} (grad-cam package)", False)
    assert (method.source, method.map) == ("grad-cam package, ReLU and min-max scaled", "32x32")
    maps = record.maps["sharp-vit"].maps[0]
    assert (maps.min(), maps.max()) == (0, pytest.approx(1, abs=1e-5))


def test_verify_checks_the_chosen_method_of_each_model(tmp_path, sharp_vit, tiny_vit):
    line = f"explain {sharp_vit} {tiny_vit} --data digits --auto --limit 20 --method saliency,gradcam --verify"
    brief = "--composites none --other-substrates none --no-stability --no-counterfactuals"
    record = ran(tmp_path / "out", f"{line} {brief}")
    assert {each.question for each in report(record).claims} >= {"choice", "maps"}
    for row in record.chosen:
        checked = [(each.method, each.check) for each in record.checks if each.model == row.model]
        assert checked == [(row.method, check) for check in ("imputed", "blur", "weights", "object")]
        for metric in ("faithfulness/{}/gap/{}", "randomisation/{}/{}"):
            assert metric.format(row.model, row.method) in record.metrics
        assert f"checks_{row.model}" in figures(record)
    assert [row.model for row in record.chosen] == ["sharp-vit", "tiny-vit"]
