"""The report of a whole study: a first page written from all its chapters, and a section for each
question with links to them.

The first page answers a few questions (`Slot`). For each, the claims of the chapters that may
answer it are tried in order; the largest effects of all chapters (`findings`) fill what is left.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vitlens.commands.run.chapters import Question, answer_sections, unlinked_sections
from vitlens.commands.run.consistency import reconciled
from vitlens.commands.shared.calibration import calibration_words
from vitlens.commands.shared.maps.report import trust_words
from vitlens.commands.shared.planted import judgement
from vitlens.commands.shared.saturation import is_saturated
from vitlens.commands.shared.shortcut import CUE_HEADS, CUE_MAPS, SHORTCUT, misleading
from vitlens.commands.shared.trainings import differences
from vitlens.commands.study import choice, works
from vitlens.commands.study.explorer import explorer
from vitlens.commands.study.kinds.pretraining.report import REPORT as PRETRAINING
from vitlens.commands.study.kinds.record import KindRecord
from vitlens.commands.study.kinds.report import STOPPED
from vitlens.commands.study.kinds.transfer.report import REPORT as TRANSFER
from vitlens.commands.study.kinds.variants.report import REPORT as VARIANTS
from vitlens.commands.study.record import StudyRecord
from vitlens.record import Record
from vitlens.report.claims import Claim
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table
from vitlens.report.findings import largest, not_doubted, size_of
from vitlens.report.glossary import find_terms
from vitlens.report.prose import listed, say, value_of
from vitlens.report.sections import Report, urgency
from vitlens.uncertainty import Estimate

_LONGEST_TITLE: Final = 18  # words of a title of two claims
_FEW: Final = 100  # images, up to which an answer is named among the weakest
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


@dataclass(frozen=True)
class Slot:
    """A question of the first page.

    lead: the question.
    topic: the topic of its answer, in a few words.
    sources: the claims that may answer it, the preferred ones first, as pairs of a command and a
        claim's question. The question "" stands for the claim of kind "answer": the answer to what
        the command was asked.
    """

    lead: str
    topic: str
    sources: tuple[tuple[str, str], ...] = ()


CAUSES: Final = Slot(
    "What causes errors?", "causes", (("compare", SHORTCUT), ("compare", "why it fails"))
)
PLACES: Final = Slot("Where do errors occur?", "where errors occur")
BETTER: Final = Slot("Which is better?", "accuracy", (("evaluate", ""),))
ONE_MODEL: Final = "How accurate is it?"  # asked of a single model, in place of which is better
HEADS: Final = Slot("Which heads matter?", "heads", (("compare", CUE_HEADS), ("ablate", "")))
BREAKS: Final = Slot(
    "What breaks predictions?",
    "attacks",
    (("attack", "difference under attack"), ("attack", "robustness")),
)
MAPS: Final = Slot("Which map can you trust?", "maps", (("explain", ""), ("compare", CUE_MAPS)))
OTHERS: Final = Slot("What else was found?", "what else was found")
# the questions that are always asked; findings may fill the others
_SLOTS: Final = (CAUSES, BETTER, HEADS, BREAKS, MAPS)
_ORDER: Final = (CAUSES, PLACES, BETTER, HEADS, BREAKS, MAPS, OTHERS)  # on the page
# the slot of a finding, by the beginning of its question
_SLOT_OF_QUESTION: Final = {
    "errors by": PLACES,
    "which is better": BETTER,
    "head": HEADS,
    "attack": BREAKS,
}
# the table of the first page: lines of the chapters' first pages, by command
_GLANCED: Final[Mapping[str, tuple[str, ...]]] = {
    "evaluate": ("top-1 accuracy", "calibration error"),
    "attack": ("robust accuracy at 1/255", "accuracy lost to corruptions"),
}


def claims(record: StudyRecord) -> Iterator[Claim]:
    """Yield the answers of the first page, then all that the chapters judge."""
    answers = _answers_of(record)
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
    if not matters or says in said:
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


def _answers_of(record: StudyRecord) -> list[Claim]:
    """Return the answers of the first page: those that show an effect, then the largest findings on
    other questions.
    """
    answers = [claim for claim in _answers_to_slots(record) if not claim.is_null]
    answered_leads = {claim.lead for claim in answers}
    for finding in findings(record):
        if len(answers) >= len(_SLOTS):
            break
        slot = _slot_of_finding(finding)
        if slot.lead not in answered_leads:
            says = finding.brief or finding.says
            answers.append(replace(finding, kind="answer", says=says, lead=slot.lead))
            answered_leads.add(slot.lead)
    return sorted(answers, key=lambda claim: _ORDER.index(_slot_of(claim)))


def _slot_of_finding(finding: Claim) -> Slot:
    """Return the slot that a finding fills, by the beginning of its question."""
    for beginning, slot in _SLOT_OF_QUESTION.items():
        if finding.question.startswith(beginning):
            return slot
    return OTHERS


def _slot_of(claim: Claim) -> Slot:
    """Return the slot of an answer, which names it by its lead."""
    for slot in _ORDER:
        if slot.lead == claim.lead:
            return slot
    return BETTER  # of a single model, whose lead is ONE_MODEL


def _answers_to_slots(record: StudyRecord) -> Iterator[Claim]:
    """Yield the answer to each question of the first page, also those that show no effect.

    An answer's lead is the question of its slot, by which `_slot_of` finds the slot again.
    """
    for slot in _SLOTS:
        candidates = list(_candidates(record, slot))
        if not candidates:
            continue
        with_effect = [claim for claim in candidates if not claim.is_null]
        claim = with_effect[0] if with_effect else candidates[0]
        sentences = filter(None, _sentences_of(record, slot, claim))
        lead = slot.lead
        if slot == BETTER and len(record.studied) == 1:
            lead = ONE_MODEL
        yield replace(claim, kind="answer", says=" ".join(sentences), lead=lead)


def _candidates(record: StudyRecord, slot: Slot) -> Iterator[Claim]:
    """Yield the claims that may answer a question, the preferred ones first.

    Of a chapter's claims with one question, those whose evidence is an intervention come first.
    """
    for word, question in slot.sources:
        for chapter in record.of(word):
            candidates = [
                claim for claim in chapter.claims if claim.says and _is_answer(claim, question)
            ]
            if question:
                candidates.sort(key=lambda claim: claim.evidence != "intervened")
            for claim in candidates:
                yield replace(claim, place=chapter.figure(claim.place))


def _is_answer(claim: Claim, question: str) -> bool:
    """Return True if a claim answers a question, or, for "", what its chapter was asked."""
    if question:
        return claim.question == question
    return claim.kind == "answer"


def _sentences_of(record: StudyRecord, slot: Slot, claim: Claim) -> Iterator[str]:
    """Yield the sentences that answer a question: those of a claim, and what other chapters add."""
    if slot == HEADS:
        yield from _heads(record, claim)
        return
    if slot == MAPS and claim.question == "maps":
        checks = []
        for chapter in record.of("explain"):
            checks += chapter.record.checks
        yield trust_words(checks)
        yield from _brief(record, "compare", CUE_MAPS)
        return
    yield claim.brief or claim.says
    if slot == CAUSES and claim.question == SHORTCUT:
        yield from _smaller_cause(record, claim)
    if slot == BETTER:
        for chapter in record.of("evaluate"):
            yield calibration_words(chapter.record.scores)
    if slot == BREAKS:
        yield from _brief(record, "attack", "common corruptions")


def _heads(record: StudyRecord, claim: Claim) -> Iterator[str]:
    """Yield the head without which a model loses most, those that carry a cue, and those that serve
    a class.
    """
    head = works.most_important_head(record, claim.subject)
    for sentence in _brief(record, "ablate", "", claim.subject):
        yield sentence
        # "It is needed ..." can only follow a sentence about this head
        if head is not None and f"**{head.unit}**" in sentence:
            yield _role_sentence(head)
    if claim.question == CUE_HEADS:
        yield claim.brief
    yield from _brief(record, "stats", "writes", claim.subject)


def _role_sentence(head: works.ImportantHead) -> str:
    """Return what a head does: its tested label, or else over how many tokens it attends."""
    if head.role != works.NO_ROLE:
        verb = "is " if head.role.startswith("needed") else ""
        return say("It {{ verb }}{{ role|whole }}.", role=head.role, verb=verb)
    if head.attended_keys is None:
        return "No tested label fits it."
    return say(
        "No tested label fits it; it attends to {{ attended }} of {{ keys }} tokens.",
        attended=round(head.attended_keys),
        keys=head.keys,
    )


def _brief(record: StudyRecord, word: str, question: str, subject: str = "") -> Iterator[str]:
    """Yield the short sentence of the first claim about a question and a subject, if there is one.

    question: "" for the answer to what the chapter was asked.
    subject: "" for any.
    """
    for chapter in record.of(word):
        for claim in chapter.claims:
            has_sentence = bool(claim.says and claim.brief)
            is_about_subject = subject in ("", claim.subject)
            if has_sentence and is_about_subject and _is_answer(claim, question):
                yield claim.brief
                return


def _smaller_cause(record: StudyRecord, claim: Claim) -> Iterator[str]:
    """Yield another cause of the errors of a model that a cue misleads, if one was shown.

    claim: the claim about the cue; its subject is one model, or two joined by "and".
    """
    misled_models = claim.subject.split(" and ")
    for chapter in record.of("compare"):
        for other in chapter.claims:
            is_cause = (
                other.question == "why it fails"
                and other.evidence == "intervened"
                and not other.is_null
            )
            if is_cause and other.brief and other.subject in misled_models:
                is_smaller = (size_of(other) or 0.0) < (size_of(claim) or 0.0)
                opening = "Second" if is_smaller else "Also"
                yield f"{opening}, {other.brief}"
                return


def findings(record: StudyRecord, most: int | None = None) -> tuple[Claim, ...]:
    """Return the largest effects of all chapters, the largest first.

    Only effects count that survive correction over everything measured and rest on no measurement
    in doubt. Their figures have the names that they have in the study.
    most: the largest number of effects; None for all.
    """
    effects: list[Claim] = []
    for chapter in record.parts:
        if chapter.row.word == "train":  # evaluate judges the same models on the same images
            continue
        trusted = not_doubted(chapter.effects, chapter.claims)
        effects += [replace(claim, place=chapter.figure(claim.place)) for claim in trusted]
    return largest(_without_repeats(effects), most)


def _without_repeats(effects: Iterable[Claim]) -> Iterator[Claim]:
    """Yield each effect once.

    If two chapters measure the same difference, the one on more images counts.
    """
    claims_by_key: dict[tuple[str, str], Claim] = {}
    for claim in effects:
        key = (claim.question, claim.says)
        if claim.question == "which is better":
            # its sentences contain numbers, which differ between chapters
            key = (claim.question, claim.subject)
        earlier = claims_by_key.get(key)
        if earlier is None or _count_images(claim) > _count_images(earlier):
            claims_by_key[key] = claim
    yield from claims_by_key.values()


def _count_images(claim: Claim) -> int:
    """Return the number of images on which an effect was measured, 0 if it is unknown."""
    if claim.effect is None:
        return 0
    return claim.effect.n or 0


def _weakest(answers: Sequence[Claim]) -> list[Claim]:
    """Return the two answers that rest on the fewest images, where these are few, else the one
    nearest to no effect.
    """
    on_few_images = [claim for claim in answers if 0 < _count_images(claim) <= _FEW]
    if on_few_images:
        return sorted(on_few_images, key=_count_images)[:2]
    with_effect = [claim for claim in answers if _has_ranked_effect(claim)]
    return sorted(with_effect, key=lambda claim: claim.rank)[:1]


def _has_ranked_effect(claim: Claim) -> bool:
    """Return True if the interval of a claim's effect says how far it is from no effect."""
    return bool(claim.rank) and size_of(claim) is not None


