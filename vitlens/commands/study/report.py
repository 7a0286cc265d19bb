"""The report of a whole study: a page written from all its chapters, and a section a question with links to them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from vitlens.commands.run.chapters import Question, answered, finished
from vitlens.commands.run.consistency import reconciled
from vitlens.commands.shared.names import word_table
from vitlens.commands.shared.planted import judgement
from vitlens.commands.shared.shortcut import CUE_HEADS, CUE_MAPS, SHORTCUT
from vitlens.commands.shared.trainings import differences
from vitlens.commands.study import works
from vitlens.commands.study.kinds.report import REPORT as KINDS
from vitlens.commands.study.record import StudyRecord
from vitlens.record import by
from vitlens.report.claims import Claim
from vitlens.report.document import Cell, Document, FigureSpec, Section, Table
from vitlens.report.explorer import Explorer
from vitlens.report.findings import largest, not_doubted, size_of
from vitlens.report.prose import listed, say
from vitlens.report.sections import Report, urgency
from vitlens.uncertainty import LEVEL, in_points

_TITLED: Final = 18  # words of a title of two claims
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
    Question("Which model copes better with disturbed images?", ("compare",), "robustness"),
    Question("Shape or texture?", ("compare",), "shape_bias"),
    Question("How do they break under attack?", ("attack",), "curves"),
    Question("How do they break under common corruptions?", ("attack",), "corruptions"),
    Question("What do the features know?", ("features",), "depth"),
    Question("What do they cost?", ("profile",), "parts"),
)
# The questions of the first page in its order. Of each, the first claim that there is, by its chapter and its own
# question ("": the answer to what the chapter was asked). A claim that shows no effect makes room for a finding.
_SLOTS: Final[tuple[tuple[tuple[str, str], ...], ...]] = (
    (("compare", SHORTCUT),),
    (("evaluate", ""),),
    (("compare", CUE_HEADS), ("compare", "why it fails"), ("ablate", "")),
    (("attack", ""),),
    (("explain", ""), ("compare", CUE_MAPS)),
)
# The table of the first page: lines of the chapters' first pages.
_GLANCED: Final[Mapping[str, tuple[str, ...]]] = {
    "evaluate": ("top-1 accuracy", "calibration error", "confidence minus accuracy"),
    "attack": ("robust accuracy at 1/255", "accuracy lost to corruptions"),
    "profile": ("latency, smallest batch", "parameters"),
}


def claims(record: StudyRecord) -> Iterator[Claim]:
    """Yield the answers of the first page, then all that the chapters judge."""
    answers = _answers_of(record)
    if answers:
        answers[0] = replace(answers[0], title=_title(answers))
    yield from answers
    for chapter in record.parts:
        if chapter.row.word != "train":  # evaluate judges the same models on the same images
            for claim in chapter.claims:
                if not any((claim.question, claim.subject) == (each.question, each.subject) for each in answers):
                    yield replace(claim, kind="fact" if claim.kind == "answer" else claim.kind, title="")


def _title(answers: Sequence[Claim]) -> str:
    """Return the title of the first answer and of the first other one with an effect, where both are short."""
    first, *others = answers
    titled = [claim for claim in others if claim.title and size_of(claim) is not None]
    if not titled:
        return first.title
    both = f"{first.title}; {titled[0].title.partition(':')[0]}" if first.title else titled[0].title
    return both if len(both.split()) <= _TITLED else first.title


def _answers_of(record: StudyRecord) -> list[Claim]:
    """Return the answers of the first page: those that show an effect, then the largest findings on other subjects."""
    answers = [claim for claim in _asked(record) if not claim.is_null]
    covered = {_about(claim) for claim in answers}
    for finding in findings(record):
        if len(answers) >= len(_SLOTS):
            break
        if _about(finding) not in covered:
            answers.append(replace(finding, kind="answer"))
            covered.add(_about(finding))
    return answers


def _about(claim: Claim) -> str:
    """Return what a claim is about in one word: "corruption: noise" and "corruption: blur" are about one thing."""
    return claim.question.partition(":")[0]


def _asked(record: StudyRecord) -> Iterator[Claim]:
    for slot in _SLOTS:
        yield from _answer(record, slot)


def _answer(record: StudyRecord, slot: tuple[tuple[str, str], ...]) -> Iterator[Claim]:
    """Yield the first claim of a slot; of several about one question, one that changed something."""
    for word, question in slot:
        for chapter in record.of(word)[:1]:
            asked = [claim for claim in chapter.claims if claim.says and _answers(claim, question)]
            asked.sort(key=lambda claim: bool(question) and claim.evidence != "intervened")
            if asked:
                yield replace(asked[0], kind="answer", place=chapter.figure(asked[0].place))
                return


def _answers(claim: Claim, question: str) -> bool:
    return claim.question == question if question else claim.kind == "answer"


def findings(record: StudyRecord, most: int | None = None) -> tuple[Claim, ...]:
    """Return the largest effects of all chapters that survive correction over everything measured, the largest first.

    Effects that rest on a measurement in doubt are left out; the figures have the names of this study.
    """
    effects: list[Claim] = []
    for chapter in record.parts:
        if chapter.row.word == "train":  # evaluate judges the same models on the same images
            continue
        trusted = not_doubted(chapter.effects, chapter.claims)
        effects += [replace(claim, place=chapter.figure(claim.place)) for claim in trusted]
    return largest(_once(effects), most)


def _once(effects: Iterable[Claim]) -> Iterator[Claim]:
    """Yield each effect once: two chapters may measure the same difference, and the one of more images counts."""
    known: dict[tuple[object, ...], Claim] = {}
    for claim in effects:
        name = (claim.question, claim.subject) if claim.question == "which is better" else (claim.question, claim.says)
        kept = known.get(name)
        if kept is None or _images(claim) > _images(kept):
            known[name] = claim
    yield from known.values()


def _images(claim: Claim) -> int:
    return 0 if claim.effect is None else claim.effect.n or 0


def _weakest(record: StudyRecord) -> Claim | None:
    """Of the answers the one that is open, else the one whose effect lies nearest to its reference."""
    answers = [claim for claim in claims(record) if claim.kind == "answer"]
    undecided = [claim for claim in answers if claim.state == "inconclusive"]
    known = [claim for claim in answers if claim.rank and not claim.state]
    return next(iter(undecided), None) or min(known, key=lambda claim: claim.rank, default=None)


def unknown(record: StudyRecord) -> Iterator[str]:
    """Yield what could overturn the first page, the most serious first, and what would tell."""
    trained = [row for row in record.training if row.epochs]
    unequal = differences(record.training)
    weakest = _weakest(record)
    if weakest is not None:
        yield say(
            "The weakest claim above: {{ question }}{% if claim.subject %} of {{ claim.subject }}{% endif %}"
            "{% if claim.state %}, which is undecided{% else %}; its effect is nearest to none{% endif %}.",
            question=weakest.question.replace("_", " "),
            claim=weakest,
        )
    yield from (claim.says for claim in _asked(record) if claim.is_null)
    yield say(
        "{% if trained %}{{ trained|names }} {{ trained|are }} one training each: another seed can move accuracy by "
        "points. {% endif %}{% if unequal %}The trainings differ in {{ what }}, so no difference is one between "
        "architectures. {% endif %}Next: `vitlens study --kind data` trains a ViT and a CNN with several seeds.",
        trained=[row.model for row in trained],
        unequal=unequal,
        what=listed([say("{{ w }}", w=name.replace("_", " ")) for name in unequal]),
    )
    attack = record.of("attack")
    if attack and attack[0].record.curves:
        rows = attack[0].record.curves
        yield say(
            "Robustness was tested on {{ n }} images with {{ titles }}; stronger attacks (`--attack auto`) can only "
            "lower it.",
            n=rows[0].accuracy.n,
            titles=listed([say("{{ t }}", t=t) for t in by(rows, "title")]),
        )
    if record.left_out:
        yield say(
            "Without labels these chapters are left out: {{ words|join(', ') }}.",
            words=[row.chapter for row in record.left_out],
        )
    yield "Not tested: other images, and other sizes of these models."


def known_answer(record: StudyRecord) -> Iterator[str]:
    """Yield whether a planted cause was recovered, where the generating factors of the images are known."""
    for chapter in record.of("evaluate")[:1]:
        named: dict[str, list[str]] = {}
        for compared in record.of("compare"):
            for row in compared.record.reliance:
                if row.misleads:
                    named.setdefault(row.model, []).append(row.cue)
        if record.of("compare"):
            yield from judgement(chapter.record.by_factor, named)


def glance(record: StudyRecord) -> Table | None:
    """Return lines of the chapters' first pages, failing ones first."""
    lines: list[Mapping[str, Cell]] = []
    for word, titles in _GLANCED.items():
        for chapter in record.of(word)[:1]:
            lines += [line for line in map(chapter.glance, titles) if line]
    lines += _apart(record)
    if not lines:
        return None
    keys = ["metric", *record.studied, "status"]
    titles_of_columns = list(keys)
    if len(record.studied) == 2:
        keys.insert(-1, "difference")
        titles_of_columns.insert(-1, "first minus second")
    judged = {*_GLANCED["evaluate"], *_GLANCED["attack"]}  # the state of a latency is that of the timing
    rows = []
    for line in sorted(lines, key=lambda line: _urgency_of(line, judged)):
        cells = [line.get(key) for key in keys[:-1]]
        rows.append((*cells, line.get("status") if line["metric"] in judged else None))
    return Table("", tuple(titles_of_columns), tuple(rows))


