"""What `vitlens ablate` claims: units that matter, heads without an effect, and heads that do each other's work."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import comb
from statistics import median
from typing import Any, Final

from vitlens.analysis.heads.labels import LABELS
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    REPLACED,
    AblateRecord,
    AgreementRow,
    HeadPairRow,
    UnitRow,
    is_ranked,
)
from vitlens.names import UnitKind
from vitlens.report.claims import Claim
from vitlens.report.prose import say
from vitlens.uncertainty import LEVEL, Estimate, widened

ENOUGH: Final = 20  # images, below which nothing is claimed
_FAR: Final = 1.5  # times the sum of both effects, from which on a pair is claimed (or its inverse)
_WORDS: Final[dict[UnitKind, str]] = {"head": "head", "mlp": "MLP", "block": "block"}
_claim: Final = partial(Claim, evidence="intervened")


def claims(record: AblateRecord) -> Iterator[Claim]:
    """Which units matter, how many heads can be spared, and what single removals hide."""
    if record.images < ENOUGH:
        return
    yield from _most_important(record)
    yield from _counted(record)
    yield from _removable(record)
    yield from _spared(record)
    yield from _pairs(record)
    yield from _hidden(record)
    if record.heads:
        yield from _mlp(record)


def with_effect(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """Those whose removal is shown to raise the loss by more than the smallest effect, the greatest rise first."""
    found = [row for row in rows if row.effect == "effect" and row.loss.value > 0]
    return sorted(found, key=lambda row: -row.loss.value)


def without_effect(record: AblateRecord) -> list[UnitRow]:
    """The heads shown to have no effect: with no replacement, nor as one of a redundant pair."""
    needed = {unit for row in redundant(record) for unit in (row.first, row.second)}
    return [
        row
        for row in record.heads
        if row.effect == "no effect" and "effect" not in row.other_effects.values() and row.unit not in needed
    ]


def redundant(record: AblateRecord) -> list[HeadPairRow]:
    """The pairs of which each head alone changes nothing worth reporting, and both together do."""
    smallest, looks = record.model.smallest.value, len(record.pairs)
    return [
        row for row in record.pairs if significant(row)
        and row.larger <= smallest < (widened(row.synergy, looks).low or 0.0)
    ]  # fmt: skip


def significant(row: HeadPairRow) -> bool:
    """Whether a pair costs more, or less, than the sum."""
    return row.p is not None and row.p <= LEVEL


def agreement_shown(record: AblateRecord) -> list[AgreementRow]:
    """The agreement of rankings that order more than noise: by a replacement with which some head has an effect; that
    of the gradient belongs to the exact one."""
    heads = record.heads
    ranked: set[str] = {name for row in heads for name, p in row.other_p.items() if p <= LEVEL}
    ranked |= {record.model.replace, FIRST_ORDER} if is_ranked(heads) else set()
    return [row for row in record.agreement if {row.first, row.second} <= ranked]


def images_needed(rows: Sequence[UnitRow], smallest: Estimate, images: int) -> Estimate | None:
    """About how many images would shrink the intervals of these units to the smallest effect on either side (their
    median); None without intervals."""
    halves = [
        (row.loss.high - row.loss.low) / 2 for row in rows if row.loss.low is not None and row.loss.high is not None
    ]
    if not halves:
        return None
    needed = images * (median(halves) / smallest.value) ** 2
    return Estimate(float(max(images, int(float(f"{needed:.1e}")))), unit="images")


def undecided(record: AblateRecord) -> list[UnitRow]:
    """The heads that are shown neither to have an effect nor to have none."""
    return [row for row in record.heads if row.effect == "undecided"]


def _most_important(record: AblateRecord) -> Iterator[Claim]:
    """The head whose removal costs most; of a model of which no head was removed, the MLP or block."""
    kind: UnitKind = "head" if record.heads else "mlp" if record.of_kind("mlp") else "block"
    rows, model = record.of_kind(kind), record.model.model
    found = with_effect(rows)
    if not found:
        yield _of_none(record, rows, kind)
        return
    lead, label = found[0], record.label(found[0])
    says = say(
        "Without **{{ lead.unit }}**{% if label %} ({{ label.words }}){% endif %} the loss of **{{ model }}** rises "
        "most, "
        "by {{ lead.loss|alone }}{% if loses %}, and top-1 accuracy falls by {{ lead.accuracy|alone }}{% endif %}"
        "{% if others %}; it also rises without {{ others|names }}{% endif %}.",
        lead=lead, label=label, model=model, others=found[1:], loses=(lead.accuracy.low or 0.0) > 0,
    )  # fmt: skip
    yield _claim(
        f"most important {_WORDS[kind]}", model, says,
        title=f"Of {len(rows)} {_WORDS[kind]}s of {model}, {lead.unit} matters most", effect=lead.loss, p=lead.p,
        kind="answer", reference=record.model.smallest.value, place="importance",
    )  # fmt: skip


def _of_none(record: AblateRecord, rows: Sequence[UnitRow], kind: UnitKind) -> Claim:
    most, model = max(rows, key=lambda row: row.loss.value), record.model.model
    says = say(
        "Of {{ n }} {{ word }}s of **{{ model }}**, none is shown to matter when it is removed alone; the largest "
        "measured rise of the loss is that of **{{ most.unit }}**, {{ most.loss|alone }}.",
        n=len(rows), word=_WORDS[kind], model=model, most=most,
    )  # fmt: skip
    title = f"No single {_WORDS[kind]} of {model} is shown to matter"
    return _claim(f"most important {_WORDS[kind]}", model, says, title=title, kind="answer", place="importance")


def _counted(record: AblateRecord) -> Iterator[Claim]:
    """How many heads have an effect, have none, or may have one."""
    if not record.heads:
        return
    yield _claim(
        "heads with an effect", record.model.model,
        say(
            "Removed one at a time, {{ k }} of {{ n }} heads change the loss by more than {{ smallest }} and {{ less }}"
            " by less{% if rest %}; {{ rest }} {{ rest|are }} undecided{% endif %}.",
            k=sum(row.effect == "effect" for row in record.heads), n=len(record.heads),
            less=sum(row.effect == "no effect" for row in record.heads), smallest=record.model.smallest,
            rest=len(undecided(record)),
        ),
        kind="answer", place="importance",
    )  # fmt: skip


def _removable(record: AblateRecord) -> Iterator[Claim]:
    share = record.model.removable
    if share is not None and (share.n or 0) >= ENOUGH:
        says = "{{ share }} of the heads can be removed, the least important first, within {{ one }} point of accuracy."
        yield _claim(
            "removable heads", record.model.model, say(says, share=share, one=1), effect=share,
            kind="answer", place="curves",
        )  # fmt: skip


def _spared(record: AblateRecord) -> Iterator[Claim]:
    """How many heads have no effect, alone and in pairs: counted, not judged, as heads back each other up."""
    heads, unsure, dead = len(record.heads), undecided(record), without_effect(record)
    if not heads or not dead:
        return
    share = Estimate(len(dead) / heads, len(dead) / heads, (len(dead) + len(unsure)) / heads, heads)
    needed = images_needed(unsure, record.model.smallest, record.images) if unsure else None
    says = say(
        "{{ k }} of {{ n }} heads of **{{ model }}** change the loss by less than {{ smallest }}, with every "
        "replacement and in pairs ({{ dead|names }}){% if unsure %}; {{ unsure|length }} are undecided"
        "{% if needed %}, which about {{ needed }} would decide{% endif %}{% endif %}.",
        dead=dead, model=record.model.model, k=len(dead), n=heads, smallest=record.model.smallest, unsure=unsure,
        needed=needed,
    )  # fmt: skip
    yield _claim("heads without effect", record.model.model, says, effect=share, place="importance")


def _pairs(record: AblateRecord) -> Iterator[Claim]:
    """The pair of redundant heads, and the pair whose joint removal costs furthest from the sum of both."""
    spare, model, looks = redundant(record), record.model.model, len(record.pairs)
    if spare:
        row = max(spare, key=lambda row: row.synergy.value)
        says = say(
            "**{{ row.pair }}** are redundant: the loss changes by at most {{ row.larger|number }} nats without "
            "either, and rises by {{ row.both|number }} nats without both{% if row.similarity is not none %}; their "
            "outputs have a linear CKA of {{ row.similarity|number }}{% endif %}.",
            row=row,
        )  # fmt: skip
        yield _claim("redundant heads", model, says, effect=row.synergy, p=row.p, place="pairs", kind="hidden fault")
    others = [row for row in record.pairs if row not in spare and significant(row) and _is_far(record, row, looks)]
    if others:
        row = max(others, key=lambda row: abs(row.synergy.value))
        says = say(
            "Without **{{ row.pair }}** together the loss rises by {{ row.both|number }} nats, {{ apart|number }} "
            "{{ word }} than the sum of both alone.",
            row=row, apart=abs(row.synergy.value), word="more" if row.synergy.value > 0 else "less",
        )  # fmt: skip
        yield _claim(
            "heads beyond the sum", model, says, effect=row.synergy, p=row.p, place="pairs", kind="hidden fault"
        )


def _is_far(record: AblateRecord, row: HeadPairRow, looks: int) -> bool:
    wide, total, smallest = widened(row.synergy, looks), row.both - row.synergy.value, record.model.smallest.value
    if wide.low is None or wide.high is None:
        return False
    if wide.low > smallest:
        return row.both > _FAR * total
    return wide.high < -smallest and row.both < total / _FAR


def _hidden(record: AblateRecord) -> Iterator[Claim]:
    """The heads whose effect a replacement by the mean hides: they matter where they are resampled."""
    heads = {row.unit: row for row in record.heads}
    found = [
        row for row in record.hidden
        if record.model.replace == "mean" and row.p is not None and row.p <= LEVEL
        and (widened(row.hidden, len(heads)).low or 0.0) > record.model.smallest.value
        and heads[row.unit].other_effects.get("resample") == "effect" and heads[row.unit].effect != "effect"
    ]  # fmt: skip
    if not found:
        return
    row = max(found, key=lambda row: row.hidden.value)
    head, others = heads[row.unit], [heads[each.unit] for each in found if each is not row]
    says = say(
        "**{{ head.unit }}** {{ shown }} where its output is replaced by its mean ({{ head.loss|alone }}), but matters "
        "where it is replaced by that of another image ({{ other|alone }}){% if others %}; the same holds for "
        "{{ others|names }}{% endif %}.",
        head=head, other=head.other_losses["resample"], others=others,
        shown="has no effect" if head.effect == "no effect" else "is not shown to have an effect",
    )  # fmt: skip
    yield _claim(
        "hidden by the mean", record.model.model, says, effect=row.hidden, p=row.p, kind="hidden fault",
        place="agreement",
    )  # fmt: skip


def _mlp(record: AblateRecord) -> Iterator[Claim]:
    mlps = record.of_kind("mlp")
    found: Any = with_effect(mlps)
    if found:
        says = say(
            "Of {{ n }} MLPs, that of layer {{ lead.layer }} matters most: without it the loss rises by "
            "{{ lead.loss|alone }}.",
            n=len(mlps), lead=found[0],
        )  # fmt: skip
        yield _claim(
            "most important MLP", record.model.model, says, effect=found[0].loss, p=found[0].p, kind="expected fact",
            reference=record.model.smallest.value, place="others",
        )  # fmt: skip


def unknown(record: AblateRecord) -> Iterator[str]:
    """What removing units of this model on these images does not show."""
    model, heads = record.model, record.heads
    if model.reason:
        yield say("{{ reason|whole }}.", reason=model.reason.rstrip("."))
    if record.options.get("predicted"):
        yield "Labels are the model's own predictions (`--predicted`): accuracy is the share of them that stay."
    if record.images < ENOUGH:
        yield say(
            "{{ n }} image{{ n|s }} {{ n|are }} too few for a claim: the numbers below hold for "
            "{% if one %}it{% else %}them{% endif %}.",
            n=record.images, one=record.images == 1,
        )  # fmt: skip
    for note in model.notes:
        yield say("{{ note|whole }}.", note=f"{note[:1].upper()}{note[1:]}")
    yield from _missing(record)
    if len(heads) > 1:
        yield say(
            "Heads were removed one at a time, and {{ k }} of {{ n }} pairs together: of several heads that do the "
            "same, each can appear unimportant.",
            k=len(record.pairs), n=comb(len(heads), 2),
        )  # fmt: skip
    if model.replace == "zero" and not model.reason:
        yield "Outputs were replaced by zero, which no image produces: compare `--replace resample`."
    elif not model.reason and "resample" not in (model.replace, *(heads[0].other_losses if heads else ())):
        yield say(
            "Each output was replaced by {{ by }} alone, which hides a unit whose output must differ from image to "
            "image; `--replace mean,resample` finds it.",
            by=REPLACED[model.replace],
        )  # fmt: skip
    for reason in model.undone:
        yield say("Not done: {{ reason|whole }}.", reason=reason)
    if record.labels:
        yield say(
            "What a head attends to ({{ n }} images) does not say what it writes: it may matter for another reason.",
            n=record.labels[0].score.n,
        )  # fmt: skip


def _missing(record: AblateRecord) -> Iterator[str]:
    """The heads that these images leave undecided."""
    rest = undecided(record)
    if rest and record.images >= ENOUGH:
        yield say(
            "{{ rest|length }} of {{ n }} heads are shown neither to change the loss by {{ smallest }} nor to change "
            "it by less{% if needed %}: about {{ needed }} would decide{% endif %}.",
            rest=rest, n=len(record.heads), smallest=record.model.smallest,
            needed=images_needed(rest, record.model.smallest, record.images),
        )  # fmt: skip


def definitions(record: AblateRecord) -> Iterator[tuple[str, str]]:
    """What replaces an output, and what the labels of the heads are."""
    for name in dict.fromkeys((record.model.replace, *(n for row in record.units[:1] for n in row.other_losses))):
        yield name, f"a unit's output is replaced by {REPLACED[name]}; a block is skipped with any replacement."
    for label in dict.fromkeys(row.best for row in record.labels if row.best in LABELS):
        yield label, f"{LABELS[label].sentence}."
