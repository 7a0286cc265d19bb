"""The claims of `vitlens rollout`: flaws of its maps, their agreement, and the pointing game.

A kind of map is a method, with its fusion of heads if it has one.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.rollout.record import RolloutRecord, RolloutRow
from vitlens.commands.shared.explorer import sinks_claim, without_explorer
from vitlens.commands.shared.maps.record import FIXED, UNIFORM, fixed_maps, mixed_heads_words
from vitlens.report.claims import FEWEST, Claim, above, below, few_images, found
from vitlens.report.prose import say
from vitlens.uncertainty import Estimate

AGREEING: Final = 0.5  # Spearman's correlation, below which two maps disagree


def claims(record: RolloutRecord) -> Iterator[Claim]:
    """Yield maps that are zero, sinks, then what enough images show about the kinds of map."""
    (alias,) = record.aliases
    rows = record.methods
    for row in rows:
        if row.zero:
            yield _zero_claim(row, record.images)
    if not _has_masks(rows):
        yield from sinks_claim(record, alias)
    if record.images < FEWEST:
        return
    with_baseline = [row for row in rows if row.difference is not None]
    if with_baseline:
        yield from _pointing_claims(with_baseline, alias)
    yield _information_claim(rows, alias)
    yield from _fixed_places_claim(rows, alias)
    yield from _fusion_claim(record, alias)


def _has_masks(rows: Sequence[RolloutRow]) -> bool:
    """Return True if the objects in the images are known."""
    return any(row.pointing is not None for row in rows)


def _zero_claim(row: RolloutRow, images: int) -> Claim:
    says = say(
        "{{ row.zero }} of {{ n }} maps of **{{ row.name }}** {{ row.zero|are }} zero everywhere: "
        "no attention weight raises the target's logit.",
        row=row,
        n=images,
    )
    title = ""
    if row.zero == images:
        title = say("The maps of {{ name }} are zero everywhere", name=row.name)
    return Claim(
        "maps that are zero",
        row.name,
        says,
        title=title,
        kind="answer",
        evidence="attributed",
        place="maps",
    )


def _pointing_claims(rows: Sequence[RolloutRow], alias: str) -> Iterator[Claim]:
    """Yield the kinds of map that find the object more often, and less often, than baselines.

    Baselines are maps that ignore the image.
    """
    more = []
    less = []
    for row in rows:
        if above(row.difference, 0.0, tests=len(rows)):
            more.append(row)
        if below(row.difference, 0.0, tests=len(rows)):
            less.append(row)
    others = [row for row in rows if row not in more]
    best = max(more or rows, key=_gain)  # the closest to a baseline if none is better
    yield found(
        "pointing game",
        alias,
        "{{ more|length or 'None' }} of {{ n }} kind{{ n|s }} of map point{{ 's' if not more }} "
        "at the object significantly more often than maps that ignore the image"
        "{% if n > 1 %} (corrected for {{ n }} kinds){% endif %}{% if more and others %}; "
        "{{ others|names }} {{ 'does' if others|length == 1 else 'do' }} not{% endif %}. "
        "{{ 'The best' if more else 'The closest' }} is **{{ best.name }}**: "
        "{{ best.pointing|alone }} compared with {{ best.of_baseline|value }} of "
        "{{ best.baseline }}.",
        best.difference or Estimate(0.0),
        given={"more": more, "others": others, "n": len(rows), "best": best},
        title=say(
            "{{ more|length or 'None' }} of {{ n }} kind{{ n|s }} of map of {{ alias }} "
            "find{{ 's' if not more }} the object significantly more often than baselines",
            more=more,
            n=len(rows),
            alias=alias,
        ),
        kind="answer",
        evidence="attributed",
        place="pointing",
    )
    if less:
        worst = min(rows, key=_gain)
        yield found(
            "maps that miss the object",
            alias,
            "{{ less|names }} point{{ 's' if less|length == 1 }} at the object less often than "
            "maps that ignore the image: {{ worst.name }} by {{ effect|alone }}.",
            worst.difference or Estimate(0.0),
            given={"less": less, "worst": worst},
            kind="hidden fault",
            evidence="attributed",
            place="pointing",
        )


def _gain(row: RolloutRow) -> float:
    """Return the share of hits minus that of the baseline."""
    return 0.0 if row.difference is None else row.difference.value


def _information_claim(rows: Sequence[RolloutRow], alias: str) -> Claim:
    """Return the kinds of map that are nearly uniform, and the sharpest kind."""
    uniform = uniform_kinds(rows)
    sharpest = max(rows, key=lambda row: row.information.value)
    if uniform:
        title = say(
            "{{ uniform|length }} of {{ rows|length }} kinds of map of {{ alias }} are nearly "
            "uniform",
            uniform=uniform,
            rows=rows,
            alias=alias,
        )
    else:
        title = say(
            "{{ row.name }} gives the sharpest maps of {{ alias }}", row=sharpest, alias=alias
        )
    return found(
        "information",
        alias,
        "{% if uniform %}{{ uniform|names }} {{ uniform|are }} nearly uniform (at most "
        "{{ most }} bits): only the maximum distinguishes patches, not the colours. "
        "{% endif %}**{{ sharpest.name }}** has the most information, {{ effect|alone }}.",
        sharpest.information,
        given={
            "uniform": uniform,
            "most": max((row.information.value for row in uniform), default=0.0),
            "sharpest": sharpest,
        },
        title=title,
        kind="answer",
        evidence="attributed",
        place="maps",
    )


def uniform_kinds(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Return the kinds of map with significantly less information than UNIFORM."""
    return [row for row in rows if below(row.information, UNIFORM, tests=len(rows))]


