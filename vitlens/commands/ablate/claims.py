"""What `vitlens ablate` claims: units that matter, heads without an effect, and heads that do each other's work."""

from collections.abc import Iterator, Sequence
from math import comb
from statistics import median
from typing import Any, Final

from vitlens.analysis.heads.labels import LABELS
from vitlens.commands.ablate.record import REPLACED, AblateRecord, HeadPairRow, UnitRow
from vitlens.names import UnitKind
from vitlens.report.claims import Claim, above, below
from vitlens.report.findings import Kind
from vitlens.report.prose import say
from vitlens.uncertainty import LEVEL, Estimate

ENOUGH: Final = 20  # images, below which nothing is claimed
_FAR: Final = 1.5  # times the sum of both effects, from which on a pair is claimed (or its inverse)
_WORDS: Final[dict[UnitKind, str]] = {"head": "head", "mlp": "MLP", "block": "block"}


def claims(record: AblateRecord) -> Iterator[Claim]:
    """Which units matter, how many heads can be spared, and what single removals hide."""
    if record.images >= ENOUGH:
        yield _most_important(record)
        for part in (_counted, _removable, _spared, _redundant, _beyond_the_sum, _hidden):
            yield from part(record)


def _claim(
    record: AblateRecord, question: str, template: str, effect: Estimate | None = None, *, p: float | None = None,
    title: str = "", kind: Kind = "fact", place: str = "importance", reference: float = 0.0, **given: Any,
) -> Claim:  # fmt: skip
    model = record.model.model
    says = say(template, model=model, smallest=record.model.smallest, n=len(record.heads), **given)
    return Claim(
        question, model, says, title, effect=effect, p=p, evidence="intervened", place=place, reference=reference,
        kind=kind,
    )  # fmt: skip


