"""Verdicts and findings of `vitlens ablate`, from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vitlens.commands.ablate.judgement import images_needed, judged, of_judgement, smallest_effect
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.ranking import heads_of, main_replacement, main_rows, most_harmful_to_remove, rows_of
from vitlens.commands.ablate.record import ACCURACY, CROSS_ENTROPY, HEAD_LABELS, HIDDEN, PAIRS
from vitlens.commands.ablate.record.head_rows import HeadLabelRow, ReplacementDifferenceRow
from vitlens.commands.ablate.record.rows import HeadPairRow, UnitRow
from vitlens.commands.scaffold.head_health import head_health
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Support, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, widened

_FAR = 1.5  # times the sum of both effects, from which on a pair is a finding (or its inverse)
_NAMED = 5  # heads of one finding


def verdicts(record: Record) -> Iterator[Verdict]:
    """Attention health: the share of heads whose removal is shown to change nothing."""
    if record.options(AblateOptions).top is not None:
        yield rules.not_tested("attention health", "--top does not measure every head; leave it out")
        return
    heads = heads_of(main_rows(record))
    if not heads:
        yield rules.not_tested("attention health", "no heads were removed; add head to --units")
        return
    smallest, n = smallest_in(record), images_in(record)
    if all(row.p_holm is None for row in heads):
        because = f"{n} image{'s' if n > 1 else ''} cannot show that a head has no effect; give more with --data"
        yield rules.inconclusive("attention health", None, rules.HEADS, because)
        return
    dead, undecided = without_effect(record), of_judgement(heads, smallest, "undecided")
    because = f"heads whose removal changes the loss by less than {in_words(smallest)}"
    needed = images_needed(undecided, smallest, n)
    verdict = head_health("attention health", len(dead), len(undecided), len(heads), because)
    if verdict.state == "inconclusive" and needed is not None:
        more = f"{verdict.because}; about {needed.value:,.0f} images would decide (there are {n:,})"
        verdict = rules.inconclusive("attention health", verdict.value, rules.HEADS, more)
    yield verdict


def findings(record: Record) -> Iterator[Finding | None]:
    """Heads that do each other's work, that a mean hides, or that do nothing; the head and the MLP that matter most."""
    if record.options(AblateOptions).top is not None:
        return
    heads, smallest = heads_of(main_rows(record)), smallest_in(record)
    yield from _pairs(record.rows(PAIRS), smallest)
    yield _hidden(record, heads, smallest)
    yield _without_effect(record, heads, smallest)
    yield _most_important(record, heads, smallest)
    yield _most_important_mlp(record, smallest)


def without_effect(record: Record) -> list[UnitRow]:
    """The heads shown to have no effect: with no replacement, nor as one of a redundant pair."""
    heads, smallest = heads_of(main_rows(record)), smallest_in(record)
    needed = {name for row in _redundant(record.rows(PAIRS), smallest) for name in (row.first, row.second)}
    for name in record.options(AblateOptions).replace:
        needed |= {row.unit for row in of_judgement(heads_of(rows_of(record, name)), smallest, "effect")}
    return [row for row in of_judgement(heads, smallest, "no effect") if row.unit not in needed]


def smallest_in(record: Record) -> Estimate:
    """The smallest change of the loss that is worth reporting in this run."""
    return smallest_effect(record.metric(CROSS_ENTROPY(model=record.aliases[0])))


def images_in(record: Record) -> int:
    """The number of images."""
    return record.metric(ACCURACY(model=record.aliases[0])).n or 0


def label_of(record: Record, row: UnitRow) -> HeadLabelRow | None:
    """What a head attends to; None where it has no label."""
    return next((one for one in record.rows(HEAD_LABELS) if (one.layer, one.head) == (row.layer, row.head)), None)


def _pairs(rows: Sequence[HeadPairRow], smallest: Estimate) -> Iterator[Finding | None]:
    """The pair of redundant heads, and the pair whose joint removal costs furthest from the sum of both."""
    redundant = _redundant(rows, smallest)
    if redundant:
        row = max(redundant, key=lambda row: row.synergy)
        alike = "" if row.similarity is None else f"; their outputs have a linear CKA of {row.similarity:.2f}"
        yield finding(
            f"**{row.label}** are redundant: removing either alone changes the loss by at most {_each_alone(row):.3g} "
            f"nats, removing both raises it by {row.both:.3g} nats, {row.synergy:.3g} more than the sum{alike}.",
            replace(row.estimate, n=row.n),
            kind="hidden fault",
            figure="pairs",
            support="two methods agree" if row.chosen == "similarity" else "one method",
            rows=(row,),
        )
    others = [row for row in rows if row not in redundant and row.p_holm is not None and row.p_holm <= LEVEL]
    far = [row for row in others if _is_far(row, smallest, len(rows))]
    if far:
        row = max(far, key=lambda row: abs(row.synergy))
        words = "more" if row.synergy > 0 else "less"
        each = "" if row.synergy > 0 else ", so the effect of one depends on the other"
        total = Estimate(row.both - row.synergy, unit="nats")
        yield finding(
            f"Removing **{row.label}** together raises the loss by {row.both:.3g} nats, {abs(row.synergy):.3g} {words} "
            f"than the sum of removing each ({total.value:.3g} nats){each}.",
            replace(row.estimate, n=row.n),
            kind="hidden fault",
            figure="pairs",
            rows=(row, total),
        )


