"""The report of `vitlens audit`: verdicts, findings, a section for each question, and the chapters in the appendix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from vitlens.attacks.registry import ATTACKS
from vitlens.commands.audit.conclusions import findings, is_predicted, requirement_outcomes, verdicts
from vitlens.commands.audit.parts import AuditPart, Parts, parts_of
from vitlens.commands.audit.record import CANDIDATES, UNTESTED
from vitlens.commands.audit.report import answers
from vitlens.commands.audit.report.limits import limits
from vitlens.commands.run.chapters.record import CHAPTERS_FOLDER, TITLES
from vitlens.commands.run.describe import data_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table
from vitlens.report.numbers import number

__all__ = ["report"]

Answer: TypeAlias = Callable[[AuditPart, Record], Iterator[Sentence]]


@dataclass(frozen=True)
class AuditQuestion:
    """One section. parts: the chapters that can answer it, the first that was run does; figures: their names there."""

    title: str
    parts: tuple[str, ...]
    answer: Answer
    figures: tuple[str, ...]


QUESTIONS: Final = (
    AuditQuestion("Is it accurate?", ("evaluate",), answers.accurate, ("per_class",)),
    AuditQuestion("Are its probabilities right?", ("evaluate",), answers.calibrated, ("calibration",)),
    AuditQuestion("Which map may be trusted?", ("explain",), answers.trusted, ("faithfulness", "explain")),
    AuditQuestion("How does it break under attack?", ("attack", "corruptions"), answers.attacked, ("curves",)),
    AuditQuestion("How does it break under common corruptions?", ("corruptions",), answers.corrupted, ("corruptions",)),
    AuditQuestion("Where does it fail?", ("evaluate",), answers.failing, ("confusion", "surest_errors")),
    AuditQuestion("Is its attention healthy?", ("stats",), answers.healthy, ("specialisation", "heads")),
)
_TITLES: Final = {"corruptions": "Corruptions and FGSM on all images"}
_LEADING: Final = "Requirements"


def report(record: Record) -> Document:
    """The verdicts in the order of the questions; what the chapters show beyond them is the appendix."""
    parts = parts_of(record)
    sections = tuple(_section(question, record, parts) for question in QUESTIONS)
    shown = {figure.name for section in sections for figure in section.figures}
    return Document(
        record.config.title,
        (*_requirements(record), *sections),
        limits=limits(record, parts),
        verdicts=tuple(verdicts(record, parts)),
        findings=findings(parts),
        appendix=tuple(_appendix(record, parts, shown)),
        preface=(*data_sentences(record), *_labels(parts)),
    )


def _labels(parts: Parts) -> Iterator[Sentence]:
    if parts and is_predicted(parts):
        yield Sentence(
            "No labels are used: accuracy and calibration are not tested, and attacks and corruptions are judged by "
            "the share of the model's predictions that stay the same.",
            says="setting",
        )


def _section(question: AuditQuestion, record: Record, parts: Parts) -> Section:
    part = next((parts[name] for name in question.parts if name in parts), None)
    if part is None:
        return Section(question.title, tuple(_untested(question, record)), question=question.title, leading=True)
    own = {figure.name: figure for figure in part.document.figures}
    figures = tuple(part.placed(own[name]) for name in question.figures if name in own)
    sentences = tuple(question.answer(part, record))
    return Section(question.title, sentences, figures=figures, question=question.title, leading=True)


def _untested(question: AuditQuestion, record: Record) -> Iterator[Sentence]:
    for row in record.rows(UNTESTED):
        if row.part in question.parts:
            yield Sentence(f"Not tested: {row.reason}.", (row,))


def _requirements(record: Record) -> Iterator[Section]:
    """What became of --at-least and --at-most, where any were given."""
    judged = requirement_outcomes(record)
    if not judged:
        return
    met = [each for each in judged if each.holds]
    text = f"{len(met)} of {len(judged)} requirements {'is' if len(met) == 1 else 'are'} met."
    columns = {
        "requirement": lambda each: f"{each.requirement.metric} {each.requirement.bound} {each.requirement.value:g}",
        "holds": lambda each: "yes" if each.holds else "**no**",
        "metric": lambda each: each.metric,
        "because": lambda each: each.because,
    }
    table = Table.of("By the worse end of each 95 % interval", judged, columns)
    yield Section(_LEADING, (Sentence(text, judged),), (table,))


def _appendix(record: Record, parts: Parts, shown: set[str]) -> Iterator[Section]:
    """The attacks that were considered, all that the chapters show beyond the body, and where they lie."""
    yield _considered(record)
    for part in parts.values():
        title = _TITLES.get(part.name, TITLES[part.row.word])
        for section in (*part.document.sections, *part.document.appendix):
            figures = tuple(map(part.placed, section.figures))
            kept = tuple(figure for figure in figures if figure.name not in shown)
            if kept or section.sentences or section.tables:
                name = f"{title}: {section.title[:1].lower()}{section.title[1:]}"
                yield replace(section, title=name, figures=kept)
    yield Section("Contents of the folder", (Sentence(_CONTENTS, says="setting"),))


def _considered(record: Record) -> Section:
    columns = {
        "attacks": lambda row: ", ".join(ATTACKS[name].title for name in row.attacks),
        "restarts": lambda row: row.restarts,
        "epsilon, 1/255": lambda row: ", ".join(f"{each:g}" for each in row.epsilons),
        "images": lambda row: row.images,
        "minutes, at most": lambda row: None if row.minutes is None else number(row.minutes, 1),
        "": lambda row: row.state,
    }
    return Section("Attacks that were considered", tables=(Table.of(_CONSIDERED, record.rows(CANDIDATES), columns),))


_CONSIDERED: Final = (
    "The strongest first; minutes: estimated from the time of FGSM on all images, without early stops; undefined: the "
    "model has too few classes for the attack's loss"
)
_CONTENTS: Final = f"Each chapter is a complete run in `{CHAPTERS_FOLDER}/`, with its own report, numbers and settings."
