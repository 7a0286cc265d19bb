"""The claims of `vitlens ablate`: important heads, removable heads, and effects that single
removals hide.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vitlens.commands.ablate.record import (
    AblateRecord,
    HeadPairRow,
    UnitRow,
    redundant_pairs,
    without_effect,
)
from vitlens.record import by
from vitlens.report.claims import Claim, above, enough
from vitlens.report.prose import say
from vitlens.uncertainty import LEVEL, Estimate


def claims(record: AblateRecord) -> Iterator[Claim]:
    """Yield the most important unit, the heads with and without an effect, and the effects that
    removals hide.

    Heads with an effect, without one, and undecided ones are counted, not judged, because heads
    back each other up.
    """
    if record.has_few_images:
        return
    yield _most_important(record)
    if record.heads:
        yield _heads_with_effect(record)
    if record.latents:
        yield _latents_with_effect(record)
    removable = record.model.removable
    if enough(removable):
        yield _claim(
            record,
            "removable heads",
            "{{ share }} of the heads can be removed, least important first, before accuracy "
            "falls by more than {{ one }} point.",
            removable,
            values={"share": removable, "one": 1},
            kind="answer",
            place="curves",
        )
    redundant = redundant_pairs(record)
    if redundant:
        yield _redundant(record, redundant[0])
    yield from _hidden(record)


def effects(record: AblateRecord) -> Iterator[Claim]:
    """Yield the accuracy that each head is worth; significance is that of the interval."""
    for row in record.heads:
        yield _claim(
            record,
            f"head {row.unit}",
            "Without **{{ row.unit }}**, the accuracy of **{{ model }}** falls by "
            "{{ row.accuracy|alone }}.",
            row.accuracy,
            values={"row": row},
        )


def _claim(
    record: AblateRecord,
    question: str,
    template: str,
    effect: Estimate | None = None,
    *,
    values: dict[str, Any],
    brief: str = "",
    **fields: Any,
) -> Claim:
    """Return a claim about the model.

    values: the values of the templates, besides `model`, `smallest` and the number of heads `n`.
    brief: the template of the short sentence.
    fields: the fields of the claim.
    """
    model = record.model.model
    values = {"model": model, "smallest": record.model.smallest, "n": len(record.heads), **values}
    fields = {"place": "importance", **fields}
    says = say(template, **values)
    return Claim(
        question,
        model,
        says,
        effect=effect,
        evidence="intervened",
        brief=say(brief, **values),
        **fields,
    )


def by_rank(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """Return the rows by their signed change, the largest rise of the loss first.

    So a unit whose removal lowers the loss comes last, even if its effect is the largest in size.
    """
    return sorted(rows, key=lambda row: -row.rank.value)


def _most_important(record: AblateRecord) -> Claim:
    """Return the head whose removal costs most, or the MLP or block if no head was removed."""
    rows_by_kind = by(record.units, "kind")
    kind = next(kind for kind in ("head", "mlp", "block", "latent") if kind in rows_by_kind)
    word = "MLP" if kind == "mlp" else kind
    rows = by_rank(rows_by_kind[kind])
    ranked_by_log_odds = []
    with_effect = []
    for row in rows:
        if row.log_odds is not None and row.is_ranked and row.rank.value > 0:
            ranked_by_log_odds.append(row)
        if row.effect == "effect" and row.loss.value > 0:
            with_effect.append(row)
    if ranked_by_log_odds and enough(ranked_by_log_odds[0].log_odds):
        return _first_by_log_odds(record, ranked_by_log_odds[0], word, len(rows))
    if with_effect:
        return _first_by_loss(record, with_effect, word, len(rows))
    return _no_important_unit(record, rows, word)


def _title(record: AblateRecord, lead: UnitRow, word: str, count: int) -> str:
    return f"Of {count} {word}s of {record.model.model}, {lead.unit} matters most"


def _first_by_log_odds(record: AblateRecord, lead: UnitRow, word: str, count: int) -> Claim:
    """Return the claim about a model whose loss is near 0."""
    return _claim(
        record,
        f"most important {word}",
        "Without **{{ lead.unit }}**{% if lead.label %} ({{ lead.label }}){% endif %}, the "
        "log-odds of the label fall most, by {{ lead.log_odds|alone }}. The loss of "
        "**{{ model }}** is near 0 and changes by {{ lead.loss|alone }}.",
        lead.log_odds,
        values={"lead": lead, "word": word},
        brief="Removing {{ word }} **{{ lead.unit }}** makes **{{ model }}** least certain of the "
        "right class.",
        p=lead.log_odds_p,
        kind="answer",
        title=_title(record, lead, word, count),
    )


def _first_by_loss(record: AblateRecord, rows: Sequence[UnitRow], word: str, count: int) -> Claim:
    """Return the claim about the most important unit that raises the loss when it is removed.

    rows: all such units, the most important first.
    """
    lead = rows[0]
    place = "" if lead.head is None else f"layer {lead.layer}, head {lead.head}"
    return _claim(
        record,
        f"most important {word}",
        "Without **{{ lead.unit }}**{% if lead.label %} ({{ lead.label }}){% endif %}, the loss "
        "of **{{ model }}** rises most, by {{ lead.loss|alone }}.{% if loses_accuracy %} Top-1 "
        "accuracy falls by {{ lead.accuracy|alone }}.{% endif %}{% if others %} The loss also "
        "rises without {{ others|names }}.{% endif %}",
        lead.loss,
        values={
            "lead": lead,
            "others": rows[1:],
            "loses_accuracy": above(lead.accuracy, 0.0),
            "word": word,
            "place": place,
        },
        brief="Without {{ word }} **{{ lead.unit }}**{% if place %} ({{ place }}){% endif %}, "
        "**{{ model }}** loses most{% if loses_accuracy %}: {{ lead.accuracy|value }} of "
        "accuracy{% endif %}.",
        p=lead.p,
        kind="answer",
        title=_title(record, lead, word, count),
        reference=record.model.smallest.value,
    )


def _no_important_unit(record: AblateRecord, rows: Sequence[UnitRow], word: str) -> Claim:
    return _claim(
        record,
        f"most important {word}",
        "No single {{ word }} of **{{ model }}** significantly changes the loss by more than "
        "{{ smallest }} (corrected for {{ tests }} tests). The largest measured rise is "
        "{{ most.loss|alone }}, without **{{ most.unit }}**.",
        values={
            "word": word,
            "tests": len(rows),
            "most": max(rows, key=lambda row: row.loss.value),
        },
        brief="No single {{ word }} of **{{ model }}** significantly changes the loss when it is "
        "removed.",
        title=f"No single {word} of {record.model.model} matters significantly",
        kind="answer",
    )


def _heads_with_effect(record: AblateRecord) -> Claim:
    judgements = [row.effect for row in record.heads]
    return _claim(
        record,
        "heads with an effect",
        "When heads are removed one at a time, {{ count }} of {{ n }} change the loss by more "
        "than {{ smallest }}{% if undecided %}; {{ undecided }} {{ undecided|are }} "
        "undecided{% endif %}.{% if dead %} {{ dead|length }} {{ dead|have }} no effect with any "
        "replacement or in pairs ({{ dead|names }}).{% endif %}",
        values={
            "count": judgements.count("effect"),
            "undecided": judgements.count("undecided"),
            "dead": without_effect(record),
        },
        kind="answer",
    )


def _latents_with_effect(record: AblateRecord) -> Claim:
    rows = by_rank(record.latents)
    with_effect = [row for row in rows if row.effect == "effect"]
    lead = max(with_effect or rows, key=lambda row: abs(row.loss.value))
    undecided = [row for row in rows if row.effect == "undecided"]
    return _claim(
        record,
        "latents with an effect",
        "Of {{ removed }} latents of {{ place }}, {{ with_effect|length }} change the "
        "loss by more than {{ smallest }} when they are removed{% if undecided %}; "
        "{{ undecided|length }} {{ undecided|are }} undecided{% endif %}."
        "{% if with_effect %} Latent {{ lead.latent }} has the largest effect: the loss "
        "changes by {{ lead.loss|alone }}.{% endif %}",
        lead.loss,
        values={
            "removed": len(rows),
            "place": record.model.dictionary,
            "with_effect": with_effect,
            "undecided": undecided,
            "lead": lead,
        },
        p=lead.p,
        kind="answer",
        place="latents",
    )


def _redundant(record: AblateRecord, row: HeadPairRow) -> Claim:
    return _claim(
        record,
        "redundant heads",
        "**{{ row.pair }}** are redundant: removing one changes the loss by at most "
        "{{ row.larger|number }} nats, removing both raises it by {{ row.both|number }} "
        "nats.{% if row.similarity is not none %} Their outputs have a linear CKA of "
        "{{ row.similarity|number }}.{% endif %}",
        row.synergy,
        values={"row": row},
        p=row.p,
        kind="hidden fault",
        place="pairs",
    )


def _hidden(record: AblateRecord) -> Iterator[Claim]:
    """Yield the heads with an effect when they are resampled, but no significant one when they are
    replaced by their mean.
    """
    rows = [row for row in record.heads if _is_hidden(record, row)]
    if not rows:
        return
    rows.sort(key=lambda row: (row.hidden.value if row.hidden else 0.0, row.unit))
    head = rows[-1]  # with the largest hidden effect
    yield _claim(
        record,
        "hidden by the mean",
        "Replacing the output of **{{ head.unit }}** by its mean has no "
        "{% if not has_no_effect %}significant {% endif %}effect ({{ by_mean|alone }}). Replacing "
        "it by the output on another image has one ({{ resampled|alone }}).{% if others %} The "
        "same holds for {{ others|names }}.{% endif %}",
        head.hidden,
        values={
            "head": head,
            "others": rows[:-1],
            "by_mean": head.losses["mean"],
            "resampled": head.losses["resample"],
            "has_no_effect": head.effects["mean"] == "no effect",
        },
        p=head.hidden_p,
        kind="hidden fault",
    )


def _is_hidden(record: AblateRecord, row: UnitRow) -> bool:
    """Return True if a head has an effect under resampling that the mean hides significantly."""
    if row.hidden is None or row.hidden_p is None or row.hidden_p > LEVEL:
        return False
    # `hidden` is only defined if both replacements were measured
    if row.effects["mean"] == "effect" or row.effects["resample"] != "effect":
        return False
    return above(row.hidden, record.model.smallest.value, len(record.heads))
