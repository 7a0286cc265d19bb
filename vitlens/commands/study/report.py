"""The report of a whole study: a first page written from all its chapters, and a section for each
question with links to them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitlens.commands.run.chapters import Question, answer_sections, unlinked_sections
from vitlens.commands.run.consistency import reconciled
from vitlens.commands.shared.planted import judgement
from vitlens.commands.study import choice, works
from vitlens.commands.study.answers import OTHERS, answers_of
from vitlens.commands.study.explorer import explorer
from vitlens.commands.study.glance import glance
from vitlens.commands.study.kinds.pretraining.report import REPORT as PRETRAINING
from vitlens.commands.study.kinds.record import KindRecord
from vitlens.commands.study.kinds.report import STOPPED
from vitlens.commands.study.kinds.transfer.report import REPORT as TRANSFER
from vitlens.commands.study.kinds.variants.report import REPORT as VARIANTS
from vitlens.commands.study.not_shown import unknown
from vitlens.commands.study.record import StudyRecord
from vitlens.record import Record
from vitlens.report.claims import Claim
from vitlens.report.document import Document, FigureSpec, Section
from vitlens.report.findings import size_of
from vitlens.report.glossary import find_terms
from vitlens.report.sections import Report

_LONGEST_TITLE: Final = 18  # words of a title of two claims
# the sections before and after "How does ... work?"
_BEFORE: Final = (
    Question("Which model classifies better?", ("evaluate",), "surest_errors"),
    Question("What misleads the models?", ("compare",), "cue_examples"),
    Question("What do the models rely on?", ("compare",), "reliance"),
    Question("Which maps show the misleading cue?", ("compare",), "cue_maps"),
    Question("Which heads carry the misleading cue?", ("compare",), "cue_heads"),
    Question("Is the confidence right?", ("evaluate",), "calibration"),
)
_AFTER: Final = (
    Question("Where does attention lie?", ("attention",), "object"),
    Question("Which map can you trust?", ("explain",), "checks"),
    Question("Why do the models fail?", ("compare",), "failure_properties"),
    Question("What fixes their errors?", ("compare",), "interventions"),
    Question("Does attention differ on errors?", ("compare",), "attention_on_errors"),
    Question("Which model copes better with disturbed images?", ("compare",), "robustness"),
    Question("Shape or texture?", ("compare",), "shape_bias"),
    Question("How do they break under attack?", ("attack",), "curves"),
    Question("Why does robustness differ?", ("attack",), "robustness_candidates"),
    Question("How do they break under common corruptions?", ("attack",), "corruptions"),
    Question("What do the features know?", ("features",), "depth"),
    Question("How well does a dictionary reconstruct a layer?", ("sae",), "dictionaries"),
    Question("What do the latents of a layer stand for?", ("sae",), "latents"),
    Question("What do they cost?", ("profile",), "parts"),
)


def claims(record: StudyRecord) -> Iterator[Claim]:
    """Yield the answers of the first page, then all that the chapters judge."""
    answers = answers_of(record)
    if answers:
        answers[0] = replace(answers[0], title=_title(answers))
    yield from answers
    said = " ".join(claim.says for claim in answers)
    answered_questions = {(answer.question, answer.subject) for answer in answers}
    for chapter in record.parts:
        if chapter.row.word != "train":  # evaluate judges the same models on the same images
            for claim in chapter.claims:
                if (claim.question, claim.subject) not in answered_questions:
                    yield _as_fact(claim, said)


def _as_fact(claim: Claim, said: str) -> Claim:
    """Return a claim of a chapter as one that is never the title.

    The first page shows it only where it has room, and where it is a fault or compares models.
    said: all answers.
    """
    kind = "fact" if claim.kind == "answer" else claim.kind
    matters = claim.state in ("warn", "fail") or kind in ("hidden fault", "comparison")
    says = claim.brief or claim.says
    if not matters or says in said:  # the latter repeats an answer
        says = ""
    return replace(claim, kind=kind, title="", says=says, lead=OTHERS.lead)


def _title(answers: Sequence[Claim]) -> str:
    """Return the title of the first answer and of the next one with an effect, where both are
    short.
    """
    first, *later = answers
    titled = [claim for claim in later if claim.title and size_of(claim) is not None]
    if not titled:
        return first.title
    title = titled[0].title
    if first.title:
        beginning, _, _ = title.partition(":")
        title = f"{first.title}; {beginning}"
    if len(title.split()) > _LONGEST_TITLE:
        return first.title
    return title


def definitions(record: StudyRecord) -> Iterator[tuple[str, str]]:
    """Yield the terms of the first page with their meaning."""
    texts = [claim.says for claim in answers_of(record)]
    table = glance(record)
    if table is not None:
        texts += [str(row[0]) for row in table.rows]
    terms = {}
    for text in texts:
        for _start, _end, term in find_terms(text):
            terms[term.name] = term.sentence
    yield from sorted(terms.items())


def known_answer(record: StudyRecord) -> Iterator[str]:
    """Yield whether a planted cause was recovered, where the generating factors of the images are
    known.
    """
    evaluations = record.of("evaluate")
    comparisons = record.of("compare")
    if not evaluations or not comparisons:
        return
    cues_by_model: dict[str, list[str]] = {}
    for chapter in comparisons:
        for row in chapter.record.reliance:
            if row.misleads:
                cues_by_model.setdefault(row.model, []).append(row.cue)
    yield from judgement(evaluations[0].record.by_factor, cues_by_model)


def picture(record: StudyRecord) -> FigureSpec | None:
    """Return images that show the answer: both models' maps of them, or the surest errors."""
    for chapter in record.of("compare"):
        examples = chapter.section("cue_examples")
        if examples is not None and examples.figures:
            return examples.figures[0]
    for chapter in (*record.of("compare"), *record.of("evaluate"), *record.of("attention")):
        first_page = chapter.document.first
        if first_page is None or first_page.picture is None:
            continue
        section = chapter.section(first_page.picture.name)  # with the figure's name in the study
        if section is not None:
            return section.figures[0]
    return None


def _sections(record: StudyRecord) -> Iterator[Section]:
    """Yield the questions that chapters answer; of a study that was stopped, also its other
    chapters.
    """
    sections = (
        *answer_sections(record.parts, _BEFORE),
        *works.sections(record),
        *answer_sections(record.parts, _AFTER),
        *choice.sections(record),
    )
    yield from sections
    if not record.training:  # it is written at the end: the study was stopped
        yield from unlinked_sections(record.parts, sections)


WHOLE: Final = Report(
    StudyRecord,
    claims=claims,
    unknown=unknown,
    picture=picture,
    glance=glance,
    explorer=explorer,
    title="{{ title }}",
    definitions=definitions,
    sections=(_sections,),
    reconciles=reconciled,
    known_answer=known_answer,
)
REPORTS: Final = (WHOLE, VARIANTS, TRANSFER, PRETRAINING)  # one for each class of record
_REPORT_OF: Final[Mapping[type[Record], Report]] = {
    declared.record: declared for declared in REPORTS
}


def report(record: Record) -> Document:
    """Return the report of a whole study, or of one --kind."""
    if isinstance(record, KindRecord) and not record.design:
        return STOPPED(record)
    return _REPORT_OF[type(record)](record)


REPORT = report  # the registry of commands takes it under this name
