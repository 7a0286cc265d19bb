"""The verdicts and requirements of a report as JUnit XML, for continuous integration."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from vitlens.display import unprotected, visible
from vitlens.report.document import Document, State
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
    for kind, name, state, message in _cases(document, requirements):
        uses[kind, name] += 1
        if uses[kind, name] > 1:
            name += f" ({uses[kind, name]})"
        attributes = {"classname": _text(f"{suite}.{kind}"), "name": _text(name), "time": "0"}
        case = ElementTree.SubElement(test_suite, "testcase", attributes)
        _add_outcome(case, kind, state, _text(message))
    totals = {
        "tests": str(len(test_suite)),
        "failures": str(len(test_suite.findall("testcase/failure"))),
        "errors": "0",
        "skipped": str(len(test_suite.findall("testcase/skipped"))),
        "time": f"{seconds:.3f}",
    }
    for element in (root, test_suite):
        element.attrib |= totals
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _add_outcome(case: ElementTree.Element, kind: str, state: State, message: str) -> None:
    if state == "fail" and kind == "requirement":
        ElementTree.SubElement(case, "failure", {"message": message, "type": kind}).text = message
    elif state == "warn":
        ElementTree.SubElement(case, "system-out").text = message
    elif state != "pass":
        ElementTree.SubElement(case, "skipped", {"message": message})


def _cases(
    document: Document, requirements: Sequence[Any]
) -> Iterator[tuple[str, str, State, str]]:
    """Yield the kind, name, state and message of each case.

    A verdict that only repeats a requirement is left out.
    """
    required_metrics = {outcome.metric for outcome in requirements}
    for claim in document.claims:
        verdict = claim.verdict
        if verdict is None:
            continue
        if not claim.limit and f"{claim.question}/{claim.subject}" in required_metrics:
            continue
        reason = verdict.reason
        if claim.effect is not None:
            reason = f"{in_words(claim.effect)}; {reason}"
        yield (
            "verdict",
            f"{claim.question} of {claim.subject}",
            verdict.state,
            f"{verdict.state}: {reason}",
        )
    for outcome in requirements:
        name = outcome.line.partition(":")[0]
        state: State = "pass" if outcome.holds else "fail"
        yield "requirement", f"{name} ({outcome.metric})", state, outcome.line


def _text(text: str) -> str:
    """Return a text as XML can hold it: control characters and lone surrogates as escapes."""
    return visible(unprotected(text))
