"""The first page of the committed study answers the ten questions that were written before it."""

import re
from pathlib import Path

import pytest

import vitlens
from vitlens.commands.scaffold.publish import read_folder
from vitlens.commands.study.report import report
from vitlens.report.document import Document

FOLDER = Path(vitlens.__file__).parents[1] / "reports" / "study-digits"
NUMBER = r"-?\d[\d.,]* (%|points) \(-?[\d.]+ to -?[\d.]+"
# what an answer holds, by question: a verdict's subject, or words of the first page with a number and its interval
ANSWERS = {
    "How accurate is each model, with what interval?": rf"Top-1 accuracy: vit-micro {NUMBER}.*resnet20 {NUMBER}",
    "Which model is better, by how much, and is the difference significant?": (
        rf"vit-micro minus resnet20 {NUMBER}.*(significantly better|no significant difference)"
    ),
    "Were the models trained with the same budget?": r"were trained differently|same budget",
    "Can the probabilities of each model be believed?": "calibration of vit-micro.*calibration of resnet20",
    "Which map may be trusted, for each model?": r"Map to trust.*[Ff]or vit-micro [\w-]+.*for resnet20 [\w-]+",
    "Which heads matter most?": r"The loss rises most without L\d+\.H\d+",
    "What do these heads do?": r"without L\d+\.H\d+ \([a-z -]+;",
    "At which perturbation does each model lose half of its accuracy?": (
        r"Half of the accuracy is lost: vit-micro .*\d/255.*resnet20 .*\d/255"
    ),
    "How does each model fare on common corruptions?": (
        "common corruptions of vit-micro.*common corruptions of resnet20|corruptions"
    ),
    "What was not shown?": r"\*\*Not shown\.\*\*",
}


@pytest.fixture(scope="module")
def document() -> Document:
    """The document of the committed study."""
    return report(read_folder(FOLDER, escaped=False))


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
    assert any("resnet20" in finding.claim.text and "vit-micro" in finding.claim.text for finding in document.findings)