def _fixed_places_claim(rows: Sequence[RolloutRow], alias: str) -> Iterator[Claim]:
    """Yield the kinds of map that are nearly the same for every image."""
    fixed = fixed_maps(rows)
    if not fixed:
        return
    shares = [row.by_place for row in fixed if row.by_place is not None]
    yield found(
        "fixed places",
        alias,
        "The maps of {{ fixed|names }} are nearly the same for every image: other images explain "
        "up to {{ effect|value }} of their information.",
        max(shares, key=lambda share: share.value),
        given={"fixed": fixed},
        reference=FIXED,
        kind="hidden fault",
        evidence="attributed",
        place="maps",
    )


def _fusion_claim(record: RolloutRecord, alias: str) -> Iterator[Claim]:
    """Yield the two fusions of heads whose rollouts disagree most."""
    fusion_of_map = {row.name: row.fusion for row in record.methods if row.fusion}
    pairs = []
    for row in record.pairs:
        if row.first in fusion_of_map and row.second in fusion_of_map:
            pairs.append(row)
    disagreeing = [row for row in pairs if below(row.agreement, AGREEING, tests=len(pairs))]
    if not disagreeing:
        return
    least = min(disagreeing, key=lambda row: row.agreement.value)
    yield found(
        "fusion of heads",
        alias,
        "Rollout depends on the fusion of heads: the maps by {{ first }} and by {{ second }} have "
        "a rank correlation of {{ effect|alone }}.",
        least.agreement,
        given={"first": fusion_of_map[least.first], "second": fusion_of_map[least.second]},
        reference=AGREEING,
        kind="hidden fault",
        evidence="attributed",
    )


def unknown(record: RolloutRecord) -> Iterator[str]:
    """Yield what these maps do not show."""
    yield (
        "No patch was removed. `vitlens explain` measures whether the output depends on what a "
        "map shows."
    )
    yield from few_images(record.images)
    if not _has_masks(record.methods):
        yield "No masks of objects are known, so maps are not compared with the object."
    if not any(row.prediction for row in record.shown):
        yield (
            "The model has no classifier: nothing is predicted, and methods that need a class "
            "are left out."
        )
    if record.mixed_heads:
        yield mixed_heads_words(record.mixed_heads)
    yield from without_explorer(record.explorer)
