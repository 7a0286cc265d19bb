"""Which model to choose for which need: a table made only from the claims of a report.

Each need is answered by the first that applies: claims that compare models, changed cues (only the
need about wrong cues), verdicts on single models. A need without claims names a command instead.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vitlens.analysis.reliance.rows import RelianceRow
from vitlens.commands.shared.shortcut import SHORTCUT
from vitlens.record import Data, Record, col
from vitlens.report.claims import Claim
from vitlens.report.numbers import number
from vitlens.report.prose import Marked, finalize, listed, say
from vitlens.report.sections import Section

NO_EVIDENCE: Final = "no evidence"
NEITHER: Final = "no difference shown"


@dataclass(frozen=True)
class Need:
    """A purpose for which a user may choose a model.

    questions: the questions of the claims that are evidence. One that ends with a colon stands for
        all questions that begin with it.
    untested: what those claims do not test.
    command: a command that would measure it.
    """

    name: str
    questions: tuple[str, ...]
    untested: str
    command: str


NEEDS: Final = (
    Need(
        "accuracy on such images",
        ("which is better", "no difference"),
        "other data, other training seeds",
        "vitlens compare",
    ),
    Need(
        "confidence to be used as a probability",
        ("calibration",),
        "after temperature scaling",
        "vitlens evaluate",
    ),
    Need(
        "predictions that no wrong cue decides",
        (SHORTCUT,),
        "cues that no intervention changes",
        "vitlens compare",
    ),
    Need(
        "images that are corrupted or disturbed",
        ("corruption:", "disturbed images"),
        "other corruptions",
        "vitlens attack",
    ),
    Need(
        "robustness to attacks",
        ("difference under attack",),
        "adaptive attacks, models trained against attacks",
        "vitlens attack",
    ),
    Need(
        "maps that can be trusted",
        ("maps", "explanation"),
        "other attribution methods",
        "vitlens explain --verify",
    ),
    Need("short computing time", ("latency",), "other hardware", "vitlens profile"),
)


@dataclass(frozen=True)
class ChoiceRow:
    """One need, the model that the evidence favours, and how far the evidence reaches.

    All are finished texts.
    """

    need: str = col("need")
    model: str = col("model")
    evidence: str = col("evidence")
    validity: str = col("valid for")
    untested: str = col("not tested")


def choices(claims: Sequence[Claim], record: Record) -> Iterator[ChoiceRow]:
    """Yield a row for each need, from the claims of a report with two models or more."""
    if len(_models(record)) < 2:
        return
    for need in NEEDS:
        evidence = [claim for claim in claims if _is_evidence(claim, need)]
        row = _row_from_comparisons(need, evidence, record)
        if row is None:
            row = _row_from_cues(need, evidence, record)
        if row is None:
            row = _row_from_verdicts(need, evidence, record)
        if row is None:
            row = _row_without_evidence(need)
        yield row


def _is_evidence(claim: Claim, need: Need) -> bool:
    family = claim.question.partition(":")[0] + ":"
    return claim.question in need.questions or family in need.questions


def _row_from_comparisons(need: Need, claims: Sequence[Claim], record: Record) -> ChoiceRow | None:
    """Return the row of a need whose claims compare models; None without such a claim."""
    decided = [claim for claim in claims if claim.better and claim.is_shown]
    favoured = list(dict.fromkeys(claim.better for claim in decided))
    if len(favoured) == 1:
        best = max(decided, key=lambda claim: claim.rank)
        model = finalize(favoured[0])
        return _row(need, model, _shortest_text(best), _validity([best], record))
    if favoured:
        evidence = " ".join(_shortest_text(claim) for claim in decided)
        names = listed([finalize(name) for name in favoured], "or")
        return _row(need, f"depends: {names}", evidence, _validity(decided, record))
    null_claims = [claim for claim in claims if claim.is_null and claim.says]
    if null_claims:
        evidence = _shortest_text(null_claims[0])
        return _row(need, NEITHER, evidence, _validity(null_claims, record))
    return None


def _shortest_text(claim: Claim) -> str:
    """Return the short form of a claim's text; the full one where it has no short form."""
    return claim.brief or claim.says


def _row_from_cues(need: Need, claims: Sequence[Claim], record: Record) -> ChoiceRow | None:
    """Return the row of the need that asks for predictions which no wrong cue decides.

    Returns None for any other need, and if no cue was changed.
    """
    if SHORTCUT not in need.questions:
        return None
    misled_claims = [claim for claim in claims if claim.question == SHORTCUT and claim.says]
    if not misled_claims:
        return _row_of_harmless_cues(need, record)
    misled_models: set[str] = set()
    for claim in misled_claims:
        misled_models.update(claim.subject.split(" and "))  # one claim may be about two models
    others = [name for name in _models(record) if name not in misled_models]
    model = "none of them"
    if others:
        model = listed([finalize(name) for name in others])
    evidence = _shortest_text(misled_claims[0])
    return _row(need, model, evidence, _validity(misled_claims, record))