def unknown(record: StudyRecord) -> Iterator[Sentence]:
    """Yield what could overturn the first page, the most serious first."""
    answers = _answers_of(record)
    weakest = _weakest(answers)
    if weakest:
        lead = "Weakest claim:" if len(weakest) == 1 else "Weakest claims:"
        yield Sentence(f"{'; '.join(map(_doubt, weakest))}.", lead=lead)
    answered_leads = {claim.lead for claim in answers}
    for claim in _answers_to_slots(record):
        if claim.is_null:
            # a question that another claim answers is not asked again
            lead = "" if claim.lead in answered_leads else claim.lead
            yield Sentence(claim.says, lead=lead)
    yield from _too_few(record)
    if record.left_out:
        chapters = [row.chapter for row in record.left_out]
        yield Sentence(
            say(
                "Without labels these chapters are left out: {{ words|join(', ') }}. Accuracy is "
                "the share of predictions that stay as they were.",
                words=chapters,
            )
        )
    unequal = differences(record.training)
    if unequal:
        names = [say("{{ w }}", w=name.replace("_", " ")) for name in unequal]
        yield Sentence(
            say(
                "The trainings differ in {{ names }}, so no difference can be "
                "attributed to the architecture.",
                names=listed(names),
            )
        )
    yield Sentence(_not_tested(record), lead="Not tested:")