def with_effect(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """Those whose removal is shown to raise the loss by more than the smallest effect, the greatest rise first."""
    found = [row for row in rows if row.effect == "effect" and row.loss.value > 0]
    return sorted(found, key=lambda row: -row.loss.value)


def without_effect(record: AblateRecord) -> list[UnitRow]:
    """The heads shown to have no effect: with no replacement, nor as one of a redundant pair."""
    needed = {unit for row in redundant(record) for unit in (row.first, row.second)}
    return [
        row for row in record.heads
        if row.effect == "no effect" and "effect" not in row.other_effects.values() and row.unit not in needed
    ]  # fmt: skip


def redundant(record: AblateRecord) -> list[HeadPairRow]:
    """The pairs of which each head alone changes nothing worth reporting, and both together do."""
    smallest, looks = record.model.smallest.value, len(record.pairs)
    return [
        row for row in record.pairs
        if significant(row) and row.larger <= smallest and above(row.synergy, smallest, looks)
    ]  # fmt: skip


def significant(row: HeadPairRow) -> bool:
    """Whether a pair costs more, or less, than the sum."""
    return row.p is not None and row.p <= LEVEL


def images_needed(rows: Sequence[UnitRow], smallest: Estimate, images: int) -> Estimate | None:
    """About how many images would shrink the intervals of these units to the smallest effect on either side (their
    median); None without intervals."""
    ends = [(row.loss.low, row.loss.high) for row in rows]
    halves = [(high - low) / 2 for low, high in ends if low is not None and high is not None]
    if not halves:
        return None
    needed = images * (median(halves) / smallest.value) ** 2
    return Estimate(float(max(images, int(float(f"{needed:.1e}")))), unit="images")


def _undecided(record: AblateRecord) -> list[UnitRow]:
    return [row for row in record.heads if row.effect == "undecided"]


def _most_important(record: AblateRecord) -> Claim:
    """The head whose removal costs most; of a model of which no head was removed, the MLP or block."""
    kind: UnitKind = "head" if record.heads else "mlp" if record.of_kind("mlp") else "block"
    rows, model, word = record.of_kind(kind), record.model.model, _WORDS[kind]
    found = with_effect(rows)
    if not found:
        return _claim(
            record, f"most important {word}",
            "Of {{ count }} {{ word }}s of **{{ model }}**, none is shown to matter when it is removed alone; the "
            "largest measured rise of the loss is that of **{{ most.unit }}**, {{ most.loss|alone }}.",
            title=f"No single {word} of {model} is shown to matter", kind="answer", count=len(rows), word=word,
            most=max(rows, key=lambda row: row.loss.value),
        )  # fmt: skip
    lead = found[0]
    return _claim(
        record, f"most important {word}",
        "Without **{{ lead.unit }}**{% if lead.label %} ({{ lead.label }}){% endif %} the loss of **{{ model }}** "
        "rises most, by {{ lead.loss|alone }}{% if loses %}, and top-1 accuracy falls by {{ lead.accuracy|alone }}"
        "{% endif %}{% if others %}; it also rises without {{ others|names }}{% endif %}.",
        lead.loss, p=lead.p, title=f"Of {len(rows)} {word}s of {model}, {lead.unit} matters most", kind="answer",
        reference=record.model.smallest.value, lead=lead, others=found[1:], loses=above(lead.accuracy, 0.0),
    )  # fmt: skip


def _counted(record: AblateRecord) -> Iterator[Claim]:
    """How many heads have an effect, have none, or may have one."""
    effects = [row.effect for row in record.heads]
    if effects:
        yield _claim(
            record, "heads with an effect",
            "Removed one at a time, {{ k }} of {{ n }} heads change the loss by more than {{ smallest }} and {{ less }}"
            " by less{% if rest %}; {{ rest }} {{ rest|are }} undecided{% endif %}.",
            kind="answer", k=effects.count("effect"), less=effects.count("no effect"), rest=effects.count("undecided"),
        )  # fmt: skip


def _removable(record: AblateRecord) -> Iterator[Claim]:
    share = record.model.removable
    if share is not None and (share.n or 0) >= ENOUGH:
        says = "{{ share }} of the heads can be removed, the least important first, within {{ one }} point of accuracy."
        yield _claim(record, "removable heads", says, share, kind="answer", place="curves", share=share, one=1)


def _spared(record: AblateRecord) -> Iterator[Claim]:
    """How many heads have no effect, alone and in pairs: counted, not judged, as heads back each other up."""
    heads, dead = len(record.heads), without_effect(record)
    if dead:
        share = len(dead) / heads
        yield _claim(
            record, "heads without effect",
            "{{ dead|length }} of {{ n }} heads of **{{ model }}** change the loss by less than {{ smallest }}, with "
            "every replacement and in pairs ({{ dead|names }}).",
            Estimate(share, share, share + len(_undecided(record)) / heads, heads), dead=dead,
        )  # fmt: skip


def _redundant(record: AblateRecord) -> Iterator[Claim]:
    row = max(redundant(record), key=lambda row: row.synergy.value, default=None)
    if row is not None:
        yield _claim(
            record, "redundant heads",
            "**{{ row.pair }}** are redundant: the loss changes by at most {{ row.larger|number }} nats without "
            "either, and rises by {{ row.both|number }} nats without both{% if row.similarity is not none %}; their "
            "outputs have a linear CKA of {{ row.similarity|number }}{% endif %}.",
            row.synergy, p=row.p, kind="hidden fault", place="pairs", row=row,
        )  # fmt: skip


def _beyond_the_sum(record: AblateRecord) -> Iterator[Claim]:
    """Of the other pairs, the one whose joint removal costs furthest from the sum of both."""
    smallest, looks, spare = record.model.smallest.value, len(record.pairs), redundant(record)

    def is_far(row: HeadPairRow) -> bool:
        total = row.both - row.synergy.value
        if row.synergy.value > 0:
            return above(row.synergy, smallest, looks) and row.both > _FAR * total
        return below(row.synergy, -smallest, looks) and row.both < total / _FAR

    found = [row for row in record.pairs if row not in spare and significant(row) and is_far(row)]
    row = max(found, key=lambda row: abs(row.synergy.value), default=None)
    if row is not None:
        yield _claim(
            record, "heads beyond the sum",
            "Without **{{ row.pair }}** together the loss rises by {{ row.both|number }} nats, {{ apart|number }} "
            "{{ word }} than the sum of both alone.",
            row.synergy, p=row.p, kind="hidden fault", place="pairs", row=row, apart=abs(row.synergy.value),
            word="more" if row.synergy.value > 0 else "less",
        )  # fmt: skip


def _hidden(record: AblateRecord) -> Iterator[Claim]:
    """The heads whose effect a replacement by the mean hides: they matter where they are resampled."""
    smallest, looks = record.model.smallest.value, len(record.heads)
    found = [
        (row.hidden.value, row.unit, row) for row in record.heads
        if row.hidden is not None and row.hidden_p is not None and row.hidden_p <= LEVEL
        and above(row.hidden, smallest, looks)
        and row.other_effects.get("resample") == "effect" and row.effect != "effect"
    ]  # fmt: skip
    if found:
        *others, head = [row for *_, row in sorted(found)]
        yield _claim(
            record, "hidden by the mean",
            "**{{ head.unit }}** has no {% if not spare %}significant {% endif %}effect where "
            "its output is replaced by its mean ({{ head.loss|alone }}), but matters where it is replaced by that of "
            "another image ({{ other|alone }}){% if others %}; the same holds for {{ others|names }}{% endif %}.",
            head.hidden, p=head.hidden_p, kind="hidden fault", head=head, others=others,
            other=head.other_losses["resample"], spare=head.effect == "no effect",
        )  # fmt: skip


def unknown(record: AblateRecord) -> Iterator[str]:
    """What removing units of this model on these images does not show."""
    model, heads, rest = record.model, record.heads, _undecided(record)
    if model.reason:
        yield say("{{ reason|whole }}.", reason=model.reason.rstrip("."))
    if record.options.get("predicted"):
        yield "Labels are the model's own predictions (`--predicted`): accuracy is the share of them that stay."
    if record.images < ENOUGH:
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few for a claim.", n=record.images)
    for note in model.notes:
        yield say("{{ note|whole }}.", note=f"{note[:1].upper()}{note[1:]}")
    if rest and record.images >= ENOUGH:
        yield say(
            "{{ rest|length }} of {{ n }} heads are shown neither to change the loss by {{ smallest }} nor to change "
            "it by less{% if needed %}: about {{ needed }} would decide{% endif %}.",
            rest=rest, n=len(heads), smallest=model.smallest,
            needed=images_needed(rest, model.smallest, record.images),
        )  # fmt: skip
    if len(heads) > 1:
        yield say(
            "Heads were removed one at a time, and {{ k }} of {{ n }} pairs together: of several heads that do the "
            "same, each can appear unimportant.",
            k=len(record.pairs), n=comb(len(heads), 2),
        )  # fmt: skip
    if not model.reason and "resample" not in record.effects:
        yield say(
            "Each output was replaced by {{ by }} alone: `--replace mean,resample` also finds units whose output must "
            "differ from image to image.",
            by=REPLACED[model.replace],
        )  # fmt: skip
    for reason in model.undone:
        yield say("Not done: {{ reason|whole }}.", reason=reason)


def definitions(record: AblateRecord) -> Iterator[tuple[str, str]]:
    """What replaces an output, and what the labels of the heads are."""
    for name in record.effects:
        yield name, f"a unit's output is replaced by {REPLACED[name]}; a block is skipped with any replacement."
    for label in dict.fromkeys(row.label for row in record.heads if row.label in LABELS):
        yield label, f"{LABELS[label].sentence}."
