"""The verdicts and requirements of a report as JUnit XML, for continuous integration."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from vitlens.display import visible
from vitlens.report.document import Document, State
from vitlens.report.markdown import without_marks
from vitlens.report.numbers import in_words


def junit(document: Document, requirements: Sequence[Any], *, suite: str, seconds: float) -> bytes:
    """Return one test suite: a test case for each verdict of a report and for each requirement.

    - A requirement that does not hold is a failure. Nothing else is, so the file agrees with the
      exit code.
    - A verdict of "fail", "inconclusive" or "not tested" is skipped, with its text as the reason.
    - A warning passes, with its text as output.

    If a name is used twice, it is numbered.

    requirements: a `RequirementOutcome` for each requirement (commands/run/requirements.py).
    suite: the name of the test suite.
    seconds: the duration of the run.
    """
    root = ElementTree.Element("testsuites")
    test_suite = ElementTree.SubElement(root, "testsuite", {"name": _text(suite)})
    uses: Counter[tuple[str, str]] = Counter()
    for case in _cases(document, requirements):
        uses[case.kind, case.name] += 1
        name = case.name
        if uses[case.kind, case.name] > 1:
            name += f" ({uses[case.kind, case.name]})"
        attributes = {
            "classname": _text(f"{suite}.{case.kind}"),
            "name": _text(name),
            "time": "0",  # a verdict has no duration
        }
        element = ElementTree.SubElement(test_suite, "testcase", attributes)
        _add_outcome(element, case)
    totals = {
        "tests": str(len(test_suite)),
        "failures": str(len(test_suite.findall("testcase/failure"))),
        "errors": "0",
        "skipped": str(len(test_suite.findall("testcase/skipped"))),
        "time": f"{seconds:.3f}",
    }
    for counted in (root, test_suite):
        counted.attrib.update(totals)
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _add_outcome(element: ElementTree.Element, case: "_Case") -> None:
    message = _text(case.message)
    if case.state == "fail" and case.kind == "requirement":
        attributes = {"message": message, "type": case.kind}
        ElementTree.SubElement(element, "failure", attributes).text = message
    elif case.state == "warn":
        ElementTree.SubElement(element, "system-out").text = message
    elif case.state != "pass":
        ElementTree.SubElement(element, "skipped", {"message": message})


class _Case(NamedTuple):
    """A test case.

    kind: "verdict" or "requirement".
    """

    kind: str
    name: str
    state: State
    message: str


def _cases(document: Document, requirements: Sequence[Any]) -> Iterator[_Case]:
    """Yield the test cases. A verdict that only repeats a requirement is left out."""
    required_metrics = {outcome.metric for outcome in requirements}
    for claim in document.claims:
        verdict = claim.verdict
        if verdict is None:
            continue
        # a claim without a limit, whose metric has one in a requirement
        if not claim.limit and f"{claim.question}/{claim.subject}" in required_metrics:
            continue
        reason = verdict.reason
        if claim.effect is not None:
            reason = f"{in_words(claim.effect)}; {reason}"
        yield _Case(
            kind="verdict",
            name=f"{claim.question} of {claim.subject}",
            state=verdict.state,
            message=f"{verdict.state}: {reason}",
        )
    for outcome in requirements:
        name = outcome.line.partition(":")[0]
        state: State = "pass" if outcome.holds else "fail"
        yield _Case(
            kind="requirement",
            name=f"{name} ({outcome.metric})",
            state=state,
            message=outcome.line,
        )


def _text(text: str) -> str:
    """Return a text of a report as XML can hold it.

    It has no Markdown; control characters and lone surrogates are escapes.
    """
    return visible(without_marks(text))
