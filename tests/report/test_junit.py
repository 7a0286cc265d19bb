"""report/junit.py: what a verdict and a requirement are as test cases, and that any text stays well-formed XML."""

from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

from vitlens.report.document import Document, State, Verdict
from vitlens.report.junit import junit
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class _Judged:
    metric: str
    holds: bool
    line: str


MET = _Judged("accuracy/m", True, "accuracy at least 0.9: holds: accuracy/m is 0.95")
UNMET = _Judged("accuracy/m", False, "accuracy at least 0.99: does not hold: accuracy/m is 0.95")
ODD = "<b> & \"'\x1b[31m\x00\u202e\udcff ]]> é *"


def _suite(document: Document, *judged: _Judged) -> ElementTree.Element:
    root = ElementTree.fromstring(junit(document, judged, suite="vitlens audit", seconds=1.5))
    assert root.tag == "testsuites"
    [suite] = root
    return suite


def _verdict(state: State, subject: str = "accuracy of m") -> Verdict:
    return Verdict(subject, state, Estimate(0.75, 0.7, 0.8, 10), "pass from 90 %", "measured")


@pytest.mark.parametrize(
    ("state", "children"),
    [
        ("pass", []), ("warn", ["system-out"]), ("fail", ["failure"]), ("inconclusive", ["skipped"]),
        ("not tested", ["skipped"]),
    ],
)  # fmt: skip
def test_each_state_has_its_result(state, children):
    suite = _suite(Document("t", (), verdicts=(_verdict(state),)))
    [case] = suite
    assert [child.tag for child in case] == children
    assert (case.get("classname"), case.get("name")) == ("vitlens audit.verdict", "accuracy of m")
    for child in case:
        said = child.get("message") or child.text
        assert "75.0 % (70.0 to 80.0, n = 10)" in said
        assert "pass from 90 %" in said


def test_counts_are_those_of_the_cases():
    states: tuple[State, ...] = ("pass", "warn", "fail", "fail", "inconclusive", "not tested")
    suite = _suite(Document("t", (), verdicts=tuple(map(_verdict, states))), MET, UNMET)
    counted = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": 8, "failures": 3, "errors": 0, "skipped": 2}
    assert len(suite.findall("testcase")) == 8
    assert len(suite.findall("testcase/failure")) == 3
    assert float(suite.get("time")) == 1.5
    names = [(case.get("classname"), case.get("name")) for case in suite]
    assert len(set(names)) == len(names)


def test_a_requirement_that_does_not_hold_is_a_failure():
    met, unmet = _suite(Document("t", ()), MET, UNMET)
    assert len(met) == 0
    assert unmet.find("failure").get("message") == UNMET.line


def test_any_text_is_well_formed():
    suite = _suite(Document("t", (), verdicts=(Verdict(ODD, "fail", None, ODD, ODD),)), _Judged(ODD, False, ODD))
    assert suite[0].get("name").startswith("<b> & \"'\\x1b[31m\\x00\\u202e\\udcff ]]> é")
    assert all("\x1b" not in text for text in suite.itertext())