def _redundant(rows: Sequence[HeadPairRow], smallest: Estimate) -> list[HeadPairRow]:
    """The pairs of which each head alone changes nothing worth reporting, and both together do."""
    shown = [row for row in rows if row.p_holm is not None and row.p_holm <= LEVEL and row.first_alone is not None]
    return [row for row in shown if _each_alone(row) <= smallest.value < _at_least(row, len(rows))]


def _each_alone(row: HeadPairRow) -> float:
    """The larger change of the loss without one of both, nats."""
    return max(abs(row.first_alone or 0.0), abs(row.second_alone or 0.0))


def _at_least(row: HeadPairRow, looks: int) -> float:
    """The lower end of what removing both costs beyond the sum, for as many looks as there are pairs."""
    low = widened(row.estimate, looks).low
    return -1.0 if low is None else low


def _is_far(row: HeadPairRow, smallest: Estimate, looks: int) -> bool:
    wide, total = widened(row.estimate, looks), row.both - row.synergy
    if wide.low is None or wide.high is None:
        return False
    if wide.low > smallest.value:
        return row.both > _FAR * total
    return wide.high < -smallest.value and row.both < total / _FAR


def _hidden(record: Record, heads: Sequence[UnitRow], smallest: Estimate) -> Finding | None:
    """The head whose effect a replacement by the mean hides most: it matters where it is resampled."""
    if main_replacement(record) != "mean":
        return None
    by_mean = {row.unit: row for row in heads}
    resampled = {row.unit: row for row in heads_of(rows_of(record, "resample"))}
    hidden = [
        row
        for row in record.rows(HIDDEN)
        if row.p_holm is not None and row.p_holm <= LEVEL
        and (widened(row.estimate, len(heads)).low or 0.0) > smallest.value
        and judged(resampled[row.unit], smallest, len(heads)) == "effect"
        and judged(by_mean[row.unit], smallest, len(heads)) != "effect"
    ]  # fmt: skip
    if not hidden:
        return None
    row: ReplacementDifferenceRow = max(hidden, key=lambda row: row.difference)
    mean, other = by_mean[row.unit], resampled[row.unit]
    shown = "has no effect" if judged(mean, smallest, len(heads)) == "no effect" else "is not shown to have an effect"
    others = [one.label for one in hidden if one != row]
    more = f"; the same holds for {', '.join(others)}" if others else ""
    return finding(
        f"**{row.label}** {shown} where its output is replaced by its mean ({in_words(mean.loss)}), but raises the "
        f"loss where it is replaced by that of another image ({in_words(other.loss)}): mean ablation hides "
        f"{row.difference:.3g} nats{more}.",
        row.estimate,
        kind="hidden fault",
        p=row.p_holm,
        figure="agreement",
        support="methods disagree",
        rows=(row, mean, other, *hidden),
    )


def _without_effect(record: Record, heads: Sequence[UnitRow], smallest: Estimate) -> Finding | None:
    """The heads whose removal is shown to change nothing."""
    dead = without_effect(record)
    if not dead:
        return None
    named = ", ".join(row.label for row in dead[:_NAMED])
    more = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
    row = max(dead, key=lambda row: row.delta_loss_high or 0.0)
    each, which = ("", "") if len(dead) == 1 else ("each of ", f"; the largest change is that of {row.label}")
    has = "has" if len(dead) == 1 else "have"
    return finding(
        f"{len(dead)} of {len(heads)} heads {has} no effect: without {each}**{named}**{more} the loss changes by less "
        f"than {in_words(smallest)}{which}.",
        replace(row.loss, n=images_in(record)),
        kind="hidden fault",
        reference=smallest.value,
        figure="importance",
        rows=(*dead, *heads, smallest),
    )


def _most_important(record: Record, heads: Sequence[UnitRow], smallest: Estimate) -> Finding | None:
    most = most_harmful_to_remove(of_judgement(heads, smallest, "effect"), "head")
    if not most:
        return None
    row, label = most[0], label_of(record, most[0])
    does = "" if label is None else f" ({label.words})"
    accuracy = ""
    if (row.delta_accuracy_low or 0.0) > 0:
        accuracy = f" and top-1 accuracy falls by {in_words(row.accuracy)}"
    return finding(
        f"Of {len(heads)} heads, **{row.label}**{does} matters most: without it the loss rises by {row.delta_loss:.3g} "
        f"nats{accuracy}.",
        replace(row.loss, n=images_in(record)),
        kind="fact",
        reference=smallest.value,
        p=row.p_holm,
        figure="importance",
        support=_support(record, row, smallest),
        rows=(row, *heads, *(() if label is None else (label,))),
    )


def _support(record: Record, row: UnitRow, smallest: Estimate) -> Support:
    """Whether the other replacements also show an effect of this head."""
    others = [
        judged(one, smallest, len(heads_of(rows_of(record, name))))
        for name in record.options(AblateOptions).replace
        if name != row.replace
        for one in rows_of(record, name)
        if one.unit == row.unit
    ]
    if not others:
        return "one method"
    return "two methods agree" if all(one == "effect" for one in others) else "methods disagree"


def _most_important_mlp(record: Record, smallest: Estimate) -> Finding | None:
    mlps = [row for row in main_rows(record) if row.kind == "mlp"]
    most = most_harmful_to_remove(of_judgement(mlps, smallest, "effect"), "mlp")
    if not most:
        return None
    row = most[0]
    return finding(
        f"Of {len(mlps)} MLPs, that of layer {row.layer} matters most: without it the loss rises by "
        f"{row.delta_loss:.3g} nats.",
        replace(row.loss, n=images_in(record)),
        kind="expected fact",
        reference=smallest.value,
        p=row.p_holm,
        figure="importance",
        rows=(row, *mlps),
    )
