"""Which model to choose for what, from the claims of all chapters of a study."""

from collections.abc import Iterator

from vitlens.commands.shared.choice import choice_section
from vitlens.commands.study.record import StudyRecord
from vitlens.report.claims import Claim
from vitlens.report.document import Section
from vitlens.report.sections import build_section


def sections(record: StudyRecord) -> Iterator[Section]:
    """Yield the section; none for a single model."""
    section = build_section(choice_section(claims_of_chapters), record)
    if section is not None:
        yield section


def claims_of_chapters(record: StudyRecord) -> list[Claim]:
    """Return the claims of all chapters but the trainings, whose models `evaluate` judges."""
    chapters = [chapter for chapter in record.parts if chapter.row.word != "train"]
    return [claim for chapter in chapters for claim in chapter.claims]
