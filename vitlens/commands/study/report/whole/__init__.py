"""The report of a whole study: first page, introduction, results, what was learned, discussion, and the appendix."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vitlens.commands.run.chapters.record import CHAPTERS_FOLDER, TITLES
from vitlens.commands.run.describe import predicted_sentences
from vitlens.commands.shared.trainings import TRAINING, budget_sentences
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import LEFT_OUT, left_out_words
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.commands.study.report.whole.discussion import discussion
from vitlens.commands.study.report.whole.explorer import study_explorer
from vitlens.commands.study.report.whole.first_page import findings, verdicts
from vitlens.commands.study.report.whole.in_short import in_short
from vitlens.commands.study.report.whole.introduction import glossary, introduction, limits
from vitlens.commands.study.report.whole.learned import learned
from vitlens.commands.study.report.whole.recommendation import recommendation_section
from vitlens.commands.study.report.whole.results import results
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence
from vitlens.report.layout import METHODS


def whole_report(record: Record) -> Document:
    """The report of a whole study from its folder; what its chapters show beyond the results is the appendix."""
    study = Study.read(record)
    judged = tuple(verdicts(study))
    parts = (
        in_short(study, judged),
        introduction(study),
        *results(study),
        learned(study),
        *discussion(study),
        *recommendation_section(study),
        glossary(),
    )
    body = tuple(section for section in parts if section is not None)
    return Document(
        record.config.title,
        body,
        limits=tuple(limits(study)),
        verdicts=judged,
        findings=findings(study),
        appendix=tuple(_appendix(study, body)),
        preface=tuple(_preface(record)),
        explorer=study_explorer(study),
    )


def _preface(record: Record) -> Iterator[Sentence]:
    """What to know before any number: unequal training budgets, predictions as labels, chapters that were left out."""
    yield from budget_sentences(record.rows(TRAINING))
    yield from predicted_sentences(record.options(StudyOptions).predicted)
    left_out = record.rows(LEFT_OUT)
    if left_out:
        yield Sentence(left_out_words(left_out), left_out)


def _appendix(study: Study, body: Sequence[Section]) -> Iterator[Section]:
    """Every section of every chapter, without the figures and panels that the body shows."""
    shown = {figure.name for section in body for figure in section.figures}
    panels = [section.panels for section in body if section.panels]
    for chapter in study.chapters:
        of = f" of {chapter.row.alias}" if chapter.row.alias else ""
        document = chapter.document
        for section in (*document.sections, *document.appendix):
            title = f"{TITLES[chapter.row.word]}{of}: {section.title[0].lower()}{section.title[1:]}"
            placed = chapter.placed(section, title)
            figures = tuple(figure for figure in placed.figures if figure.name not in shown)
            if section.title != METHODS or figures:
                shown |= {figure.name for figure in figures}
                yield replace(placed, figures=figures, panels=() if placed.panels in panels else placed.panels)
    yield Section("Contents of the folder", (_contents(study),))


def _contents(study: Study) -> Sentence:
    words = f"Each chapter is a complete run in `{CHAPTERS_FOLDER}/`, with its own report, numbers and settings."
    trained = [chapter.row for chapter in study.of("train")]
    if trained:
        words += (
            " It also holds the trained models: "
            f"`vitlens rollout {study.record.folder.name}/{trained[0].folder}` takes one by its folder "
            "(weights in model.safetensors)."
        )
    return Sentence(words, says="setting")
