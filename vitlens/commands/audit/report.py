"""The report of `vitlens audit`: what of a model passes, what does not, and what was not tested."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.claims import not_robust
from vitlens.commands.audit.record import AuditRecord, CandidateRow
from vitlens.commands.run.chapters import Question, answered, finished
from vitlens.commands.run.consistency import reconciled
from vitlens.commands.run.requirements import RequirementOutcome, outcomes, requirements_of
from vitlens.commands.shared import failures, reliance, shortcut
from vitlens.report.claims import Claim, found, judge, unjudged
from vitlens.report.document import Section, Table
from vitlens.report.prose import listed, say
from vitlens.report.sections import ROWS, Report
from vitlens.report.sections import Section as Declared
from vitlens.report.verdicts import LIMITS, ORDER, Verdict
from vitlens.uncertainty import Estimate

FEW: Final = 30  # images below which the share of predictions that stay is not judged
_LOST: Final = {  # chapter -> what is judged by it
    "evaluate": ("calibration",),
    "explain": ("maps",),
    "stats": ("attention health",),
    "corruptions": ("robustness", "common corruptions"),
}
_QUESTIONS: Final = (
    Question("Is it accurate?", ("evaluate",), "per_class"),
    Question("Are its probabilities right?", ("evaluate",), "calibration"),
    Question("Which map can you trust?", ("explain",), "checks"),
    Question("How does it break under attack?", ("attack", "corruptions"), "curves", ("robustness",)),
    Question("How does it break under common corruptions?", ("corruptions",), "corruptions", ("common corruptions",)),
    Question("Which classes are confused?", ("evaluate",), "confusion"),
    Question("Is its attention healthy?", ("stats",), "specialisation"),
)


_RELEASE: Final = (  # begins the title where requirements were typed
    "{% if unmet %}Do not release {{ model }}: {{ unmet[0] }} does not hold"
    "{% if unmet|length > 1 %}, nor {{ unmet|length - 1 }} more{% endif %}; "
    "{% elif asked %}{{ model }} meets {{ asked }}; {% endif %}"
)


def _requirements(record: AuditRecord) -> dict[str, Any]:
    """Return the requirements that do not hold, and all of them, in words."""
    judged = requirement_outcomes(record)
    words = [f"{each.requirement.metric} {each.requirement.bound} {each.requirement.value:g}" for each in judged]
    unmet = [text for text, each in zip(words, judged) if not each.holds]
    asked = words[0] if len(words) == 1 else f"all {len(words)} requirements"
    return {"unmet": list(dict.fromkeys(unmet)), "asked": asked if words else ""}


def claims(record: AuditRecord) -> Iterator[Claim]:
    """Yield how many judgements pass, then each of them."""
    misled = list(shortcut.claims(record))
    of_chapters = list(_judged(record))
    judged = [*misled, *of_chapters]
    states = Counter(claim.state for claim in judged if claim.state)
    failing = [claim.question for claim in judged if claim.state == "fail"]
    warned = [claim.question for claim in judged if claim.state == "warn"]
    (alias,) = record.aliases
    yield found(
        "release",
        alias,
        "**{{ model }}** passes {{ passed }} of {{ n }} judgements{% if failing %}; it fails in {{ failing|names }}"
        "{% endif %}{% if warned %}; {{ warned|names }} {{ warned|are }} doubtful{% endif %}{% if rest %}; {{ rest }} "
        "{{ rest|are }} inconclusive or not tested{% endif %}.",
        headline=_RELEASE + "{{ model }} {% if failing %}fails in {{ failing[:3]|join(', ') }}{% elif warned %}is "
        "doubtful in {{ warned[:3]|join(', ') }}{% else %}fails in nothing that was judged{% endif %}",
        given={
            "model": alias,
            "n": states.total(),
            "passed": states["pass"],
            "failing": failing,
            "warned": warned,
            "rest": states["inconclusive"] + states["not tested"],
            **_requirements(record),
        },
        kind="answer",
    )
    yield from misled
    yield from reliance.claims(record)
    yield from failures.claims(record)
    yield from of_chapters


def _judged(record: AuditRecord) -> Iterator[Claim]:
    yield _accuracy(record)
    strong = "attack" in record.named
    twice = {("attack", "common corruptions"), *([("corruptions", "robustness")] if strong else [])}
    for name, chapter in record.named.items():
        for claim in chapter.claims:
            if claim.question in ("accuracy", "top-1 accuracy") or (name, claim.question) in twice:
                continue
            claim = replace(claim, kind="fact" if claim.kind == "answer" else claim.kind, title="")
            claim = claim if strong else _one_step(claim)
            yield _without_labels(record, claim) if record.predicted else claim
    (alias,) = record.aliases
    for row in [each for each in record.untested if each.part not in record.named]:
        yield from (unjudged(lost, alias, row.reason, state="not tested") for lost in _LOST.get(row.part, ()))


def _accuracy(record: AuditRecord) -> Claim:
    """By --at-least or --at-most, as there is no other model to judge it by."""
    (alias,) = record.aliases
    if record.predicted:
        return unjudged("accuracy", alias, "it needs labelled images", state="not tested")
    own = record.metric(f"accuracy/{alias}")
    asked = [each for each in requirement_outcomes(record) if each.metric == f"accuracy/{alias}"]
    if not asked:
        because = "there is no other model to judge it by: add `--at-least accuracy=VALUE`"
        return Claim("accuracy", alias, verdict=Verdict("not tested", because), effect=own)
    because = ", ".join(f"{each.requirement.bound} {each.requirement.value:g}" for each in asked)
    return Claim(
        "accuracy",
        alias,
        say("**{{ m }}** classifies {{ own }} of the images correctly.", m=alias, own=own),
        verdict=Verdict("pass" if all(each.holds for each in asked) else "fail", because),
        effect=own,
    )


def _one_step(claim: Claim) -> Claim:
    """Leave no praise where FGSM alone fits the budget: it can show a model to be weak, not robust."""
    if claim.question != "robustness" or claim.state not in ("pass", "warn"):
        return claim
    if claim.effect is not None and not_robust(claim.effect):
        return claim
    because = "no attack of several steps fits `--budget`, and one step shows no robustness"
    return replace(claim, verdict=Verdict("inconclusive", because, claim.limit, doubts=True))


def _without_labels(record: AuditRecord, claim: Claim) -> Claim:
    """Corruptions are judged by the share of predictions that stay the same."""
    if claim.question != "common corruptions":
        return claim
    error = record.metrics.get(f"mean_error_on_corruptions/{record.aliases[0]}")
    if error is None:
        return claim
    low, high = (None if end is None else 1 - end for end in (error.high, error.low))
    stay = Estimate(1 - error.value, low, high, error.n)
    because = "predictions that corruptions leave as they are"
    if (stay.n or 0) < FEW:
        because = say("{{ what }}, of fewer than {{ few }} images", what=because, few=FEW)
        verdict = Verdict("inconclusive", because, "consistency")
        return Claim(claim.question, claim.subject, verdict=verdict, effect=stay)
    return judge(claim.question, claim.subject, stay, "consistency", because=because)


def requirement_outcomes(record: AuditRecord) -> tuple[RequirementOutcome, ...]:
    """Return what became of --at-least and --at-most."""
    run = record.options.get("run", {})
    asked = requirements_of(tuple(run.get("at_least", ())), tuple(run.get("at_most", ())))
    return tuple(outcomes(asked, record))


def unknown(record: AuditRecord) -> Iterator[str]:
    """Yield what could overturn the judgement, the most serious first."""
    taken = record.chosen
    tried = record.attacks_considered
    stronger = [row for row in tried[: tried.index(taken)] if row.minutes] if taken else []
    if taken and stronger:
        yield say(
            "Robust accuracy is an upper bound: {{ more }} did not fit the budget and may break more images than "
            "{{ taken }}.",
            more=attack_words(stronger[0]),
            taken=attack_words(taken),
        )
    lost = _LOST.keys() - record.named.keys()  # of these the verdicts say it
    yield from (say("Not tested: {{ r|whole }}.", r=row.reason) for row in record.untested if row.part not in lost)
    if record.predicted:
        yield (
            "No labels are used: accuracy and calibration are not tested, and attacks and corruptions are judged by "
            "the share of the model's predictions that stay the same."
        )
    yield say(
        "This holds for images like these {{ n }}; the intervals cover which of them were drawn, not other sources of "
        "images and not another training of the model.",
        n=record.images,
    )
    yield from reliance.unknown(record)
    if "explain" in record.named:
        yield "A map that you can trust is no explanation of what defines a class."
    yield "Images in use may change in other ways than by the corruptions that were tried."


def attack_words(row: CandidateRow) -> str:
    """ "AutoAttack (reduced) on 200 images"."""
    return say(
        "{{ titles }} on {{ n }} image{{ n|s }}",
        n=row.images,
        titles=listed([say("{{ t }}", t=ATTACKS[name].title) for name in row.attacks]),
    )


def _answers(record: AuditRecord) -> Iterator[Section]:
    """Yield the questions that chapters answer; of an audit that was stopped, also its other chapters."""
    sections = tuple(answered(record.parts, _QUESTIONS, list(_judged(record))))
    yield from sections
    if not record.budget:  # which is written at the end
        yield from finished(record.parts, sections)


def glance(record: AuditRecord) -> Table:
    """Return the judgements, failing ones first."""
    every = [*shortcut.claims(record), *_judged(record)]
    judged = [(claim, claim.verdict) for claim in every if claim.verdict is not None]
    judged.sort(key=lambda pair: ORDER.index(pair[1].state))
    cells = tuple(
        (
            claim.question,
            verdict.state,
            claim.effect,
            LIMITS[verdict.limit].words if verdict.limit else None,
            verdict.because,
        )
        for claim, verdict in judged[:ROWS]
    )
    return Table("", ("judged", "status", "value", "limit", "because"), cells)


REPORT: Final = Report(
    AuditRecord,
    claims=claims,
    unknown=unknown,
    glance=glance,
    title="Audit of {{ record.aliases[0] }}",
    reconciles=reconciled,
    sections=(
        Declared(
            "Does it meet what was asked?",
            requirement_outcomes,
            opening="{{ rows|selectattr('holds')|list|length }} of {{ rows|length }} requirement{{ rows|s }} hold"
            "{% if rows|length == 1 %}s{% endif %}.",
            columns=("metric", "holds", "because"),
        ),
        _answers,
        *shortcut.SECTIONS,
        reliance.SECTION,
        *failures.SECTIONS,
        Declared(
            "Which attack was run?",
            "attacks_considered",
            opening="The strongest that fits what the other chapters leave of the budget.",
            columns=("attacks", "restarts", "epsilons", "images", "minutes", "state"),
        ),
        Declared(
            "Did the audit keep its budget?",
            "budget",
            opening="Busy minutes of this machine, before the report was written.",
            columns=("minutes", "others", "left", "total"),
        ),
    ),
)
