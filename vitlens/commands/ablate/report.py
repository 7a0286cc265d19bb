"""The report of `vitlens ablate`: units that matter, heads without an effect, heads that do each other's work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any, Final

import numpy as np

from vitlens.analysis.heads.registry import LABELS
from vitlens.charts import Picture, board, images, intervals, lines
from vitlens.commands.ablate.record import FIRST_ORDER, REPLACED, AblateRecord, HeadPairRow, UnitRow
from vitlens.record import by as grouped
from vitlens.record import col
from vitlens.report.claims import FEWEST, Claim, Kind, above, enough
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import LEVEL, Estimate, fewest_images

_FAINTEST: Final = 0.01  # nats, of the full colour: below it differences are rounding errors or negligible


def claims(record: AblateRecord) -> Iterator[Claim]:
    """Yield which units matter, how many heads can be spared, and what single removals hide.

    How many heads have an effect, have none, alone and in pairs, or may have one is counted, not judged, as heads back
    each other up.
    """
    if record.has_few_images:
        return
    yield _most_important(record)
    effects = [row.effect for row in record.heads]
    dead = without_effect(record)
    share = record.model.removable
    if effects:
        yield _claim(
            record,
            "heads with an effect",
            "Removed one at a time, {{ k }} of {{ n }} heads change the loss by more than {{ smallest }}{% if dead %}; "
            "{{ dead|length }} change it by less, with every replacement and in pairs ({{ dead|names }}){% endif %}"
            "{% if rest %}; {{ rest }} {{ rest|are }} undecided{% endif %}.",
            kind="answer",
            k=effects.count("effect"),
            dead=dead,
            rest=effects.count("undecided"),
        )
    if enough(share):
        says = "{{ share }} of the heads can be removed, the least important first, within {{ one }} point of accuracy."
        yield _claim(record, "removable heads", says, share, kind="answer", place="curves", share=share, one=1)
    for row in redundant(record)[:1]:
        yield _claim(
            record,
            "redundant heads",
            "**{{ row.pair }}** are redundant: the loss changes by at most {{ row.larger|number }} nats without "
            "either, and rises by {{ row.both|number }} nats without both{% if row.similarity is not none %}; their "
            "outputs have a linear CKA of {{ row.similarity|number }}{% endif %}.",
            row.synergy,
            p=row.p,
            kind="hidden fault",
            place="pairs",
            row=row,
        )
    yield from _hidden(record)


def effects(record: AblateRecord) -> Iterator[Claim]:
    """Yield the accuracy that removing each head costs; the p is that of its interval."""
    for row in record.heads:
        template = "Without **{{ row.unit }}** the accuracy of **{{ model }}** falls by {{ row.accuracy|alone }}."
        claim = _claim(record, f"head {row.unit}", template, row.accuracy, row=row)
        yield claim


def _claim(
    record: AblateRecord,
    question: str,
    template: str,
    effect: Estimate | None = None,
    *,
    p: float | None = None,
    title: str = "",
    kind: Kind = "fact",
    place: str = "importance",
    reference: float = 0.0,
    **given: Any,
) -> Claim:
    model = record.model.model
    says = say(template, model=model, smallest=record.model.smallest, n=len(record.heads), **given)
    return Claim(
        question,
        model,
        says,
        title,
        effect=effect,
        p=p,
        evidence="intervened",
        place=place,
        reference=reference,
        kind=kind,
    )


def without_effect(record: AblateRecord) -> list[UnitRow]:
    """Return the heads shown to have no effect: with no replacement, nor as one of a redundant pair."""
    needed = {unit for row in redundant(record) for unit in (row.first, row.second)}
    return [
        row
        for row in record.heads
        if row.effect == "no effect" and "effect" not in row.other_effects.values() and row.unit not in needed
    ]


def redundant(record: AblateRecord) -> list[HeadPairRow]:
    """Return the pairs of which each head alone changes nothing worth reporting, and both together do, the most
    first."""
    smallest = record.model.smallest.value
    looks = len(record.pairs)
    found = [
        row
        for row in record.pairs
        if row.p is not None and row.p <= LEVEL and row.larger <= smallest and above(row.synergy, smallest, looks)
    ]
    return sorted(found, key=lambda row: -row.synergy.value)


def images_needed(rows: Sequence[UnitRow], smallest: Estimate, images: int) -> Estimate | None:
    """About how many images would shrink the intervals of these units to the smallest effect on either side (their
    median); None without intervals."""
    ends = [(row.loss.low, row.loss.high) for row in rows]
    halves = [(high - low) / 2 for low, high in ends if low is not None and high is not None]
    if not halves:
        return None
    needed = images * (median(halves) / smallest.value) ** 2
    return Estimate(float(max(images, int(float(f"{needed:.1e}")))), unit="images")


def _most_important(record: AblateRecord) -> Claim:
    """Return the head whose removal costs most; of a model of which no head was removed, the MLP or block."""
    kinds = grouped(record.units, "kind")
    model = record.model.model
    kind = next(each for each in ("head", "mlp", "block") if each in kinds)
    word = {"mlp": "MLP"}.get(kind, kind)
    rows = _by_importance(kinds[kind])
    found = [row for row in rows if row.effect == "effect" and row.loss.value > 0]
    certain = [row for row in rows if row.log_odds is not None and row.is_ranked and row.rank.value > 0]
    if certain and enough(certain[0].log_odds):
        return _claim(
            record,
            f"most important {word}",
            "Without **{{ lead.unit }}**{% if lead.label %} ({{ lead.label }}){% endif %} the log-odds of the label "
            "fall most, by {{ lead.log_odds|alone }}. The loss of **{{ model }}** is near 0 and changes by "
            "{{ lead.loss|alone }}.",
            certain[0].log_odds,
            p=certain[0].log_odds_p,
            kind="answer",
            lead=certain[0],
            title=f"Of {len(rows)} {word}s of {model}, {certain[0].unit} matters most",
        )
    if not found:
        return _claim(
            record,
            f"most important {word}",
            "No single {{ word }} of **{{ model }}** is shown to change the loss by more than {{ least }} "
            "(corrected for {{ count }} tests). The largest measured rise is that of **{{ most.unit }}**, "
            "{{ most.loss|alone }}.",
            title=f"No single {word} of {model} is shown to matter",
            kind="answer",
            count=len(rows),
            word=word,
            most=max(rows, key=lambda row: row.loss.value),
            least=record.model.smallest,
        )
    lead = found[0]
    return _claim(
        record,
        f"most important {word}",
        "Without **{{ lead.unit }}**{% if lead.label %} ({{ lead.label }}){% endif %} the loss of **{{ model }}** "
        "rises most, by {{ lead.loss|alone }}{% if loses %}, and top-1 accuracy falls by {{ lead.accuracy|alone }}"
        "{% endif %}{% if others %}; it also rises without {{ others|names }}{% endif %}.",
        lead.loss,
        p=lead.p,
        title=f"Of {len(rows)} {word}s of {model}, {lead.unit} matters most",
        kind="answer",
        reference=record.model.smallest.value,
        lead=lead,
        others=found[1:],
        loses=above(lead.accuracy, 0.0),
    )


def _hidden(record: AblateRecord) -> Iterator[Claim]:
    """Yield the heads whose effect a replacement by the mean hides: they matter where they are resampled."""
    smallest = record.model.smallest.value
    looks = len(record.heads)
    found = [
        (row.hidden.value, row.unit, row)
        for row in record.heads
        if row.hidden is not None
        and row.hidden_p is not None
        and row.hidden_p <= LEVEL
        and above(row.hidden, smallest, looks)
        and row.other_effects.get("resample") == "effect"
        and row.effect != "effect"
    ]
    if found:
        *others, head = [row for *_, row in sorted(found)]
        yield _claim(
            record,
            "hidden by the mean",
            "**{{ head.unit }}** has no {% if not spare %}significant {% endif %}effect where "
            "its output is replaced by its mean ({{ head.loss|alone }}), but matters where it is replaced by that of "
            "another image ({{ other|alone }}){% if others %}; the same holds for {{ others|names }}{% endif %}.",
            head.hidden,
            p=head.hidden_p,
            kind="hidden fault",
            head=head,
            others=others,
            other=head.other_losses["resample"],
            spare=head.effect == "no effect",
        )


def unknown(record: AblateRecord) -> Iterator[str]:
    """Yield what removing units of this model on these images does not show."""
    model = record.model
    heads = record.heads
    rest = [row for row in heads if row.effect == "undecided"]
    if model.reason:
        yield say("{{ reason|whole }}.", reason=model.reason.rstrip("."))
    if record.options.get("predicted"):
        yield "Labels are the model's own predictions (`--predicted`): accuracy is the share of them that stay."
    if record.has_few_images:
        yield say(
            "{{ n }} image{{ n|s }} {{ n|are }} too few for a claim; give at least {{ fewest }}.",
            n=record.images,
            fewest=max(FEWEST, fewest_images(len(heads))),
        )
    for note in model.notes:
        yield say("{{ note|whole }}.", note=f"{note[:1].upper()}{note[1:]}")
    if rest and record.images >= FEWEST:
        yield say(
            "For {{ rest|length }} of {{ n }} heads these images leave open whether the loss changes by more than "
            "{{ smallest }} or by less{% if needed %}: about {{ needed }} would decide{% endif %}.",
            rest=rest,
            n=len(heads),
            smallest=model.smallest,
            needed=images_needed(rest, model.smallest, record.images),
        )
    if len(heads) > 1:
        yield say(
            "Heads were removed one at a time, and {{ k }} of {{ n }} pairs together: of several heads that do the "
            "same, each can appear unimportant.",
            k=len(record.pairs),
            n=comb(len(heads), 2),
        )
    if not model.reason and "resample" not in record.effects:
        yield say(
            "Each output was replaced by {{ by }} alone: `--replace mean,resample` also finds units whose output must "
            "differ from image to image.",
            by=REPLACED[model.replace],
        )
    for reason in model.undone:
        yield say("Not done: {{ reason|whole }}.", reason=reason)


def definitions(record: AblateRecord) -> Iterator[tuple[str, str]]:
    """Yield what replaces an output, and what the labels of the heads are."""
    for name in record.effects:
        yield name, f"a unit's output is replaced by {REPLACED[name]}; a block is skipped with any replacement."
    for label in dict.fromkeys(row.label for row in record.heads if row.label in LABELS):
        yield label, f"{LABELS[label].sentence}."


def _by_importance(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """Return the rows by their importance, the greatest first."""
    return sorted(rows, key=lambda row: -row.rank.value)


def _heads(record: AblateRecord) -> str:
    """Return what is shown of the heads, and what was done to them."""
    heads = record.heads
    fewest = fewest_images(max(1, len(record.heads)))
    return say(
        "Each head's output was replaced by {{ by }}, for every image. {% if shown %}{{ shown }} of {{ n }} heads "
        "change the loss significantly after Holm's correction{% else %}No head changes the loss significantly, so "
        "their order may be chance{% if few %}: with fewer than {{ fewest }} images none could{% endif %}{% endif %}.",
        by=REPLACED[record.model.replace],
        n=len(heads),
        shown=sum(row.matters for row in heads),
        fewest=fewest,
        few=record.images < fewest,
    )


def _paired(record: AblateRecord) -> str:
    """Return which heads were removed in pairs."""
    chosen = {row.chosen for row in record.pairs}
    if chosen == {"similarity"}:
        return "The pairs of heads with the most similar outputs were removed; no head matters enough to be ranked."
    if chosen == {"importance"}:
        return "The most important heads were removed in pairs."
    return "The most important heads were removed in pairs, and so were the heads with the most similar outputs."


_PATCHING: Final = (
    "One pair of images, an example: the logit of {{ first.target }} minus {{ first.other }} is "
    "{{ first.difference_clean|number }} on the clean image ({{ first.clean }}) and "
    "{{ first.difference_corrupted|number }} on the corrupted one ({{ first.corrupted }})"
    "{% if not first.corruption %}; positions of two different images need not correspond{% endif %}."
)


@dataclass(frozen=True)
class Restored:
    """What one head of the clean image restores."""

    layer: int
    head: int
    share: float = col("share restored")


def _restored(record: AblateRecord) -> list[Restored]:
    if record.patched is None:
        return []
    return [
        Restored(at[0], at[1], float(each)) for at, each in np.ndenumerate(record.patched.heads) if np.isfinite(each)
    ]


def _pair(record: AblateRecord) -> Iterator[Picture]:
    """Yield the two images."""
    if record.patched is not None:
        row = record.patching[0]
        yield Picture(record.patched.clean, below=f"clean: {row.clean}")
        yield Picture(record.patched.corrupted, below=f"corrupted: {row.corrupted}")


def _tokens(record: AblateRecord) -> Iterator[Picture]:
    """Yield what each token restores before each block: the patches at their places, and those before them with
    numbers."""
    if record.patched is None:
        return
    row = record.patching[0]
    positions = record.patched.positions
    prefix = row.prefix or ()
    if row.grid is None or positions.shape[1] != len(prefix) + row.grid[0] * row.grid[1]:
        return
    for layer, own in enumerate(positions):
        yield Picture(None, own[len(prefix) :].reshape(row.grid), "patches", f"L{layer}")
        for at, name in enumerate(prefix):
            word = f"{name} {prefix[:at].count(name)}" if prefix.count(name) > 1 else name.replace("cls", "CLS")
            yield Picture(
                None, own[at : at + 1, None], word, f"L{layer}", below=f"{round(float(own[at]), 2) + 0.0:.2f}"
            )


def _lens(record: AblateRecord) -> str:
    last = record.lens[-1]
    return say(
        "The final norm and classifier, applied to the residual stream, reach half of the final accuracy "
        "({{ last.accuracy }}) after {{ first.depth }} block{{ first.depth|s }} ({{ first.accuracy|alone }}).",
        first=next(row for row in record.lens if row.accuracy.value >= last.accuracy.value / 2),
        last=last,
    )


REPORT: Final = Report(
    AblateRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    definitions=definitions,
    title="{% if record.has_few_images %}{{ record.images }} image{{ record.images|s }} {{ record.images|are }} too "
    "few to say which units of {{ record.model.model }} matter{% else %}{{ title }}{% endif %}",
    picture=Chart(
        "importance",
        board("loss", signed=True, marked=lambda row: row.matters, least=_FAINTEST),
        "Rise of the loss without each head, exact; red: the model is worse without it; dots: significant after Holm's "
        "correction. Heads that do the same can each appear unimportant.",
        title="What {{ first.model }} loses without each head",
        rows="heads",
    ),
    glance=(
        *(
            Glance("ablated", name)
            for name in (
                "accuracy",
                "cross_entropy",
                "matter",
                "without_effect",
                "removable",
                "parameters_cut",
            )
        ),
        *(Glance("ablated", "rank_correlation", by, f"rank correlation ({by})") for by in (FIRST_ORDER, *REPLACED)),
    ),
    sections=(
        Section(
            "What does the model lose without each head?",
            lambda record: _by_importance(record.heads),
            opening=_heads,
            columns=("unit", "label", "log_odds", "loss", "accuracy", "effect", "other_losses"),
            charts=(
                Chart(
                    "ranking",
                    intervals("unit", "loss", "first_order", titles=("exact", "first-order estimate"), reference=0.0),
                    "Exact rise of the mean cross-entropy with its paired 95 % bootstrap interval over images, and the "
                    "estimate from one backward pass; the most important units first.",
                    title="Rise of the loss without each head (nats)",
                    rows=lambda record: (
                        _by_importance(record.heads) if any(row.is_ranked for row in record.heads) else []
                    ),
                ),
            ),
        ),
        Section(
            "Which MLPs and blocks matter?",
            lambda record: _by_importance([row for row in record.units if row.head is None]),
            opening="Each was removed alone; without a block the residual stream stays as it is.",
            charts=(
                Chart(
                    "others",
                    intervals("unit", "loss", reference=0.0),
                    "Rise of the loss without each MLP and each block, with 95 % intervals over images; right of the "
                    "line: the model is worse without it.",
                    title="Rise of the loss without each MLP and block",
                ),
            ),
        ),
        Section(
            "How many heads can be removed?",
            "curves",
            opening="{% if record.model.removable %}{{ record.model.removable }} of the heads can be removed, least "
            "important first, before accuracy falls by more than {{ 1 }} point{% else %}These images do not tell how "
            "many heads can be removed: even without any head accuracy may fall by less than {{ 1 }} point{% endif %}.",
            charts=(
                Chart(
                    "curves",
                    lines("share", "accuracy", of="order"),
                    "Accuracy as heads are removed one after another; bands: Wilson's 95 % intervals. Orders are "
                    "chosen on other images, where there are enough; a better one may exist.",
                    title="Accuracy as heads are removed",
                ),
            ),
        ),
        Section(
            "Do heads do each other's work?",
            "pairs",
            order=lambda row: -abs(row.synergy.value),
            opening=_paired,
            columns=("pair", "chosen", "similarity", "both", "synergy", "p"),
            charts=(
                Chart(
                    "pairs",
                    intervals("pair", "synergy", reference=0.0),
                    "Rise of the loss without both heads minus the sum without each; right of the line: each "
                    "compensates for the other; left: each depends on the other.",
                    title="What removing two heads costs beyond the sum",
                ),
            ),
        ),
        Section(
            "Where do two images differ for the model?",
            "patching",
            opening=_PATCHING,
            charts=(
                Chart(
                    "patching_pair",
                    images(largest=2.0),
                    "{% if record.patching[0].corruption %}One of {{ record.images }} images, and its corrupted copy: "
                    "activations{% else %}The two images: activations{% endif %} of one replace those of the other.",
                    title="The pair",
                    rows=_pair,
                ),
                Chart(
                    "patching",
                    board("share", signed=True),
                    "Share of the logit difference restored when one head's output is that of the clean image; it may "
                    "exceed the whole.",
                    title="What the clean image's heads restore",
                    rows=_restored,
                ),
                Chart(
                    "patching_tokens",
                    images(scale="signed", label="share restored", largest=1.0),
                    "Share of the logit difference restored when the residual stream at one token before a block is "
                    "that of the clean image. Extreme values lie beyond the colours.",
                    title="What the clean image's tokens restore",
                    rows=_tokens,
                ),
            ),
        ),
        Section(
            "From which layer on can the classifier read the class?",
            "lens",
            opening=_lens,
            charts=(
                Chart(
                    "lens",
                    lines("depth", "accuracy"),
                    "Share of images whose label the logit lens predicts after so many blocks, with its 95 % interval; "
                    "early blocks were not trained for it.",
                    title="Accuracy of the logit lens",
                ),
                Chart(
                    "contributions",
                    board("logit", signed=True),
                    "Direct contribution of each head to the label's logit, with the final norm's scale fixed for each "
                    "image; effects through later layers are not included.",
                    title="Direct contributions of the heads",
                    rows="contributions",
                    only=lambda row: row.head is not None,
                ),
            ),
        ),
        Section(
            "What remains after pruning?",
            "pruned",
            opening="{{ rows[1].cut|length }} heads were cut from the weights ({{ rows[1].cut|names }}), "
            "{{ record.model.parameters_cut|value }} of the parameters. The model was not trained afterwards.",
            columns=("model", "heads", "parameters", "accuracy", "time"),
        ),
    ),
)