def _row_of_harmless_cues(need: Need, record: Record) -> ChoiceRow | None:
    """Return the row where cues were changed and none is shown to mislead a model.

    Returns None if no cue was changed.
    """
    rows = _reliance_of(record)
    if not rows:
        return None
    cues = list(dict.fromkeys(row.title for row in rows))
    evidence = say(
        "Of {{ n }} cue{{ n|s }} that were changed on all images, none is shown to cause errors: "
        "{{ cues }}.",
        n=len(cues),
        cues=listed(cues),
    )
    images = number(min(row.n for row in rows))
    return _row(need, NEITHER, evidence, f"{images} images of {_title_of_data(record)}")


def _reliance_of(record: Record) -> Sequence[RelianceRow]:
    """Return the changed cues of a run, or those of its chapters."""
    chapters = [part.record for part in getattr(record, "parts", ())]
    for candidate in (record, *chapters):
        rows: Sequence[RelianceRow] = getattr(candidate, "reliance", ())
        if rows:
            return rows
    return ()


def _row_from_verdicts(need: Need, claims: Sequence[Claim], record: Record) -> ChoiceRow | None:
    """Return the row of a need by the verdicts on single models; None if not all were judged."""
    first_by_model: dict[str, Claim] = {}
    for claim in claims:
        is_judged = claim.state not in ("", "not tested")
        if is_judged and claim.subject in _models(record):
            first_by_model.setdefault(claim.subject, claim)
    judged = list(first_by_model.values())
    if len(judged) < len(_models(record)):
        return None
    passing = [claim.subject for claim in judged if claim.state == "pass"]
    if len(passing) == len(judged):
        model = "all pass"
    elif passing:
        model = listed([finalize(name) for name in passing])
    elif any(claim.state == "inconclusive" for claim in judged):
        model = NEITHER
    else:
        model = "none passes"
    evidence = "; ".join(
        say(
            "**{{ name }}**: {{ state }}{% if value %} ({{ value|alone }}){% endif %}",
            name=claim.subject,
            state=claim.state,
            value=claim.effect,
        )
        for claim in judged
    )
    return _row(need, model, f"{evidence}.", _validity(judged, record))


def _row_without_evidence(need: Need) -> ChoiceRow:
    measured_by = f"not measured here; `{need.command}` measures it"
    return _row(need, NO_EVIDENCE, measured_by, "-")


def _row(need: Need, model: str, evidence: str, validity: str) -> ChoiceRow:
    """Return a row; its texts are finished, so marked ones that the report does not escape."""
    return ChoiceRow(
        need=Marked(need.name),
        model=Marked(model),
        evidence=Marked(evidence),
        validity=Marked(validity),
        untested=Marked(need.untested),
    )


def _validity(claims: Sequence[Claim], record: Record) -> str:
    """Return on how many images of which data, and on how many trainings, the evidence rests."""
    counts = {claim.effect.n for claim in claims if claim.effect is not None and claim.effect.n}
    validity = f"{_title_of_data(record)}, one training of each model"
    if counts:
        validity = f"{number(min(counts))} images of {validity}"
    return validity


def _title_of_data(record: Record) -> str:
    """Return the title of the images, ready for a sentence."""
    data = _data_of(record)
    return finalize(data.title) if data is not None else "this run"


def _models(record: Record) -> tuple[str, ...]:
    """Return the models of a run, or those that its chapters are about."""
    models: tuple[str, ...] = getattr(record, "studied", record.aliases)
    return models


def _data_of(record: Record) -> Data | None:
    """Return the images of a run, or those of the first of its chapters."""
    if record.config.data is not None:
        return record.config.data
    for part in getattr(record, "parts", ()):
        if part.record.config.data is not None:
            data: Data = part.record.config.data
            return data
    return None


def choice_section(claims_of: Callable[[Any], Sequence[Claim]]) -> Section:
    """Return the section of a report.

    claims_of: the function that returns the claims of a record.
    """
    return Section(
        "Which model to choose for what?",
        lambda record: choices(claims_of(record), record),
        opening="Each row rests on claims of this report only; a need without evidence names the "
        "command that measures it.",
        columns=("need", "model", "evidence", "validity", "untested"),
    )
