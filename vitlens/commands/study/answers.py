"""The answers on the first page of a study.

The page answers a few questions (`Slot`). For each, the claims of the chapters that may answer it
are tried in order; the largest effects of all chapters (`findings`) fill what is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from vitlens.commands.shared.calibration import calibration_words
from vitlens.commands.shared.maps.report import trust_words
from vitlens.commands.shared.shortcut import CUE_HEADS, CUE_MAPS, SHORTCUT
from vitlens.commands.study import works
from vitlens.commands.study.findings import findings
from vitlens.commands.study.record import StudyRecord
from vitlens.report.claims import Claim
from vitlens.report.findings import size_of
from vitlens.report.prose import say

# in place of a claim's question: the claim of kind "answer", to what a command was asked
ANSWER: Final = ""


class _Source(NamedTuple):
    """The claims of a command that may answer a question of the first page."""

    command: str
    question: str  # of the claims, or ANSWER


@dataclass(frozen=True)
class Slot:
    """A question of the first page.

    lead: the question.
    topic: the topic of its answer, in a few words.
    sources: the claims that may answer it, the preferred ones first.
    """

    lead: str
    topic: str
    sources: tuple[_Source, ...] = ()


CAUSES: Final = Slot(
    "What causes errors?",
    "causes",
    (_Source("compare", SHORTCUT), _Source("compare", "why it fails")),
)
PLACES: Final = Slot("Where do errors occur?", "where errors occur")
BETTER: Final = Slot("Which is better?", "accuracy", (_Source("evaluate", ANSWER),))
ONE_MODEL: Final = "How accurate is it?"  # asked of a single model, in place of which is better
HEADS: Final = Slot(
    "Which heads matter?", "heads", (_Source("compare", CUE_HEADS), _Source("ablate", ANSWER))
)
BREAKS: Final = Slot(
    "What breaks predictions?",
    "attacks",
    (_Source("attack", "difference under attack"), _Source("attack", "robustness")),
)
MAPS: Final = Slot(
    "Which map can you trust?", "maps", (_Source("explain", ANSWER), _Source("compare", CUE_MAPS))
)
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


def answers_of(record: StudyRecord) -> list[Claim]:
    """Return the answers of the first page: those that show an effect, then the largest findings on
    other questions.
    """
    answers = [claim for claim in answers_to_slots(record) if not claim.is_null]
    answered_leads = {claim.lead for claim in answers}
    for finding in findings(record):
        if len(answers) >= len(_SLOTS):
            break
        slot = _slot_of_finding(finding)
        if slot.lead not in answered_leads:
            says = finding.brief or finding.says
            answers.append(replace(finding, kind="answer", says=says, lead=slot.lead))
            answered_leads.add(slot.lead)
    return sorted(answers, key=lambda claim: _ORDER.index(slot_of(claim)))


def _slot_of_finding(finding: Claim) -> Slot:
    """Return the slot that a finding fills, by the beginning of its question."""
    for beginning, slot in _SLOT_OF_QUESTION.items():
        if finding.question.startswith(beginning):
            return slot
    return OTHERS


def slot_of(claim: Claim) -> Slot:
    """Return the slot of an answer, which names it by its lead."""
    for slot in _ORDER:
        if slot.lead == claim.lead:
            return slot
    return BETTER  # of a single model, whose lead is ONE_MODEL


def answers_to_slots(record: StudyRecord) -> Iterator[Claim]:
    """Yield the answer to each question of the first page, also those that show no effect.

    An answer's lead is the question of its slot, by which `slot_of` finds the slot again.
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
    for command, question in slot.sources:
        for chapter in record.of(command):
            candidates = [
                claim for claim in chapter.claims if claim.says and _is_answer(claim, question)
            ]
            if question != ANSWER:
                candidates.sort(key=lambda claim: claim.evidence != "intervened")
            for claim in candidates:
                yield replace(claim, place=chapter.figure(claim.place))


def _is_answer(claim: Claim, question: str) -> bool:
    """Return True if a claim answers a question, or, for ANSWER, what its chapter was asked."""
    if question == ANSWER:
        return claim.kind == "answer"
    return claim.question == question


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
    sentence = next(_brief(record, "ablate", ANSWER, claim.subject), "")
    if sentence:
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

    question: of the claim, or ANSWER.
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
