"""Verdicts and findings of `vitlens stats`, from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2
from typing import Final

from vitlens.analysis.heads.labels import FAULTY, LABELS, THRESHOLD
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.scaffold.head_health import head_health
from vitlens.commands.stats.record import (
    CHANGES,
    HEADS,
    LAYERS,
    SINKS_OFF_OBJECT,
    STATISTIC_ARRAYS,
    HeadDifferenceRow,
    HeadRow,
)
from vitlens.commands.stats.shown import are_identical
from vitlens.records import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Finding, Verdict
from vitlens.report.findings import Kind, finding
from vitlens.report.numbers import percent
from vitlens.report.verdicts import SINKS
from vitlens.uncertainty import LEVEL, Estimate, widened

_NAMED: Final = 5  # heads of one finding
_UNIFORM: Final = 0.5  # bits of a row, below which attention is uniform
_DEAD: Final = 0.005  # of the mean norm of the heads' outputs
_ON_ONE: Final = 0.25  # of the attention on one patch, from which on a head attends to one place
_SMALLEST: Final = 0.02  # of a fraction, or of the distance of uniform attention: differences below are not findings
_CHOOSING: Final = {"object": "fact", "background": "fact", "sink": "fact", "similar": "fact"}


def verdicts(record: Record) -> Iterator[Verdict]:
    """Dead and uniform heads, and sinks off the object, of each model."""
    images = _images(record)
    for alias in models_in(record):
        heads = [row for row in record.rows(HEADS) if row.model == alias and row.label is not None]
        subject = f"attention health of {alias}"
        if not heads:
            yield rules.not_tested(subject, "no layer whose tokens have a place in the image, so no head has a label")
        elif images < 2:
            yield rules.inconclusive(subject, None, rules.HEADS, "one image; give more with --data or --images")
        else:
            faulty = [row for row in heads if row.label in FAULTY]
            undecided = [row for row in heads if row.label not in FAULTY and _may_be_faulty(row)]
            because = "heads that are dead or attend uniformly"
            yield head_health(subject, len(faulty), len(undecided), len(heads), because)
        yield _sinks(record, alias)


def findings(record: Record) -> Iterator[Finding | None]:
    """Heads that are dead, uniform or attend to one place, sinks off the object, what other heads attend to, and
    differences between two models."""
    for alias in models_in(record):
        heads = [row for row in record.rows(HEADS) if row.model == alias]
        where = f" of {alias}" if len(models_in(record)) > 1 else ""
        suffix = f"_{alias}" if len(record.aliases) > 1 else ""
        yield _dead(record, heads, where, suffix)
        yield _uniform(record, heads, where, suffix)
        yield _one_place(record, heads, where, suffix)
        yield _off_object(record, alias, suffix)
        yield from _labelled(record, heads, where, suffix)
    yield _difference(record)


def models_in(record: Record) -> tuple[str, ...]:
    """The models; of two with equal backbones the first alone, as their attention is the same."""
    return record.aliases[:1] if are_identical(record) else record.aliases


def _images(record: Record) -> int:
    return record.config.data.images if record.config.data else 0


def _may_be_faulty(row: HeadRow) -> bool:
    """Whether these images leave open that a head is dead or uniform."""
    return row.best in FAULTY and (row.high is None or row.high >= THRESHOLD)


def _sinks(record: Record, alias: str) -> Verdict:
    subject, off = f"sinks of {alias}", record.metrics.get(SINKS_OFF_OBJECT(model=alias))
    if off is None:
        return rules.not_tested(subject, "no masks of objects, and a sink on the object is no fault; see --data digits")
    if off.low is None:
        return rules.inconclusive(subject, off, SINKS, "one image; give more with --data")
    return rules.judged(subject, off, SINKS, "attention of patches on sinks off the object, mean over heads")


def _dead(record: Record, heads: Sequence[HeadRow], where: str, suffix: str) -> Finding | None:
    dead = [
        row for row in heads
        if row.label == "dead" and row.added is not None and _below(widened(row.added, len(heads)), _DEAD)
    ]  # fmt: skip
    if not dead:
        return None
    most = max(dead, key=lambda row: row.output or 0.0)
    assert most.added is not None
    are = "is" if len(dead) == 1 else "are"
    return finding(
        f"{_names(dead)}{where} {are} dead: less than {percent(_DEAD, 1)} of the mean norm of all heads' outputs is "
        f"added to the residual stream{'' if len(dead) == 1 else f'; most by {most.name}'}.",
        replace(most.added, n=_images(record)),
        kind="hidden fault",
        reference=_DEAD,
        figure=f"specialisation{suffix}",
        rows=(*dead, Estimate(_DEAD)),
    )


def _uniform(record: Record, heads: Sequence[HeadRow], where: str, suffix: str) -> Finding | None:
    """Heads whose entropy is shown to be near that of uniform attention."""
    keys = {(row.model, row.layer): row.keys for row in record.rows(LAYERS)}
    found = []
    for row in heads:
        entropy = _statistic(record, row, "normalised_entropy")
        bits = log2(keys[row.model, row.layer]) if keys[row.model, row.layer] > 1 else 0.0
        if row.label == "uniform" and entropy is not None and bits:
            reference = 1 - _UNIFORM / bits
            if (widened(entropy, len(heads)).low or 0.0) > reference:
                found.append((row, entropy, reference))
    if not found:
        return None
    row, entropy, reference = min(found, key=lambda each: each[1].value)
    rows, are = [row for row, _, _ in found], "attends" if len(found) == 1 else "attend"
    least = "" if len(found) == 1 else f", least so {row.name}"
    return finding(
        f"{_names(rows)}{where} {are} uniformly{least}: the entropy of a row is {percent(entropy.value, 1)} of that of "
        "uniform attention.",
        entropy,
        kind="hidden fault",
        reference=reference,
        figure=f"heads{suffix}",
        rows=(*rows, entropy),
    )


def _fixed(heads: Sequence[HeadRow]) -> list[HeadRow]:
    """The heads labelled by position whose patch of most attention is shown to receive a large share of it."""
    return [row for row in heads if row.label == "position" and _low_on_place(row, len(heads)) > _ON_ONE]


def _low_on_place(row: HeadRow, looks: int) -> float:
    place = row.on_place
    return 0.0 if place is None else widened(place, looks).low or 0.0


def _one_place(record: Record, heads: Sequence[HeadRow], where: str, suffix: str) -> Finding | None:
    """The head that attends most to one fixed place."""
    shown = _fixed(heads)
    if not shown:
        return None
    row = max(shown, key=lambda row: row.place_mass or 0.0)
    assert row.on_place is not None
    chance, others = row.place_chance or 0.0, [other for other in shown if other != row]
    more = f"; so {'does' if len(others) == 1 else 'do'} {_names(others)}, at places of their own" if others else ""
    return finding(
        f"**{row.name}**{where} attends to one fixed place: {percent(row.place_mass or 0.0)} of the patches' attention "
        f"lies on the patch in {_place_words(row)}, whatever the image ({percent(chance, 1)} if attention were "
        f"uniform){more}.",
        replace(row.on_place, n=_images(record)),
        kind="hidden fault",
        reference=max(chance, _ON_ONE),
        figure=f"specialisation{suffix}",
        rows=(row, *others),
    )


def _off_object(record: Record, alias: str, suffix: str) -> Finding | None:
    off = record.metrics.get(SINKS_OFF_OBJECT(model=alias))
    if off is None or (off.low or 0.0) <= SINKS.passes:
        return None
    return finding(
        f"In **{alias}** {percent(off.value)} of the patches' attention lies on sinks off the object, the mean over "
        "heads.",
        off,
        kind="hidden fault",
        reference=SINKS.passes,
        figure=f"heads{suffix}",
        rows=(off,),
    )


def _labelled(record: Record, heads: Sequence[HeadRow], where: str, suffix: str) -> Iterator[Finding | None]:
    """The heads of each other label, where the label is shown to explain most of their attention."""
    fixed = _fixed(heads)
    for label in dict.fromkeys(row.label for row in heads if row.label in LABELS and row.label not in FAULTY):
        if label is None or not LABELS[label].function:
            continue
        known = [row for row in heads if row.label == label and row not in fixed]
        own = [row for row in known if (widened(row.explained, len(heads)).low or 0.0) > THRESHOLD]
        if not own:
            continue
        row = max(own, key=lambda row: row.score or 0.0)
        kind: Kind = "fact" if label in _CHOOSING else "expected fact"
        words = LABELS[label].sentence.split(" (")[0].split(",")[0]
        most = "" if len(own) == 1 else f", most clearly {row.name}"
        yield finding(
            f"{_names(own)}{where} (label `{label}`): {words}. This explains most of the information in "
            f"{'its' if len(own) == 1 else 'their'} attention{most}.",
            replace(row.explained, n=_images(record)),
            kind=kind,
            reference=THRESHOLD,
            figure=f"specialisation{suffix}",
            rows=tuple(own),
        )


def _difference(record: Record) -> Finding | None:
    """The largest significant difference of one head between two models, in units of the smallest worth reporting."""
    uniform = {row.layer: row.uniform_distance for row in record.rows(LAYERS)}
    changes = record.rows(CHANGES)
    rows = [row for row in changes if row.p_holm <= LEVEL]
    sized = [(_in_smallest(row, uniform.get(row.layer), len(changes)), row) for row in rows]
    sized = [(size, row) for size, row in sized if size > 1]
    if not sized:
        return None
    _, row = max(sized, key=lambda each: each[0])
    first, second = record.aliases
    more, less = (first, second) if row.difference > 0 else (second, first)
    changed = {(row.layer, row.head) for _, row in sized}
    every = {(row.layer, row.head) for row in changes}
    estimate = row.estimate
    if row.difference < 0 and estimate.low is not None and estimate.high is not None:
        estimate = replace(estimate, value=-estimate.value, low=-estimate.high, high=-estimate.low)
    return finding(
        f"{len(changed)} of {len(every)} heads differ between **{first}** and **{second}**; most "
        f"L{row.layer}.H{row.head}, whose {STATISTICS[row.statistic].title} is higher in {more} than in {less}.",
        estimate,
        kind="comparison",
        p=row.p_holm,
        figure="differences",
        rows=changes,
    )


def _in_smallest(row: HeadDifferenceRow, uniform: float | None, looks: int) -> float:
    """The near end of a difference in units of the smallest that is worth reporting; 0 where it holds none."""
    wide, unit = widened(row.estimate, looks), STATISTICS[row.statistic].unit
    smallest = _SMALLEST if unit == "fraction" else _SMALLEST * (uniform or float("inf"))
    if wide.low is None or wide.high is None or wide.low <= 0 <= wide.high:
        return 0.0
    return min(abs(wide.low), abs(wide.high)) / smallest


def _statistic(record: Record, row: HeadRow, name: str) -> Estimate | None:
    """One head's statistic with its interval; None where it has none, or only one image was measured."""
    arrays = record.arrays(STATISTIC_ARRAYS, model=row.model)
    if name not in arrays.mean:
        return None
    mean, low, high = (float(table[name][row.layer, row.head]) for table in (arrays.mean, arrays.low, arrays.high))
    return Estimate(mean, low, high, _images(record)) if low == low and high == high else None


def _below(estimate: Estimate, value: float) -> bool:
    return estimate.high is not None and estimate.high < value


def _names(rows: Sequence[HeadRow]) -> str:
    """L0.H1, L0.H3 and 2 more heads."""
    named = ", ".join(row.name for row in rows[:_NAMED])
    more = len(rows) - _NAMED
    return f"**{named}**" + (f" and {more} more head{'s' if more > 1 else ''}" if more > 0 else "")


def _place_words(row: HeadRow) -> str:
    """Row 0, column 13, the upper right corner."""
    assert row.place is not None
    assert row.place_grid is not None
    (down, across), (rows, columns) = row.place, row.place_grid
    side = {0: "upper", rows - 1: "lower"}.get(down), {0: "left", columns - 1: "right"}.get(across)
    named = f"row {down}, column {across}"
    if None not in side:
        return f"{named}, the {side[0]} {side[1]} corner"
    return f"{named}, at the border" if side != (None, None) else named