def _urgency_of(line: Mapping[str, Cell], judged: Collection[str]) -> int:
    status = line.get("status")
    if status is None or line["metric"] not in judged:
        return urgency(None)
    return urgency(str(status))


def _apart(record: StudyRecord) -> Iterator[Mapping[str, Cell]]:
    """Yield both models under the attack in which they differ most clearly."""
    for chapter in record.of("attack")[:1]:
        pairs = [row for row in chapter.record.pairs if row.epsilon and row.p_holm <= LEVEL]
        row = min(pairs, key=lambda row: row.p_holm, default=None)
        if row is not None:
            at = (row.attack, row.norm, row.epsilon)
            own = {r.model: r.accuracy for r in chapter.record.curves if (r.attack, r.norm, r.epsilon) == at}
            yield {
                "metric": say("accuracy under {{ r.title }} at {{ r.at }}", r=row),
                **own,
                "difference": in_points(row.difference) if row.first == record.studied[0] else None,
            }


def picture(record: StudyRecord) -> FigureSpec | None:
    """Images that show the answer: both models' maps on the same images, or the surest errors."""
    for chapter in record.of("compare"):
        shown = chapter.section("cue_examples")
        if shown is not None and shown.figures:
            return shown.figures[0]
    for chapter in (*record.of("compare"), *record.of("evaluate"), *record.of("attention")):
        first = chapter.document.first
        section = None if first is None or first.picture is None else chapter.section(first.picture.name)
        if section is not None:
            return section.figures[0]
    return None


