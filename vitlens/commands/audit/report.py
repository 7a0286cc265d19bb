"""The report of `vitlens audit`: what passes, what fails, and what was not tested."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.verdict import not_robust
from vitlens.commands.audit.record import REPORT_SHARE, AuditRecord, CandidateRow
from vitlens.commands.run.chapters import Chapter, Question, answer_sections, unlinked_sections
from vitlens.commands.run.consistency import reconciled
from vitlens.commands.run.requirements import RequirementOutcome, outcomes, requirements_of
from vitlens.commands.shared import failures, failures_sections, reliance, shortcut
from vitlens.commands.shared.maps.record import MapCheckRow, judged_maps
from vitlens.report.claims import Claim, found, judge, unjudged
from vitlens.report.document import Section as DocumentSection
from vitlens.report.document import Table
from vitlens.report.escape import as_code
from vitlens.report.next_steps import NextStep, command_of
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import ROWS, Report, Section
from vitlens.report.verdicts import LIMITS, ORDER, Verdict
from vitlens.uncertainty import Estimate

_SELF_CHECKS: Final = "self-checks"  # the question of the attacks' soundness
FEW: Final = 30  # images below which the share of predictions that stay is not judged
_VERIFIED_MAPS: Final = NextStep(
    "the maps follow a shift of the image", "vitlens explain {model} {data} --verify"
)
_LOST: Final = {  # the questions that a chapter judges, which are not tested without it
    "evaluate": ("calibration",),
    "explain": ("maps",),
    "stats": ("attention health",),
    "corruptions": ("robustness", "common corruptions"),
}
_QUESTIONS: Final = (
    Question("Is it accurate?", ("evaluate",), "per_class"),
    Question("Are its probabilities right?", ("evaluate",), "calibration"),
    Question("Which map can you trust?", ("explain",), "checks"),
    Question(
        "How does it break under attack?", ("attack", "corruptions"), "curves", ("robustness",)
    ),
    Question(
        "How does it break under common corruptions?",
        ("corruptions",),
        "corruptions",
        ("common corruptions",),
    ),
    Question("Which classes are confused?", ("evaluate",), "confusion"),
    Question("Is its attention healthy?", ("stats",), "specialisation"),
)


_RELEASE: Final = (  # the beginning of the title if requirements were typed
    "{% if unmet %}Do not release {{ model }}: {{ unmet[0] }} does not hold"
    "{% if unmet|length == 2 %}, nor does 1 other"
    "{% elif unmet|length > 2 %}, nor do {{ unmet|length - 1 }} others{% endif %}; "
    "{% elif asked %}{{ model }} meets {{ asked }}; {% endif %}"
)


def _requirements(record: AuditRecord) -> dict[str, Any]:
    """Return the values for _RELEASE: the requirements that do not hold, and all in words."""
    unmet: dict[str, None] = {}
    requirements = []
    for outcome in requirement_outcomes(record):
        text = outcome.requirement.words
        requirements.append(text)
        if not outcome.holds:
            unmet[text] = None
    required_text = ""
    if len(requirements) == 1:
        required_text = requirements[0]
    elif requirements:
        required_text = f"all {len(requirements)} requirements"
    return {"unmet": list(unmet), "asked": required_text}


def claims(record: AuditRecord) -> Iterator[Claim]:
    """Yield how many judgements pass, then each of them."""
    misled = list(shortcut.claims(record))
    of_chapters = list(_judged(record))
    yield _release(record, [*misled, *of_chapters])
    yield from misled
    yield from reliance.claims(record)
    yield from failures.claims(record)
    yield from of_chapters


def _release(record: AuditRecord, judged: Sequence[Claim]) -> Claim:
    """Count what passes, fails or is doubtful, for the title and the first sentence."""
    # self-checks judge the attacks, not the model
    of_model = [claim for claim in judged if not claim.question.startswith(_SELF_CHECKS)]
    states = Counter(claim.state for claim in of_model if claim.state)
    (alias,) = record.aliases
    return found(
        "release",
        alias,
        "**{{ model }}** passes {{ passed }} of {{ n }} judgements"
        "{% if failing %}; it fails in {{ failing|names }}{% endif %}"
        "{% if warned %}; {{ warned|names }} {{ warned|are }} doubtful{% endif %}"
        "{% if rest %}; {{ rest }} {{ rest|are }} inconclusive or not tested{% endif %}.",
        headline=_RELEASE + "{{ model }} "
        "{% if failing %}fails in {{ failing[:3]|join(', ') }}"
        "{% elif warned %}is doubtful in {{ warned[:3]|join(', ') }}"
        "{% else %}fails in nothing that was judged"
        "{% endif %}",
        given={
            "model": alias,
            "n": states.total(),
            "passed": states["pass"],
            "failing": [claim.question for claim in of_model if claim.state == "fail"],
            "warned": [claim.question for claim in of_model if claim.state == "warn"],
            "rest": states["inconclusive"] + states["not tested"],
            **_requirements(record),
        },
        kind="answer",
    )


def _judged(record: AuditRecord) -> Iterator[Claim]:
    """Yield what each chapter judges, once.

    For chapters that were not run, that it is not tested.
    """
    yield _accuracy(record)
    for name, chapter in record.chapters_by_name.items():
        for claim in chapter.claims:
            if claim.question in ("accuracy", "top-1 accuracy"):  # judged by `_accuracy`
                continue
            if _is_judged_elsewhere(record, name, claim):
                continue
            yield _as_judged(record, chapter, claim)
    (alias,) = record.aliases
    for row in record.untested:
        if row.part in record.chapters_by_name:
            continue
        for question in _LOST.get(row.part, ()):
            yield unjudged(question, alias, row.reason, state="not tested")


def _as_judged(record: AuditRecord, chapter: Chapter, claim: Claim) -> Claim:
    """Return a claim of a chapter as the audit makes it."""
    judged = replace(claim, title="")
    if claim.question == _SELF_CHECKS:
        attacks = listed([row.title for row in chapter.record.attacks])
        judged = replace(judged, question=f"{_SELF_CHECKS} ({attacks})")
    if claim.kind == "answer":  # of the chapter, not of the audit
        judged = replace(judged, kind="fact")
    if "attack" not in record.chapters_by_name:
        judged = _withhold_praise(judged)
    if record.uses_predictions_as_labels:
        judged = _judge_by_predictions(record, judged)
    return judged


def _is_judged_elsewhere(record: AuditRecord, name: str, claim: Claim) -> bool:
    """Return True for what another chapter judges better: attacks by the strongest, corruptions on
    most images.
    """
    if claim.question == "common corruptions":
        return name == "attack"
    if claim.question == "robustness":
        return name == "corruptions" and "attack" in record.chapters_by_name
    return False


def _accuracy(record: AuditRecord) -> Claim:
    """Judge accuracy by --at-least or --at-most, as there is no other model to judge it by."""
    (alias,) = record.aliases
    if record.uses_predictions_as_labels:
        return unjudged("accuracy", alias, "it needs labelled images", state="not tested")
    accuracy = record.metric(f"accuracy/{alias}")
    all_outcomes = requirement_outcomes(record)
    required = [outcome for outcome in all_outcomes if outcome.metric == f"accuracy/{alias}"]
    if not required:
        because = "there is no other model to judge it by: add `--at-least accuracy=VALUE`"
        return Claim("accuracy", alias, verdict=Verdict("not tested", because), effect=accuracy)
    bounds = [f"{outcome.requirement.bound} {outcome.requirement.value:g}" for outcome in required]
    holds = all(outcome.holds for outcome in required)
    verdict = Verdict("pass" if holds else "fail", ", ".join(bounds))
    return Claim(
        "accuracy",
        alias,
        say(
            "**{{ m }}** classifies {{ accuracy }} of the images correctly.",
            m=alias,
            accuracy=accuracy,
        ),
        verdict=verdict,
        effect=accuracy,
    )


def _withhold_praise(claim: Claim) -> Claim:
    """Withhold praise if only FGSM fits the budget: it can show that a model is weak, not that it
    is robust.
    """
    if claim.question != "robustness" or claim.state not in ("pass", "warn"):
        return claim
    if claim.effect is not None and not_robust(claim.effect):
        return claim
    because = "no attack of several steps fits `--budget`, and one step shows no robustness"
    return replace(claim, verdict=Verdict("inconclusive", because, claim.limit, doubts=True))


def _judge_by_predictions(record: AuditRecord, claim: Claim) -> Claim:
    """Judge corruptions by the share of predictions that stay the same."""
    if claim.question != "common corruptions":
        return claim
    error = record.metrics.get(f"mean_error_on_corruptions/{record.aliases[0]}")
    if error is None:
        return claim
    unchanged = Estimate(1 - error.value, n=error.n)
    if error.low is not None and error.high is not None:
        unchanged = replace(unchanged, low=1 - error.high, high=1 - error.low)
    because = "predictions that corruptions do not change"
    if (unchanged.n or 0) < FEW:
        because = say("{{ what }}, of fewer than {{ few }} images", what=because, few=FEW)
        verdict = Verdict("inconclusive", because, "consistency")
        return Claim(claim.question, claim.subject, verdict=verdict, effect=unchanged)
    return judge(claim.question, claim.subject, unchanged, "consistency", because=because)


def requirement_outcomes(record: AuditRecord) -> tuple[RequirementOutcome, ...]:
    """Return the outcomes of --at-least and --at-most."""
    run = record.options.get("run", {})
    requirements = requirements_of(tuple(run.get("at_least", ())), tuple(run.get("at_most", ())))
    return tuple(outcomes(requirements, record))


def unknown(record: AuditRecord) -> Iterator[str]:
    """Yield what could overturn the judgement, the most serious first."""
    chosen = record.chosen_attack
    considered = record.attacks_considered
    stronger = []
    if chosen:
        before_chosen = considered[: considered.index(chosen)]
        stronger = [row for row in before_chosen if row.state == "too long"]
    if chosen and stronger:
        yield say(
            "Robust accuracy is an upper bound: {{ more }} did not fit the budget and may break "
            "more images than {{ chosen }}.",
            more=attack_words(stronger[0]),
            chosen=attack_words(chosen),
        )
    in_verdicts = _LOST.keys() - record.chapters_by_name.keys()  # their reason is in a verdict
    for row in record.untested:
        if row.part not in in_verdicts:
            yield say("Not tested: {{ r|whole }}.", r=row.reason)
    if record.uses_predictions_as_labels:
        yield (
            "No labels are used: accuracy and calibration are not tested, and attacks and "
            "corruptions are judged by the share of the model's predictions that stay the same."
        )
    yield say(
        "This holds for images like these {{ n }}. The intervals cover the choice of images, not "
        "other sources of images or another training of the model.",
        n=max([record.images, *record.images_of_parts.values()]),
    )
    yield from reliance.unknown(record)
    if "explain" in record.chapters_by_name:
        unchecked = _unchecked_maps(record.chapters_by_name["explain"].record.checks)
        command = command_of(_VERIFIED_MAPS, record.aliases[0], record.config)
        if unchecked and command:
            yield say(
                "No audit checks maps with {{ names }}, whatever its budget; {{ command }} does.",
                names=listed(unchecked),
                command=Marked(as_code(command)),
            )
        yield "A map that you can trust does not explain what defines a class."
    yield "Images in use may change in ways that these corruptions do not cover."


def _unchecked_maps(checks: Sequence[MapCheckRow]) -> list[str]:
    """Return the needed checks of maps that were run with no method."""
    untested = [set(judged.untested) for judged in judged_maps(checks)]
    return sorted(set.intersection(*untested)) if untested else []


def attack_words(row: CandidateRow) -> str:
    """Return the attack and its images in words: "AutoAttack (reduced) on 200 images"."""
    return say(
        "{{ titles }} on {{ n }} image{{ n|s }}",
        n=row.images,
        titles=listed([say("{{ t }}", t=ATTACKS[name].title) for name in row.attacks]),
    )


def _answers(record: AuditRecord) -> Iterator[DocumentSection]:
    """Yield the questions that chapters answer; of an audit that was stopped, also its other
    chapters.
    """
    sections = tuple(answer_sections(record.parts, _QUESTIONS, list(_judged(record))))
    yield from sections
    if not record.budget:  # the budget is written at the end, so the audit was stopped
        yield from unlinked_sections(record.parts, sections)


def _by_state(claim_and_verdict: tuple[Claim, Verdict]) -> int:
    _claim, verdict = claim_and_verdict
    return ORDER.index(verdict.state)


def glance(record: AuditRecord) -> Table:
    """Return the judgements, failing ones first."""
    claims_with_verdict = []
    for claim in (*shortcut.claims(record), *_judged(record)):
        if claim.verdict is not None:
            claims_with_verdict.append((claim, claim.verdict))
    claims_with_verdict.sort(key=_by_state)
    cells = []
    for claim, verdict in claims_with_verdict[:ROWS]:
        limit = LIMITS[verdict.limit].words if verdict.limit else None
        because = verdict.because
        if claim.question == "accuracy" and verdict.state in ("pass", "fail"):
            limit = because  # the bounds that were required
            because = "a requirement of this run"
        cells.append((claim.question, verdict.state, claim.effect, limit, because))
    return Table("", ("judged", "status", "value", "limit", "because"), tuple(cells))


def _chosen_first(record: AuditRecord) -> list[CandidateRow]:
    """Return the attack that was run, then the others, the strongest first."""
    return sorted(record.attacks_considered, key=lambda row: row.state != "chosen")


def _chosen_words(record: AuditRecord) -> str:
    """Return the attack that was run, and how it was chosen."""
    chosen = record.chosen_attack
    return say(
        "{% if chosen %}{{ words|whole }} was run: the strongest attack{% else %}The strongest "
        "attack is run{% endif %} that fits into the budget left by the other chapters.",
        chosen=chosen,
        words=attack_words(chosen) if chosen else "",
    )


def _budget_words(_: AuditRecord) -> str:
    """Return what the columns of the budget count."""
    return say(
        "Busy minutes of this machine, before the report was written. {{ share|percent }} of the "
        "budget is kept for the report. FGSM runs with the corruptions, so it counts among what "
        "ran before the attack.",
        share=REPORT_SHARE,
    )


REPORT: Final = Report(
    AuditRecord,
    claims=claims,
    unknown=unknown,
    glance=glance,
    title="Audit of {{ record.aliases[0] }}",
    reconciles=reconciled,
    sections=(
        Section(
            "Does it meet what was asked?",
            requirement_outcomes,
            opening="{{ rows|selectattr('holds')|list|length }} of {{ rows|length }} "
            "requirement{{ rows|s }} hold"
            "{% if rows|length == 1 %}s{% endif %}.",
            columns=("metric", "holds", "because"),
        ),
        _answers,
        *shortcut.SECTIONS,
        reliance.SECTION,
        *failures_sections.SECTIONS,
        Section(
            "Which attack was run?",
            _chosen_first,
            opening=_chosen_words,
            columns=("attacks", "restarts", "epsilons", "images", "minutes", "state"),
        ),
        Section(
            "Did the audit keep its budget?",
            "budget",
            opening=_budget_words,
            columns=("minutes", "others", "left", "total"),
        ),
    ),
)
