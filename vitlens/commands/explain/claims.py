"""What `vitlens explain` claims: which method was chosen, which map may be believed; and what could overturn it."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.explain.options import ALL
from vitlens.commands.explain.record import ChoiceRow, ExplainRecord
from vitlens.commands.shared.explorer import without_explorer
from vitlens.commands.shared.maps.record import REPLACED, JudgedMap, judged_maps
from vitlens.commands.shared.maps.report import map_claims, uniform_claim
from vitlens.record import by
from vitlens.report.claims import Claim, few_images, found, unjudged
from vitlens.report.prose import say

_LOOKED_AT: Final = ("Digits in scenes", "coco_masks")  # titles of data sets (benchmarks/best_map.md)
_VERBS: Final = {"confirmed": "confirm", "contradicted": "contradict"}


def judged_of(record: ExplainRecord) -> dict[str, tuple[JudgedMap, ...]]:
    """Return the verdicts on the methods of each model, the best first."""
    return {alias: judged_maps(rows) for alias, rows in by(record.checks, "model").items()}


def claims(record: ExplainRecord) -> Iterator[Claim]:
    """Yield which method was chosen, which map may be believed, and what speaks against the others."""
    for row in record.chosen:
        yield _choice(record, row)
    checks = by(record.checks, "model")
    for alias in record.aliases:
        yield from map_claims(alias, checks.get(alias, ()), images=record.images, place="checks")
        if alias not in checks and not record.options.get("verify"):
            yield unjudged("maps", alias, "no check was run; add --verify", state="not tested")
        own = {row.method: row.constant + row.not_finite for row in record.methods if row.model == alias}
        yield from uniform_claim(alias, own, record.images, is_title=True)


def _choice(record: ExplainRecord, row: ChoiceRow) -> Claim:
    """Return the chosen method, how sure that is, and what the other half of the images says."""
    margins = {
        each.against: each.difference
        for each in record.choice_margins
        if (each.model, each.check) == (row.model, "score")
    }
    if row.reason:
        words = "**{{ row.method }}** is the default method of **{{ row.model }}**, not chosen by evidence: "
        return found("choice", row.model, words + "{{ row.reason|whole }}.", given={"row": row}, kind="answer")
    return found(
        "choice",
        row.model,
        "**{{ row.method }}** is chosen for **{{ row.model }}**: it has the highest score of "
        "{{ row.candidates|length }} methods on {{ row.selection }} images, and in {{ row.certainty|value }} of "
        "{{ row.draws }} bootstrap samples of them{% if effect %}; the other {{ row.report }} images {{ verb }} it: "
        "its score minus that of {{ row.runner_up }} is {{ effect|alone }}{% endif %}{% if row.alike %}; "
        "{{ row.alike|names }} give the same maps{% endif %}.",
        margins.get(row.runner_up or ""),
        headline="{{ row.method }} is chosen for {{ row.model }}{% if effect %}; other images {{ verb }} it{% endif %}",
        given={"row": row, "verb": _VERBS.get(row.confirmation or "", "do not confirm")},
        evidence="intervened",
        place="choice",
        kind="answer",
    )


def unknown(record: ExplainRecord) -> Iterator[str]:
    """Yield what could overturn the verdicts, the most serious first."""
    options = record.options
    data = record.config.data
    if not record.checks:
        yield "No map was checked: a map that looks right may be that of any model. `--verify` checks them."
    yield from few_images(record.images)
    for kind in [row for row in record.methods if row.constant + row.not_finite][:2]:
        yield say(
            "{{ n }} of {{ row.maps }} maps of {{ row.method }} of {{ row.model }} are uniform or not finite: "
            "nothing is drawn.",
            row=kind,
            n=kind.constant + kind.not_finite,
        )
    names = {row.method for row in record.methods} | {name for row in record.chosen for name in row.candidates}
    if data is not None and data.title in _LOOKED_AT and "best" in names:
        yield say(
            "The settings of best were chosen while looking at {{ title }}: a lead of best is optimistic here.",
            title=data.title,
        )
    for alias, rows in by(record.swapped, "model").items():
        most = max(rows, key=lambda row: min(row.in_first.value, -row.in_second.value))
        yield say(
            "The ranking for {{ alias }} depends on what replaces a removed patch: {{ row.better }} is above "
            "{{ row.worse }} with patches {{ first }}, below with patches {{ second }}.",
            alias=alias,
            row=most,
            first=REPLACED[most.first],
            second=REPLACED[most.second],
        )
    for row in [row for row in record.power if row.check in ("road", "gap")][:1]:
        yield say(
            "{% if row.detectable %}A true difference of the removal scores of two methods below "
            "{{ row.detectable.value|number }} is{% else %}All differences of removal scores are{% endif %} "
            "likely missed with {{ n }} images.",
            row=row,
            n=record.images,
        )
    yield from _left_out(record)
    if options.get("engine") == "grad-cam":
        yield "The maps are the grad-cam package's: negative values set to zero, each scaled to its own range."
    if record.stages:
        yield "Images of another kind, and other classes than those explained here, may have another best map."
        yield "A map that changes with the weights need not be right: randomisation is necessary, not sufficient."
    yield from without_explorer(record.explorer)


def _left_out(record: ExplainRecord) -> Iterator[str]:
    """Methods of --method that are not defined for a model, checks of the choice, and models without a classifier."""
    for alias in record.aliases:
        own = {row.method for row in record.methods if row.model == alias}
        own |= {name for row in record.chosen if row.model == alias for name in row.candidates}
        missing = [name for name in record.options.get("method", ()) if name not in own and name != ALL]
        if not any(row.target is not None for row in record.shown if row.model == alias):
            yield say("{{ alias }} has no classifier: methods that explain a class are left out.", alias=alias)
        elif missing:
            yield say("{{ names|names }} {{ names|are }} not defined for {{ alias }}.", names=missing, alias=alias)
    for row in record.chosen:
        for check, reason in row.left_out.items():
            yield say(
                "The choice for {{ row.model }} was not judged by {{ check }}: {{ why|whole }}.",
                row=row,
                check=check,
                why=reason,
            )
