"""The report of `vitlens study`: of a whole study (a summary, then the sections and figures of its chapters), or of one
controlled comparison."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import CURVES
from vitlens.commands.attack.report.checks import verdict_sentences
from vitlens.commands.evaluate.record import ACCURACY
from vitlens.commands.explain.record import CHECKS, LEAGUE
from vitlens.commands.registry import COMMANDS
from vitlens.commands.rollout.record import MASK_AREA, POINTING
from vitlens.commands.scaffold.chapters.record import CHAPTERS, CHAPTERS_FOLDER, TITLES, ChapterRow, chapters_of
from vitlens.commands.scaffold.describe import predicted_sentences
from vitlens.commands.scaffold.trainings import training_sentences
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import (
    DESIGN,
    LEFT_OUT,
    left_out_words,
)
from vitlens.commands.study.report.points import points_report
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.study import SummaryBar as Bar

__all__ = ["report"]

FUSION: Final = "mean"  # whose pointing game the summary reports


def report(record: Record) -> Document:
    """The report of a whole study, or of one --kind."""
    return points_report(record) if record.rows(DESIGN) else _whole_report(record)


def _whole_report(record: Record) -> Document:
    """The summary, the sections of all chapters, and their limits."""
    chapters = list(chapters_of(record))
    sections = [Section("Summary", tuple(_summary(record, chapters)), figures=tuple(_figure(record)), leading=True)]
    limits: dict[Sentence, None] = {}
    for row, chapter in chapters:
        document = COMMANDS[row.word].report(chapter)
        limits |= dict.fromkeys(replace(sentence, rows=()) for sentence in document.limits)
        sections += [_placed(row, section) for section in (*document.sections, *document.appendix)]
    sections.append(Section("Contents of the folder", (_contents(record),)))
    return Document(record.config.title, tuple(sections), limits=tuple(limits))


def _placed(row: ChapterRow, section: Section) -> Section:
    """A chapter's section, its title and the names of its figures extended by those of the chapter."""
    of = f" of {row.alias}" if row.alias else ""
    figures = tuple(
        replace(
            figure,
            name="_".join(part for part in (row.word, row.alias, figure.name) if part),
            chapter=(row.folder, figure.name),
        )
        for figure in section.figures
    )
    title = f"{TITLES[row.word]}{of}: {section.title[0].lower()}{section.title[1:]}"
    return replace(section, title=title, figures=figures)


def _summary(record: Record, chapters: Sequence[tuple[ChapterRow, Record]]) -> Iterator[Sentence]:
    yield from training_sentences(record)
    yield from predicted_sentences(record.options(StudyOptions).predicted)
    left_out = record.rows(LEFT_OUT)
    if left_out:
        yield Sentence(left_out_words(left_out), left_out)
    for parts, accuracy in record.all(ACCURACY):
        yield Sentence(f"`{parts['model']}`: top-1 accuracy {in_words(accuracy)} on the test images.")
    for row, chapter in chapters:
        if row.word == "rollout":
            yield from _pointing(record, row.alias)
        elif row.word == "explain":
            yield from _faithfulness(chapter, row.alias)
        elif row.word == "attack":
            yield from _robustness(chapter)


def _pointing_accuracies(record: Record, alias: str) -> dict[str, Estimate]:
    """The pointing game of one model's maps, where masks are known."""
    by_method = {parts["method"]: hits for parts, hits in record.all(POINTING) if parts["model"] == alias}
    names = {"rollout": f"rollout-{FUSION}", "relevance": "relevance"}
    return {word: by_method[name] for word, name in names.items() if name in by_method}


def _pointing(record: Record, alias: str) -> Iterator[Sentence]:
    hits = _pointing_accuracies(record, alias)
    if hits:
        area = record.metric(POINTING(model=alias, method=MASK_AREA))
        listed = "; ".join(f"{word} {in_words(hit)}" for word, hit in hits.items())
        yield Sentence(
            f"How often the highest point of a map of `{alias}` lies on the object: {listed}; the mean mask area, "
            f"the rate of a random point, is {in_words(area, with_n=False)}."
        )


def _faithfulness(chapter: Record, alias: str) -> Iterator[Sentence]:
    """The method with the greatest insertion minus deletion, and its verdict."""
    rows = [row for row in chapter.rows(LEAGUE) if not row.baseline]
    if rows:
        best = rows[0]
        gap = chapter.metric(CHECKS["gap"](model=best.model, method=best.method))
        yield Sentence(
            f"Of {len(rows)} attribution methods on `{alias}`, {best.method} has the greatest insertion minus deletion "
            f"on these images, {in_words(gap)}; {best.verdict}.",
            (best,),
        )


def _robustness(chapter: Record) -> Iterator[Sentence]:
    """Each model's accuracy under the last attack at its largest epsilon, and the verdicts of the self-checks."""
    rows = chapter.rows(CURVES)
    for alias in dict.fromkeys(row.model for row in rows):
        last = [row for row in rows if row.model == alias][-1]
        yield Sentence(
            f"`{alias}` under {last.title} at {epsilon_words(last.epsilon, last.norm)}: accuracy "
            f"{in_words(last.estimate)}.",
            (last,),
        )
    yield from verdict_sentences(chapter)


def _figure(record: Record) -> Iterator[FigureSpec]:
    if any(record.all(ACCURACY)):
        caption = "Accuracy on the test images, and how often the highest point of the map is on the object."
        yield FigureSpec("summary", caption, partial(_draw, record))


def _draw(record: Record) -> "Figure":
    from vitlens.figures.study import study_summary

    accuracy = [_bar(parts["model"], estimate) for parts, estimate in record.all(ACCURACY)]
    pointing = [
        _bar(f"{word}, {row.alias}", hits)
        for row in record.rows(CHAPTERS)
        if row.word == "rollout"
        for word, hits in _pointing_accuracies(record, row.alias).items()
    ]
    areas = [estimate.value for parts, estimate in record.all(POINTING) if parts["method"] == MASK_AREA]
    return study_summary(
        accuracy=accuracy, pointing=pointing, mask_area=areas[0] if areas else None, title="Accuracy and maps"
    )


def _bar(name: str, estimate: Estimate) -> "Bar":
    from vitlens.figures.study import SummaryBar as Bar

    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    return Bar(name, estimate.value, low, high, estimate.n or 0)


def _contents(record: Record) -> Sentence:
    words = f"Each chapter is a complete run in `{CHAPTERS_FOLDER}/`, with its own report, numbers and settings."
    trained = [row for row in record.rows(CHAPTERS) if row.word == "train"]
    if trained:
        words += (
            f" It also holds the trained models: `vitlens rollout {record.folder / trained[0].folder}` takes one by "
            "its folder (weights in model.safetensors)."
        )
    return Sentence(words)