def _too_few(record: StudyRecord) -> Iterator[Sentence]:
    """Yield the questions that so few images, or so few errors, do not answer."""
    answered_leads = {claim.lead for claim in _answers_to_slots(record)}
    asks_which_is_better = not answered_leads & {BETTER.lead, ONE_MODEL}
    asks_for_causes = CAUSES.lead not in answered_leads and bool(record.of("compare"))
    for chapter in record.of("evaluate"):
        scores = chapter.record.scores
        if asks_which_is_better and scores:
            accuracies = [
                say("**{{ score.model }}** {{ score.accuracy|value }}", score=score)
                for score in scores
            ]
            says = say(
                "{{ n }} images are too few to tell (accuracy: {{ accuracies }}).",
                n=chapter.record.images,
                accuracies=listed(accuracies),
            )
            lead = ONE_MODEL if len(scores) == 1 else BETTER.lead
            yield Sentence(says, lead=lead)
        errors = {score.model: _count_errors(score) for score in scores}
        if asks_for_causes and all(map(is_saturated, errors.values())):
            counts = [
                say("{{ n or 'none' }} of **{{ model }}**", n=n, model=name)
                for name, n in errors.items()
            ]
            says = say("Not known: too few errors ({{ counts }}).", counts=listed(counts))
            yield Sentence(says, lead=CAUSES.lead)


