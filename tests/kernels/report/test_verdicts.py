"""Verdicts: none without its reason, wherever it is printed; one in doubt leaves no title."""

from dataclasses import replace

import pytest

from tests.kit.claims import Verdict
from tests.kit.first_page import suite_of
from tests.kit.pages import written
from tests.kit.select import values_of
from vitlens.record import Record
from vitlens.report.claims import (
    Claim,
    first_page_claims,
    overall_verdict,
    title_of,
    verdict_rows,
    veto_doubted,
)
from vitlens.report.document import Document, FirstPage, Section, Table
from vitlens.report.markdown import markdown, summary_lines

REASON = "the attacks are too weak"
LIMIT = "pass from 50 %, warn from 10 %"
WEAK = Verdict("warn", REASON, "robustness", doubts=True)


def test_no_status_is_made_without_a_reason():
    for because in ("", " \n"):
        with pytest.raises(ValueError, match="reason"):
            Verdict("warn", because)
    with pytest.raises(TypeError):
        Verdict("warn")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Claim("robustness", "vit", state="warn")  # type: ignore[call-arg]


def test_the_reason_and_its_limit_stand_wherever_the_status_is_printed(tmp_path):
    claim = Claim("robustness", "vit", verdict=WEAK)
    table = Table("", ("metric", "vit", "status"), (("robust accuracy", 0.9, WEAK.words),))
    document = Document(
        "t", (Section("How robust?", status=WEAK),), FirstPage((), glance=table), claims=(claim,)
    )
    expected = f"{REASON} ({LIMIT})"
    text = markdown(document, Record())
    assert f"| warn: {expected} |" in text
    assert f"Verdict: **warn** – {expected}." in text
    assert f"warn: {expected}" in "\n".join(summary_lines(document))
    assert written(tmp_path, document).count(expected) == 2
    (case,) = suite_of((claim,))
    assert expected in (case[0].text or "")
    assert verdict_rows((claim,)) == [
        {
            "question": "robustness",
            "subject": "vit",
            "state": "warn",
            "because": REASON,
            "limit": LIMIT,
        }
    ]


def test_a_status_of_several_models_is_the_worst_with_those_it_concerns():
    worse = Claim("robustness", "vit", verdict=WEAK)
    better = Claim("robustness", "cnn", verdict=Verdict("pass", "measured", "robustness"))
    assert overall_verdict([worse, better]) == Verdict(
        "warn", f"{REASON}, for vit", "robustness", doubts=True
    )
    assert overall_verdict([worse]) == WEAK
    assert overall_verdict([Claim("size", "vit")]) is None
    alike = Claim("robustness", "cnn", verdict=WEAK)
    every = overall_verdict([worse, alike])
    assert every != WEAK  # as it says that it concerns both
    assert replace(every, because=REASON) == WEAK
    assert every.because.startswith(REASON)
    passing = Claim("robustness", "vit", verdict=Verdict("pass", "measured", "robustness"))
    assert overall_verdict([passing, better]) == better.verdict


def test_a_measurement_that_its_verdict_doubts_gives_no_title_and_no_answer():
    rests_on = (("robustness", "vit"), ("robustness", "cnn"))
    better = Claim(
        "difference",
        "vit and cnn",
        "It is better.",
        "cnn is better",
        kind="answer",
        rests_on=rests_on,
    )
    other = Claim("size", "vit", "It is small.", "vit is small", kind="answer")
    sound = Claim("robustness", "vit", verdict=Verdict("warn", "little is left", "robustness"))
    assert title_of(veto_doubted([better, sound, other]), "") == "cnn is better"
    doubted = veto_doubted([better, Claim("robustness", "vit", verdict=WEAK), other])
    assert title_of(doubted, "") == "vit is small"
    assert values_of(first_page_claims(doubted), "question") == ["size"]
