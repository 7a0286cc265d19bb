"""What the first page of a study does not show: its weakest claims, and what was not tested."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from vitlens.commands.shared.saturation import is_saturated
from vitlens.commands.shared.trainings import differences
from vitlens.commands.study.answers import (
    BETTER,
    CAUSES,
    ONE_MODEL,
    answers_of,
    answers_to_slots,
    slot_of,
)
from vitlens.commands.study.findings import count_images
from vitlens.commands.study.record import StudyRecord
from vitlens.report.claims import Claim
from vitlens.report.document import Sentence
from vitlens.report.findings import size_of
from vitlens.report.prose import listed, say, value_of
from vitlens.uncertainty import Estimate

_FEW: Final = 100  # images, up to which an answer is named among the weakest


def unknown(record: StudyRecord) -> Iterator[Sentence]:
    """Yield what could overturn the first page, the most serious first."""
    answers = answers_of(record)
    weakest = _weakest(answers)
    if weakest:
        lead = "Weakest claim:" if len(weakest) == 1 else "Weakest claims:"
        yield Sentence(f"{'; '.join(map(_doubt, weakest))}.", lead=lead)
    answered_leads = {claim.lead for claim in answers}
    for claim in answers_to_slots(record):
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


def _weakest(answers: Sequence[Claim]) -> list[Claim]:
    """Return the two answers that rest on the fewest images, where these are few, else the one
    nearest to no effect.
    """
    on_few_images = [claim for claim in answers if 0 < count_images(claim) <= _FEW]
    if on_few_images:
        return sorted(on_few_images, key=count_images)[:2]
    with_effect = [claim for claim in answers if _has_ranked_effect(claim)]
    return sorted(with_effect, key=lambda claim: claim.rank)[:1]


def _has_ranked_effect(claim: Claim) -> bool:
    """Return True if the interval of a claim's effect says how far it is from no effect."""
    return bool(claim.rank) and size_of(claim) is not None


def _too_few(record: StudyRecord) -> Iterator[Sentence]:
    """Yield the questions that so few images, or so few errors, do not answer."""
    answered_leads = {claim.lead for claim in answers_to_slots(record)}
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
        if asks_for_causes and errors and all(map(is_saturated, errors.values())):
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
    topic = slot_of(claim).topic
    if not _has_ranked_effect(claim):
        return say("{{ topic }} ({{ n }} images)", topic=topic, n=effect.n)
    return say(
        "{{ topic }} ({{ n }} images; the {{ what }} may be {{ range }})",
        topic=topic,
        n=effect.n,
        what="difference" if effect.unit == "points" else "value",
        range=_range_of(effect),
    )


def _range_of(effect: Estimate) -> str:
    """Return the interval of an effect, with the unit after its upper end: "12.0 to 30.0 %"."""
    low = value_of(replace(effect, value=effect.low or 0.0))
    high = value_of(replace(effect, value=effect.high or 0.0))
    low_number, _, _ = low.partition(" ")
    return f"{low_number} to {high}"


def _not_tested(record: StudyRecord) -> str:
    """Return what was not varied, with the commands that vary it."""
    return say(
        "other images, model sizes and training seeds (`vitlens study --kind "
        "data`){% if attacked %}, and stronger attacks (`--attack auto`){% endif %}.",
        attacked=record.of("attack"),
    )