def _count_errors(score: Any) -> int:
    """Return how many images a model classifies wrongly; score: a row of `vitlens evaluate`."""
    accuracy: Estimate = score.accuracy
    return round((1 - accuracy.value) * (accuracy.n or 0))


def _doubt(claim: Claim) -> str:
    """Return what an answer is about, on how many images it rests, and how far its effect may lie
    from the estimate.
    """
    effect = claim.effect
    assert effect is not None  # as its images are known
    topic = _slot_of(claim).topic
    if not _has_ranked_effect(claim):
        return say("{{ topic }} ({{ n }} images)", topic=topic, n=effect.n)
    is_difference = effect.unit == "points"
    # the lower end is a number in points or percent, the upper end follows with the unit
    low = effect.low if is_difference else 100 * (effect.low or 0.0)
    high = value_of(replace(effect, value=effect.high or 0.0))
    return say(
        "{{ topic }} ({{ n }} images; the {{ what }} may be {{ low|number(1) }} to {{ high }})",
        topic=topic,
        n=effect.n,
        what="difference" if is_difference else "value",
        low=low,
        high=high,
    )


def _not_tested(record: StudyRecord) -> str:
    """Return what was not varied, with the commands that vary it."""
    return say(
        "other images, model sizes and training seeds (`vitlens study --kind "
        "data`){% if attacked %}, and stronger attacks (`--attack auto`){% endif %}.",
        attacked=record.of("attack"),
    )


def definitions(record: StudyRecord) -> Iterator[tuple[str, str]]:
    """Yield the terms of the first page with their meaning."""
    texts = [claim.says for claim in _answers_of(record)]
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


def glance(record: StudyRecord) -> Table | None:
    """Return lines of the chapters' first pages, failing ones first."""
    lines: list[Mapping[str, Cell]] = []  # cells by the title of their column
    for word, titles in _GLANCED.items():
        chapters = record.of(word)
        if chapters:
            lines += filter(None, map(chapters[0].glance, titles))  # a line may be empty
    lines += _without_cue(record)
    if not lines:
        return None
    keys = ["metric", *record.studied, "status"]
    titles_of_columns = list(keys)
    if len(record.studied) == 2:  # a column before the status
        keys.insert(-1, "difference")
        titles_of_columns.insert(-1, "first minus second")
    lines.sort(key=lambda line: urgency(str(line.get("status") or "")))
    rows = [_shorten_line(line, keys) for line in lines]
    caption = "A status judges the worse end of an interval"
    return Table(caption, tuple(titles_of_columns), tuple(rows))


def _shorten_line(line: Mapping[str, Cell], keys: Sequence[str]) -> tuple[Cell, ...]:
    """Return the cells of a line, with the number of images in the first.

    keys: the cells, in order. If the line has a difference, only that keeps its interval.
    """
    counts = {cell.n for cell in line.values() if isinstance(cell, Estimate)}
    n = None
    if len(counts) == 1:  # all estimates of the line are on the same number of images
        (n,) = counts
    has_difference = isinstance(line.get("difference"), Estimate)
    cells: list[Cell] = []
    for key in keys:
        cell = line.get(key)
        if isinstance(cell, Estimate) and n is not None:
            cell = replace(cell, n=None)
        if isinstance(cell, Estimate) and has_difference and key != "difference":
            cell = replace(cell, low=None, high=None)
        cells.append(cell)
    if n is not None:
        cells[0] = say("{{ metric|whole }} (n = {{ n }})", metric=cells[0], n=n)
    return tuple(cells)


def _without_cue(record: StudyRecord) -> Iterator[Mapping[str, Cell]]:
    """Yield how many errors of each model are corrected without the cue that misleads most, and by
    the control.
    """
    comparisons = record.of("compare")
    if not comparisons:
        return
    comparison = comparisons[0].record
    cues = misleading(comparison)
    if not cues:
        return
    strongest = cues[0]
    cells: dict[str, Cell] = {
        "metric": say("errors corrected {{ row.change|whole }} (n = {{ row.n }})", row=strongest)
    }
    for row in comparison.reliance:
        if row.cue_and_change == strongest.cue_and_change:
            cells[row.model] = say(
                "{{ row.fixed }} of {{ row.errors }} (control {{ row.control_fixed }})", row=row
            )
    yield cells


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
