"""The verdicts of a report, and what became of its requirements, as JUnit XML for continuous integration."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from vitlens.display import unprotected, visible
from vitlens.report.document import Document, State
from vitlens.report.numbers import in_words


def junit(document: Document, requirements: Sequence[Any], *, suite: str, seconds: float) -> bytes:
    """Return one test suite: a test case for each verdict of a report and for each requirement.

    Only a requirement that does not hold is a failure, so that the file agrees with the exit code; a verdict of fail,
    inconclusive or not tested is skipped, with its text as the reason; a warning passes, with its text as output.
    A name that comes twice is numbered. requirements: the `RequirementOutcome` of each
    (commands/run/requirements.py); seconds: that the run took.
    """
    root = ElementTree.Element("testsuites")
    whole = ElementTree.SubElement(root, "testsuite", {"name": _text(suite)})
    seen: Counter[tuple[str, str]] = Counter()
    for kind, name, state, message in _cases(document, requirements):
        seen[kind, name] += 1
        number = f" ({seen[kind, name]})" if seen[kind, name] > 1 else ""
        attributes = {"classname": _text(f"{suite}.{kind}"), "name": _text(name + number), "time": "0"}
        case = ElementTree.SubElement(whole, "testcase", attributes)
        words = _text(message)
        if state == "fail" and kind == "requirement":
            ElementTree.SubElement(case, "failure", {"message": words, "type": kind}).text = words
        elif state == "warn":
            ElementTree.SubElement(case, "system-out").text = words
        elif state != "pass":
            ElementTree.SubElement(case, "skipped", {"message": words})
    failures, skipped = (len(whole.findall(f"testcase/{each}")) for each in ("failure", "skipped"))
    counts = {"tests": len(whole), "failures": failures, "errors": 0, "skipped": skipped}
    for element in (root, whole):
        element.attrib |= {**{name: str(count) for name, count in counts.items()}, "time": f"{seconds:.3f}"}
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _cases(document: Document, requirements: Sequence[Any]) -> Iterator[tuple[str, str, State, str]]:
    """Yield each case: its kind, its name, how it ended, and why; a verdict that is a requirement is one case, the
    latter."""
    required = {outcome.metric for outcome in requirements}
    for claim in document.claims:
        by_requirement = not claim.limit and f"{claim.question}/{claim.subject}" in required
        if claim.verdict is not None and not by_requirement:
            value = "" if claim.effect is None else f"{in_words(claim.effect)}; "
            message = f"{claim.verdict.state}: {value}{claim.verdict.reason}"
            yield "verdict", f"{claim.question} of {claim.subject}", claim.verdict.state, message
    for outcome in requirements:
        name = outcome.line.partition(":")[0]
        yield "requirement", f"{name} ({outcome.metric})", "pass" if outcome.holds else "fail", outcome.line


def _text(text: str) -> str:
    """Text as XML can hold it: control characters and lone surrogates as escapes."""
    return visible(unprotected(text))
