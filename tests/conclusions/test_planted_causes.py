"""The judgement if a report recovered the cause that was planted in its data."""

import numpy as np
import pytest

from tests.kit.planted_causes import factor_row, judgement, rows_of

HUE = "background-colour"
OTHER = "layout"


def outcome(sentence: str) -> str:
    """Return the outcome in a sentence of the report, without its other words."""
    if "wrong" in sentence:
        return "wrong"
    if "recover" not in sentence:
        return "control"
    if "not recover" in sentence:
        return "missed"
    return "partly" if "1 of 2" in sentence else "recovered"


def test_a_report_that_names_the_cause_of_every_model_that_uses_it_recovered_it():
    (says,) = judgement(
        [factor_row("vit", 30), factor_row("cnn", 20)], {"vit": [HUE], "cnn": [HUE, OTHER]}
    )
    assert outcome(says) == "recovered"
    assert "**vit**" in says
    assert "**cnn**" in says


@pytest.mark.parametrize("cause", [{}, {"vit": [OTHER]}])
def test_a_report_that_does_not_name_the_cause_did_not_recover_it(cause):
    (says,) = judgement([factor_row("vit", 30)], cause)
    assert outcome(says) == "missed"


def test_of_two_models_that_use_the_cause_one_may_be_found():
    (says,) = judgement([factor_row("vit", 30), factor_row("cnn", 20)], {"vit": [HUE]})
    assert outcome(says) == "partly"


@pytest.mark.parametrize(
    "row",
    [
        factor_row("vit", 0.5),
        factor_row("vit", 4.0, half=1.0),  # significant but small
        factor_row("vit", 8.0, half=9.0),  # large but not significant
    ],
)
def test_a_model_that_does_not_use_the_cause_is_a_control(row):
    (silent,) = judgement([row], {"vit": [OTHER]})
    assert outcome(silent) == "control"
    (wrong,) = judgement([row], {"vit": [HUE]})
    assert outcome(wrong) == "wrong"
    assert "**vit**" in wrong


def test_a_right_and_a_wrong_model_are_both_reported():
    first, second = judgement(
        [factor_row("vit", 30), factor_row("cnn", 0.5)], {"vit": [HUE], "cnn": [HUE]}
    )
    assert outcome(first) == "recovered"
    assert "**cnn**" not in first
    assert outcome(second) == "wrong"
    assert "**vit**" not in second


def test_without_a_planted_cause_nothing_is_judged():
    assert not list(judgement([], {"vit": [HUE]}))


def test_a_row_has_the_accuracies_where_the_cause_holds_and_elsewhere():
    holds = np.arange(400) < 200
    correct = np.where(holds, np.arange(400) % 10 > 0, np.arange(400) % 2 > 0)
    (row,) = rows_of(holds, {"vit": correct})
    assert row.accuracy_true.value == pytest.approx(0.9)
    assert row.accuracy_false.value == pytest.approx(0.5)
    assert row.difference.value == pytest.approx(40)
    assert row.is_used
    (grouped,) = rows_of(holds, {"vit": correct}, np.arange(400) // 4)
    assert grouped.accuracy_true.n == row.accuracy_true.n


@pytest.mark.parametrize("holds", [np.ones(40, bool), np.zeros(40, bool)])
def test_a_factor_that_never_varies_gives_no_row(holds):
    assert not rows_of(holds, {"vit": np.ones(40, bool)})
