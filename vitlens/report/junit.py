"""The verdicts of a report, and what became of its requirements, as JUnit XML for continuous integration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from xml.etree import ElementTree

from vitlens.display import unprotected, visible
from vitlens.report.claims import Claim
from vitlens.report.document import Document, State
from vitlens.report.numbers import in_words
from vitlens.report.verdicts import LIMITS

Result = Literal["passed", "failed", "skipped"]
_RESULTS: dict[State, Result] = {
    "pass": "passed",
    "warn": "passed",
    "fail": "failed",
    "inconclusive": "skipped",
    "not tested": "skipped",
}


class JudgedRequirement(Protocol):
    """A requirement on a metric, judged: the metric's path, whether it holds, and both in one line."""

    @property
    def metric(self) -> str: ...  # noqa: D102

    @property
    def holds(self) -> bool: ...  # noqa: D102

    @property
    def line(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class TestCase:
    """One test case; kind: "verdict" or "requirement"; note: printed by a case that passed with a warning."""

    __test__ = False  # no test of pytest's

    kind: str
    name: str
    result: Result
    message: str
    note: str = ""


def junit(document: Document, requirements: Sequence[JudgedRequirement], *, suite: str, seconds: float) -> bytes:
    """One test suite: a test case for each verdict of a report and for each requirement.

    A verdict of fail and a requirement that does not hold are failures; inconclusive and not tested are skipped, as
    they show nothing; a warning passes, with its text as output. seconds: that the run took.
    """
    cases = [*(_of_claim(claim) for claim in document.claims if claim.state), *map(_of_requirement, requirements)]
    counts = {
        "tests": len(cases),
        "failures": sum(case.result == "failed" for case in cases),
        "errors": 0,
        "skipped": sum(case.result == "skipped" for case in cases),
    }
    attributes = {**{name: str(count) for name, count in counts.items()}, "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", attributes)
    element = ElementTree.SubElement(root, "testsuite", {"name": _text(suite), **attributes})
    for name, case in _numbered(cases):
        _append(element, suite, name, case)
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _of_claim(claim: Claim) -> TestCase:
    value = "" if claim.effect is None else f"{in_words(claim.effect)}; "
    limit = LIMITS[claim.limit].words if claim.limit else "–"
    message = f"{claim.state}: {value}{claim.because or claim.says} ({limit})"
    result, note = _RESULTS[claim.state or "not tested"], message if claim.state == "warn" else ""
    return TestCase("verdict", f"{claim.question} of {claim.subject}", result, message, note)


def _of_requirement(requirement: JudgedRequirement) -> TestCase:
    name = requirement.line.partition(":")[0]
    result: Result = "passed" if requirement.holds else "failed"
    return TestCase("requirement", f"{name} ({requirement.metric})", result, requirement.line)


def _numbered(cases: Sequence[TestCase]) -> Iterator[tuple[str, TestCase]]:
    """The cases with their names, numbered where one comes twice."""
    seen: dict[tuple[str, str], int] = {}
    for case in cases:
        key = case.kind, case.name
        seen[key] = seen.get(key, 0) + 1
        yield (case.name if seen[key] == 1 else f"{case.name} ({seen[key]})"), case


def _append(suite: ElementTree.Element, name: str, case_name: str, case: TestCase) -> None:
    attributes = {"classname": _text(f"{name}.{case.kind}"), "name": _text(case_name), "time": "0"}
    element = ElementTree.SubElement(suite, "testcase", attributes)
    message = _text(case.message)
    if case.result == "failed":
        ElementTree.SubElement(element, "failure", {"message": message, "type": case.kind}).text = message
    elif case.result == "skipped":
        ElementTree.SubElement(element, "skipped", {"message": message})
    if case.note:
        ElementTree.SubElement(element, "system-out").text = _text(case.note)


def _text(text: str) -> str:
    """Text as XML can hold it: control characters and lone surrogates as escapes."""
    return visible(unprotected(text))
