"""What a whole study says: the summary, then the figures and the words of all its chapters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.record import CURVES
from vitlens.commands.attack.report.checks import verdict_sentences
from vitlens.commands.explain.record import CHECKS, LEAGUE
from vitlens.commands.scaffold.budgets import budget_words
from vitlens.commands.scaffold.describe import label_words
from vitlens.commands.scaffold.publish import read
from vitlens.errors import UnknownNameError
from vitlens.figures.study import Estimate as Bar
from vitlens.figures.study import study_summary
from vitlens.files import RESULTS, RunRecord, read_run
from vitlens.models.naming import parse_models
from vitlens.models.saved import WEIGHTS_FILE
from vitlens.names import CommandName
from vitlens.places import inside
from vitlens.runs.moved import draw, tell
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Section, in_words, metrics
from vitlens.schema import read_as
from vitlens.uncertainty import Estimate

CHAPTERS: Final = "chapters"
LEFT_OUT: Final = ("evaluate", "compare", "features")  # chapters that need labels
FUSION: Final = "mean"  # whose pointing game the summary tells

_TITLES: Final = {
    "train": "Training",
    "evaluate": "Accuracy",
    "attention": "Attention",
    "rollout": "Attention followed to the image",
    "stats": "What every head does",
    "ablate": "Which heads matter",
    "explain": "Explanations checked",
    "compare": "Side by side",
    "attack": "How models break",
    "features": "What the features know",
    "profile": "Cost",
}


@dataclass(frozen=True)
class Chapter:
    """One run within the study: its command, the model it is about ("" for all), and its folder."""

    word: str
    alias: str
    folder: str


@dataclass(frozen=True)
class _OneChapter:
    """A chapter as a file says it: only what a study runs, and only inside its folder."""

    word: CommandName
    alias: str
    folder: str

    def chapter(self) -> Chapter:
        """The chapter. Raises InputError for what a study does not run."""
        if self.word not in _TITLES:
            raise UnknownNameError("chapter of a study", self.word, _TITLES)
        return Chapter(self.word, self.alias, self.folder)


def gathered(path: Path, chapters: Sequence[Chapter]) -> Mapping[str, Estimate]:
    """The numbers of the chapters, under names that say whose they are."""
    found: dict[str, Estimate] = {}
    for chapter in chapters:
        record = read_run(path / chapter.folder)
        options: Any = record.config["options"]
        for name, measured in metrics(record).items():
            if chapter.word == "train":
                continue  # evaluate measures the same images again
            if options.get("predicted") and name.split("/")[0] == "accuracy":
                continue  # of the model's own predictions: 1 by definition
            first, *rest = name.split("/")
            # what two chapters measure is that of the first: the later ones take fewer images
            named = chapter.alias and record.results["schema"] == 1  # else its name says whose it is
            found.setdefault("/".join((first, chapter.alias, *rest)) if named else name, measured)
    return found


def draw_whole(record: RunRecord) -> Iterator[Drawn]:
    """The summary, and the figures of all chapters under names of their own."""
    if _has_accuracy(record):
        yield Drawn(
            "summary", _summary(record), "Accuracy on the test images, and how often the map's peak is on the object."
        )
    for chapter in _chapters(record):
        for drawn in draw(read_run(inside(record.folder, chapter.folder))):
            yield replace(drawn, name=_figure_name(chapter, drawn.name))


def _summary(record: RunRecord) -> Any:
    found = metrics(record)
    aliases = _aliases(record)
    accuracy = [_bar(alias, _accuracy(found, alias)) for alias in aliases]
    pointing = [
        _bar(f"{word}, {chapter.alias}", hits)
        for chapter in _chapters(record)
        if chapter.word == "rollout"
        for word, hits in _hits(found, chapter.alias)
    ]
    areas = [measured for name, measured in found.items() if name.endswith("pointing/mask-area")]
    return study_summary(
        accuracy=accuracy, pointing=pointing, mask_area=areas[0].value if areas else None, title="What was found"
    )


def _hits(found: Mapping[str, Estimate], alias: str) -> Iterator[tuple[str, Estimate]]:
    """How often the maps of one model point at the object, where that is known."""
    for word, name in (("rollout", f"rollout-{FUSION}"), ("relevance", "relevance")):
        hits = found.get(f"localisation/{alias}/pointing/{name}")
        if hits is not None:
            yield word, hits


def _bar(name: str, estimate: Estimate) -> Bar:
    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    return Bar(name, estimate.value, low, high, estimate.n or 0)


def tell_whole(record: RunRecord) -> list[Section]:
    """The summary in words, then what each chapter says, then everybody's limits."""
    found = metrics(record)
    known = _has_accuracy(record)
    lines = [
        *budget_words(record),
        *label_words(record),
        *([left_out_words(_left_out(record))] if _left_out(record) else []),
    ]
    lines += [
        f"`{alias}` is right on {in_words(_accuracy(found, alias))} of the test images."
        for alias in (_aliases(record) if known else ())
    ]
    for chapter in _chapters(record):
        hits = list(_hits(found, chapter.alias)) if chapter.word == "rollout" else []
        if hits:
            area = found[f"localisation/{chapter.alias}/pointing/mask-area"]
            listed = ", of its ".join(f"{word} in {in_words(hit)}" for word, hit in hits)
            lines.append(
                f"The highest point of `{chapter.alias}`'s {listed} of the images is on the object; the mean mask "
                f"area, which a random point would hit, is {in_words(area, with_n=False)}."
            )
    lines += [line for chapter in _chapters(record) if chapter.word == "explain" for line in _trust(record, chapter)]
    lines += [line for chapter in _chapters(record) if chapter.word == "attack" for line in _robust(record, chapter)]
    sections = [Section("Summary", tuple(lines), figures=("summary",) if known else ())]
    limits: dict[str, None] = {}
    for chapter in _chapters(record):
        for section in tell(read_run(inside(record.folder, chapter.folder))):
            if section.title == "Limits":
                limits |= dict.fromkeys(section.paragraphs)
                continue
            of = f" of {chapter.alias}" if chapter.alias else ""
            figures = tuple(_figure_name(chapter, name) for name in section.figures)
            title = f"{_TITLES[chapter.word]}{of}: {section.title[0].lower()}{section.title[1:]}"
            sections.append(replace(section, title=title, figures=figures))
    where = f"Each chapter is a whole run in `{CHAPTERS}/`, with its own report, numbers and settings."
    trained = [chapter for chapter in _chapters(record) if chapter.word == "train"]
    if trained:
        first = trained[0]
        where += (
            f" The trained models are there too: `vitlens rollout {record.folder / first.folder}` takes one by its "
            f"folder (weights in {WEIGHTS_FILE})."
        )
    return [*sections, Section("Where things are", (where,)), Section("Limits", tuple(limits))]


