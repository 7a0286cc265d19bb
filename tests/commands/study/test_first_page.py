"""The first page of a study answers the ten questions that were written before it."""

import re

import pytest

from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.measure import measure
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.report import report
from vitlens.report.document import Document

pytestmark = pytest.mark.slow

NUMBER = r"-?\d[\d.,]* (%|points) \(-?[\d.]+ to -?[\d.]+"
# what an answer holds, by question: a verdict's subject, or words of the first page with a number and its interval
ANSWERS = {
    "How accurate is each model, with what interval?": rf"Top-1 accuracy: vit-digits {NUMBER}.*cnn-digits {NUMBER}",
    "Which model is better, by how much, and is the difference significant?": (
        rf"vit-digits minus cnn-digits {NUMBER}.*(significantly better|no significant difference)"
    ),
    "Were the models trained with the same budget?": r"were trained differently|same budget",
    "Can the probabilities of each model be believed?": "calibration of vit-digits.*calibration of cnn-digits",
    "Which map may be trusted, for each model?": r"Map to trust.*[Ff]or vit-digits [\w-]+.*for cnn-digits [\w-]+",
    "Which heads matter most?": r"The loss rises most without L\d+\.H\d+",
    "What do these heads do?": r"without L\d+\.H\d+ \([a-z -]+;",
    "At which perturbation does each model lose half of its accuracy?": (
        r"Half of the accuracy is lost: vit-digits .*\d/255.*cnn-digits .*\d/255"
    ),
    "How does each model fare on common corruptions?": (
        "common corruptions of vit-digits.*common corruptions of cnn-digits|corruptions"
    ),
    "What was not shown?": r"\*\*Not shown\.\*\*",
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The document of the README's first command."""
    out = tmp_path_factory.mktemp("study") / "out"
    measure(StudyOptions(cache=False, run=RunOptions(device="cpu", quiet=True, out=out, command="vitlens study")))
    return report(read_folder(out, escaped=False))


@pytest.fixture(scope="module")
def first_page(document: Document) -> str:
    """Preface, verdicts, findings and the study in short, as text."""
    lines = [sentence.text for sentence in document.preface]
    lines += [f"{verdict.subject} {verdict.state} {verdict.because}" for verdict in document.verdicts]
    lines += [finding.claim.text for finding in document.findings]
    lines += [sentence.text for sentence in document.sections[0].sentences]
    return " | ".join(lines)


@pytest.mark.parametrize("question", ANSWERS)
def test_the_first_page_answers(question: str, first_page: str) -> None:
    assert re.search(ANSWERS[question], first_page), question


def test_it_leads_with_what_a_reader_would_be_angry_to_have_missed(document: Document) -> None:
    assert any(
        "cnn-digits" in finding.claim.text and "vit-digits" in finding.claim.text for finding in document.findings
    )