def _sections(record: StudyRecord) -> Iterator[Section]:
    """Yield the questions that chapters answer; of a study that was stopped, also its other chapters."""
    sections = (*answered(record.parts, _BEFORE), *works.sections(record), *answered(record.parts, _AFTER))
    yield from sections
    if not record.training:  # which is written at the end
        yield from finished(record.parts, sections)


def explorer(record: StudyRecord) -> Explorer | None:
    """Return the explorer of the first ViT, with its heads' labels, words and importance."""
    for alias in record.vits:
        attention, ablate, stats = (record.about(word, alias) for word in ("attention", "ablate", "stats"))
        found = None if attention is None else attention.document.explorer
        if found is None:
            continue
        found = found if stats is None else replace(found, words=word_table(stats.record.names))
        weights = found.images[0].weights
        if ablate is None or weights is None:
            return found
        layers, heads = weights.shape[:2]
        importance = np.full((layers, heads), np.nan)
        labels = [[""] * heads for _ in range(layers)]
        for row in ablate.record.heads:
            if row.layer < layers and row.head < heads:
                importance[row.layer, row.head], labels[row.layer][row.head] = row.loss.value, row.label or ""
        return replace(found, labels=tuple(map(tuple, labels)), importance=importance)
    return None


WHOLE: Final = Report(
    StudyRecord,
    claims=claims,
    unknown=unknown,
    picture=picture,
    glance=glance,
    explorer=explorer,
    title="{{ title }}",
    sections=(_sections,),
    reconciles=reconciled,
    known_answer=known_answer,
)


REPORTS: Final = (WHOLE, KINDS)  # all that it may be


def report(record: StudyRecord) -> Document:
    """Return the report of a whole study, or of one --kind."""
    return KINDS(record) if record.design else WHOLE(record)


REPORT = report