def _trust(record: RunRecord, chapter: Chapter) -> Iterator[str]:
    """The most faithful of a model's maps, by what its removal does, and what the checks say of it."""
    explained = read(read_run(inside(record.folder, chapter.folder)))
    rows = [row for row in explained.rows(LEAGUE) if not row.baseline]
    if rows:
        best = rows[0]
        gap = explained.metric(CHECKS["gap"](model=best.model, method=best.method))
        yield (
            f"Of {len(rows)} ways to explain `{chapter.alias}`, {best.method} has the greatest insertion minus "
            f"deletion on these images, {in_words(gap)}; {best.verdict}."
        )


def _robust(record: RunRecord, chapter: Chapter) -> Iterator[str]:
    """What is left of each model's accuracy under the last attack at its largest epsilon, and whether to believe it."""
    attacked = read(read_run(inside(record.folder, chapter.folder)))
    rows = attacked.rows(CURVES)
    for alias in dict.fromkeys(row.model for row in rows):
        last = [row for row in rows if row.model == alias][-1]
        yield (
            f"Under {last.title} at {epsilon_words(last.epsilon, last.norm)} `{alias}` is still right on "
            f"{in_words(last.estimate)} of the images."
        )
    yield from (sentence.text for sentence in verdict_sentences(attacked))


def left_out_words(words: Sequence[str]) -> str:
    """That some chapters are not there."""
    return f"Left out, as they need labelled images: {', '.join(words)}."


def _left_out(record: RunRecord) -> list[str]:
    tables: Any = record.results["tables"]
    return [str(row["chapter"]) for row in tables.get("left_out", ())]


def _has_accuracy(record: RunRecord) -> bool:
    return any(name.split("/")[0] == "accuracy" for name in metrics(record))


def _chapters(record: RunRecord) -> list[Chapter]:
    return [
        read_as(_OneChapter, row, source=str(record.folder / RESULTS)).chapter() for row in record.table("chapters")
    ]


def _aliases(record: RunRecord) -> list[str]:
    options: Any = record.config["options"]
    return [model.alias for model in parse_models(options["models"])]


def _accuracy(found: Mapping[str, Estimate], alias: str) -> Estimate:
    return found.get(f"accuracy/{alias}") or found["accuracy"]


def _figure_name(chapter: Chapter, name: str) -> str:
    return "_".join(part for part in (chapter.word, chapter.alias, name) if part)
