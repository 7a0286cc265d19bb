"""The first page of a study: its questions, and what a text says in answer to each."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.kit.select import select_one
from vitlens.commands.shared.calibration import calibration_words
from vitlens.commands.shared.maps.record import judged_maps
from vitlens.commands.shared.shortcut import misleading
from vitlens.commands.study.answers import BETTER, BREAKS, CAUSES, HEADS, MAPS, Slot
from vitlens.commands.study.record import StudyRecord
from vitlens.commands.study.report import WHOLE
from vitlens.record import ModelEntry
from vitlens.report.document import FirstPage
from vitlens.report.markdown import took
from vitlens.report.numbers import frequency, number, percent
from vitlens.uncertainty import Estimate

__all__ = [
    "BETTER",
    "BREAKS",
    "CAUSES",
    "HEADS",
    "MAPS",
    "ModelEntry",
    "answer_to",
    "calibration_words",
    "chapter_of",
    "first_page",
    "frequency",
    "judged_maps",
    "misleading",
    "number",
    "percent",
    "score_row",
    "took",
]


def first_page(record: StudyRecord) -> FirstPage:
    """Return the first page without its picture, as committed reports have no arrays."""
    return replace(WHOLE, sections=(), picture=None, explorer=None)(record).first


def answer_to(record: StudyRecord, slot: Slot) -> str:
    """Return the text that answers a question of the first page."""
    return select_one(first_page(record).answer, lead=slot.lead).text


def chapter_of(record: StudyRecord, word: str) -> Any:
    """Return the record of the only chapter of a command."""
    (chapter,) = record.of(word)
    return chapter.record


def score_row(alias: str, error: Estimate) -> Any:
    """Return a model with this calibration error, which is neither over- nor underconfident."""
    return SimpleNamespace(
        model=alias, calibration_error=error, confidence_gap=Estimate(0.0, -0.01, 0.01, error.n)
    )
