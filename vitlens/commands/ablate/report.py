"""The report of `vitlens ablate`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Final

import numpy as np

from vitlens.analysis.heads.registry import LABELS
from vitlens.charts import Picture, board, images, intervals, lines
from vitlens.commands.ablate.claims import by_rank, claims, effects
from vitlens.commands.ablate.record import FIRST_ORDER, REPLACED, AblateRecord, UnitRow
from vitlens.record import col
from vitlens.report.claims import FEWEST
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate, fewest_images, widened

# nats: the colour scale covers at least this value, because smaller differences are negligible
_FULL_COLOUR: Final = 0.01
_DRAWN: Final = 24  # latents in a figure


def unknown(record: AblateRecord) -> Iterator[str]:
    """Yield what removing units of this model on these images does not show."""
    model = record.model
    if model.reason:
        yield say("{{ reason|whole }}.", reason=model.reason.rstrip("."))
    if record.options.get("predicted"):
        yield (
            "The labels are predictions of the model (`--predicted`): accuracy is the share of "
            "unchanged predictions."
        )
    if record.has_few_images:
        yield say(
            "{{ n }} image{{ n|s }} {{ n|are }} too few for a claim; use at least {{ fewest }}.",
            n=record.images,
            fewest=max(FEWEST, fewest_images(len(record.heads))),
        )
    for note in model.notes:
        yield say("{{ note|whole }}.", note=f"{note[:1].upper()}{note[1:]}")
    yield from _undecided_heads(record)
    if len(record.heads) > 1:
        yield say(
            "Heads were removed one at a time, and {{ k }} of {{ n }} pairs together. Heads with "
            "the same function can each appear unimportant.",
            k=len(record.pairs),
            n=comb(len(record.heads), 2),
        )
    if not model.reason and "resample" not in record.effects:
        yield say(
            "Each output was only replaced by {{ by }}. `--replace mean,resample` also detects "
            "units that must differ between images.",
            by=" and by ".join(REPLACED[name] for name in _replacements(record)),
        )
    for reason in model.undone:
        yield say("Not measured: {{ reason|whole }}.", reason=reason)


def _replacements(record: AblateRecord) -> list[str]:
    """Return the replacements that were measured, that of the figures first."""
    main = record.model.replace
    return [main, *(name for name in record.effects if name != main)]


def _undecided_heads(record: AblateRecord) -> Iterator[str]:
    """Yield how many heads are undecided, and how many images would decide."""
    undecided = [row for row in record.heads if row.effect == "undecided"]
    if not undecided or record.images < FEWEST:
        return
    smallest = record.model.smallest
    needed = images_needed(undecided, smallest, record.images, tests=len(record.heads))
    yield say(
        "{{ undecided|length }} of {{ n }} heads {{ undecided|are }} undecided: their "
        "intervals include changes of the loss below and above {{ smallest }}."
        "{% if more %} About {{ needed }} would be enough to show that a head has no "
        "effect.{% elif needed %} Their effects are near that limit: {{ needed }} are "
        "enough to show that a head has no effect.{% endif %}",
        undecided=undecided,
        n=len(record.heads),
        smallest=smallest,
        needed=needed,
        more=needed is not None and needed.value > record.images,
    )


def images_needed(
    rows: Sequence[UnitRow], smallest: Estimate, images: int, *, tests: int
) -> Estimate | None:
    """Return about how many images shrink the median interval of these units to the smallest
    effect on either side; None without intervals.

    The width of an interval falls with the root of the number of images. So small and large samples
    give about the same number.

    images: the number of images from which the intervals were measured.
    tests: the number of units for which `judge_effect` widens the intervals.
    """
    half_widths = []
    for row in rows:
        wide = widened(row.loss, tests)
        if wide.low is not None and wide.high is not None:
            half_widths.append((wide.high - wide.low) / 2)
    if not half_widths:
        return None
    needed = images * (median(half_widths) / smallest.value) ** 2
    return Estimate(max(1.0, float(f"{needed:.1e}")), unit="images")


def definitions(record: AblateRecord) -> Iterator[tuple[str, str]]:
    """Yield the replacements and the labels of heads with their meaning."""
    for name in record.effects:
        yield (
            name,
            f"the output of a unit is replaced by {REPLACED[name]}; blocks are skipped with any "
            "replacement.",
        )
    labels = dict.fromkeys(row.label for row in record.heads)
    for label in labels:
        if label in LABELS:
            yield label, f"{LABELS[label].sentence}."


def _heads(record: AblateRecord) -> str:
    """Return how heads were removed, and how many change the loss significantly."""
    heads = record.heads
    fewest = fewest_images(max(1, len(heads)))
    return say(
        "The output of each head was replaced by {{ by }}, for every image. "
        "{% if significant %}{{ significant }} of {{ n }} heads "
        "change{{ 's' if significant == 1 }} the loss significantly after Holm's "
        "correction.{% else %}No head changes the loss significantly, so their order may be due to "
        "chance.{% if is_few %} With fewer than {{ fewest }} images, no change can be "
        "significant.{% endif %}{% endif %}",
        by=REPLACED[record.model.replace],
        n=len(heads),
        significant=sum(row.matters for row in heads),
        fewest=fewest,
        is_few=record.images < fewest,
    )


def _latents(record: AblateRecord) -> str:
    """Return which latents were removed, and how."""
    chosen = "of --latents" if record.options.get("latents") else "that vary most"
    return say(
        "Of the {{ row.latents }} latents in the dictionary of `{{ row.dictionary }}`, these are "
        "the {{ n }} {{ chosen }}. Each was replaced by {{ by }}, at every patch. What the "
        "dictionary does not reconstruct stays as it is.",
        n=len(record.latents),
        chosen=chosen,
        row=record.model,
        by=REPLACED[record.model.replace],
    )


def _first_latents(record: AblateRecord) -> Sequence[UnitRow]:
    return by_rank(record.latents)[:_DRAWN]


def _significant_ranking(record: AblateRecord) -> Sequence[UnitRow]:
    """Return the heads by importance, if any of them is significant."""
    if not any(row.is_ranked for row in record.heads):
        return []
    return by_rank(record.heads)


def _pairs(record: AblateRecord) -> str:
    """Return a sentence on how the pairs were chosen."""
    chosen = {row.chosen for row in record.pairs}
    if chosen == {"similarity"}:
        return (
            "The pairs of heads with the most similar outputs were removed; no head matters "
            "enough to be ranked."
        )
    if chosen == {"importance"}:
        return "The most important heads were removed in pairs."
    return (
        "The most important heads were removed in pairs, and so were the heads with the most "
        "similar outputs."
    )


_PATCHING: Final = (
    "This example uses one pair of images. The logit of {{ first.target }} minus that of "
    "{{ first.other }} is {{ first.difference_clean|number }} on the clean image "
    "({{ first.clean }}) and {{ first.difference_corrupted|number }} on the corrupted one "
    "({{ first.corrupted }}).{% if not first.corruption %} Positions in two different images "
    "need not correspond.{% endif %}"
)


@dataclass(frozen=True)
class RestoredShare:
    """The share of the logit difference that one head of the clean image restores."""

    layer: int
    head: int
    share: float = col("share restored")


def _restored_by_heads(record: AblateRecord) -> list[RestoredShare]:
    if record.patched is None:
        return []
    rows = []
    for (layer, head), share in np.ndenumerate(record.patched.heads):
        if np.isfinite(share):
            rows.append(RestoredShare(layer, head, float(share)))
    return rows


def _image_pair(record: AblateRecord) -> Iterator[Picture]:
    """Yield the clean and the corrupted image."""
    if record.patched is not None:
        row = record.patching[0]
        yield Picture(record.patched.clean, below=f"clean: {row.clean}")
        yield Picture(record.patched.corrupted, below=f"corrupted: {row.corrupted}")


def _restored_by_tokens(record: AblateRecord) -> Iterator[Picture]:
    """Yield the share that each token restores before each block: maps of the patches, and the
    prefix tokens.
    """
    if record.patched is None:
        return
    row = record.patching[0]
    prefix = row.prefix or ()
    positions = record.patched.positions
    if row.grid is None or positions.shape[1] != len(prefix) + row.grid[0] * row.grid[1]:
        return
    for layer, shares in enumerate(positions):
        # nothing was patched before a block that is no module
        if not np.isfinite(shares).any():
            continue
        column = f"L{layer}"
        patch_shares = shares[len(prefix) :].reshape(row.grid)
        yield Picture(None, patch_shares, row="patches", column=column)
        for index in range(len(prefix)):
            share = round(float(shares[index]), 2) + 0.0  # turns -0.0 into 0.0
            map_of_token = shares[index : index + 1, None]  # of one cell
            yield Picture(
                None,
                map_of_token,
                row=_token_words(prefix, index),
                column=column,
                below=f"{share:.2f}",
            )


def _token_words(prefix: Sequence[str], index: int) -> str:
    """Return the name of a prefix token: "CLS", or "register 0" if there are several."""
    name = prefix[index]
    if prefix.count(name) > 1:
        return f"{name} {prefix[:index].count(name)}"
    return name.replace("cls", "CLS")


def _lens(record: AblateRecord) -> str:
    last = record.lens[-1]
    half = last.accuracy.value / 2
    first = next(row for row in record.lens if row.accuracy.value >= half)
    return say(
        "The final accuracy is {{ last.accuracy }}. The final norm and classifier, applied to "
        "the residual stream, reach half of it after {{ first.depth }} block{{ first.depth|s }} "
        "({{ first.accuracy|alone }}).",
        first=first,
        last=last,
    )


_METRICS: Final = (
    "accuracy",
    "cross_entropy",
    "matter",
    "without_effect",
    "removable",
    "parameters_cut",
)
_RANKINGS: Final = (FIRST_ORDER, *REPLACED)

# In templates, `rows` are those of the section or chart, and `first` is the first of them. `title`
# is that of the run. A number in braces, as {{ 1 }}, is formatted.
REPORT: Final = Report(
    AblateRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    definitions=definitions,
    title="{% if record.has_few_images %}{{ record.images }} image{{ record.images|s }} "
    "{{ record.images|are }} too few to say which units of {{ record.model.model }} "
    "matter{% else %}{{ title }}{% endif %}",
    picture=Chart(
        "importance",
        board("loss", signed=True, marked=lambda row: row.matters, least=_FULL_COLOUR),
        "Rise of the loss without each head. Red: the model is worse without it; dots: "
        "significant after Holm's correction. Heads with the same function can each appear "
        "unimportant.",
        title="What {{ first.model }} loses without each head",
        rows="heads",
    ),
    glance=(
        *(Glance("ablated", name) for name in _METRICS),
        *(
            Glance("ablated", "rank_correlation", name, f"rank correlation ({name})")
            for name in _RANKINGS
        ),
    ),
    sections=(
        Section(
            "What does the model lose without each head?",
            lambda record: by_rank(record.heads),
            opening=_heads,
            columns=("unit", "label", "log_odds", "loss", "accuracy", "effect", "other_losses"),
            charts=(
                Chart(
                    "ranking",
                    intervals(
                        "unit",
                        "loss",
                        "first_order",
                        titles=("exact", "first-order estimate"),
                        reference=0.0,
                    ),
                    "Exact rise of the mean cross-entropy with paired 95 % bootstrap intervals "
                    "over images, and the estimate from one backward pass. The most important "
                    "units come first.",
                    title="Rise of the loss without each head (nats)",
                    rows=_significant_ranking,
                ),
            ),
        ),
        Section(
            "Which MLPs and blocks matter?",
            lambda record: by_rank([row for row in record.units if row.kind in ("mlp", "block")]),
            opening="Each unit was removed separately. Removing a block leaves the residual stream "
            "as it is.",
            charts=(
                Chart(
                    "others",
                    intervals("unit", "loss", reference=0.0),
                    "Rise of the loss without each MLP and each block, with 95 % intervals over "
                    "images. Right of the line, the model is worse without the unit.",
                    title="Rise of the loss without each MLP and block",
                ),
            ),
        ),
        Section(
            "What does the model lose without each latent?",
            lambda record: by_rank(record.latents),
            opening=_latents,
            columns=("latent", "log_odds", "loss", "accuracy", "effect", "other_losses"),
            charts=(
                Chart(
                    "latents",
                    intervals(
                        "latent",
                        "loss",
                        "first_order",
                        titles=("exact", "first-order estimate"),
                        reference=0.0,
                    ),
                    "Exact rise of the mean cross-entropy without each latent, with 95 % "
                    "intervals over images, and the estimate from one backward pass.",
                    title="Rise of the loss without each latent (nats)",
                    rows=_first_latents,
                ),
            ),
        ),
        Section(
            "How many heads can be removed?",
            "curves",
            opening="{% if record.model.removable %}{{ record.model.removable }} of the heads can "
            "be removed, least important first, before accuracy falls by more than {{ 1 }} "
            "point.{% else %}These images do not show how many heads can be removed: accuracy may "
            "fall by less than {{ 1 }} point even without any head.{% endif %}",
            charts=(
                Chart(
                    "curves",
                    lines("share", "accuracy", of="order"),
                    "Accuracy as heads are removed one after another, with Wilson's 95 % "
                    "intervals. Orders are chosen on other images if there are enough; better "
                    "orders may exist.",
                    title="Accuracy as heads are removed",
                ),
            ),
        ),
        Section(
            "Can heads compensate for each other?",
            "pairs",
            order=lambda row: -abs(row.synergy.value),
            opening=_pairs,
            columns=("pair", "chosen", "similarity", "both", "synergy", "p"),
            charts=(
                Chart(
                    "pairs",
                    intervals("pair", "synergy", reference=0.0),
                    "Rise of the loss without both heads minus the sum without each. Right of "
                    "the line, the heads compensate for each other; left of it, they depend on "
                    "each other.",
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
                    "{% if record.patching[0].corruption %}One of {{ record.images }} images and "
                    "its corrupted copy{% else %}The two images{% endif %}. Activations of one "
                    "replace those of the other.",
                    title="The pair",
                    rows=_image_pair,
                ),
                Chart(
                    "patching",
                    board("share", signed=True),
                    "Share of the logit difference restored when the output of one head is taken "
                    "from the clean image. It can exceed the whole difference.",
                    title="What the clean image's heads restore",
                    rows=_restored_by_heads,
                ),
                Chart(
                    "patching_tokens",
                    images(scale="signed", label="share restored", largest=1.0),
                    "Share of the logit difference restored when the residual stream at one "
                    "token before a block is taken from the clean image. Extreme values exceed "
                    "the colour range.",
                    title="What the clean image's tokens restore",
                    rows=_restored_by_tokens,
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
                    "Share of images with the correct label according to the logit lens, by "
                    "number of blocks, with 95 % intervals. Early blocks were not trained for it.",
                    title="Accuracy of the logit lens",
                ),
                Chart(
                    "contributions",
                    board("logit", signed=True),
                    "Direct contribution of each head to the logit of the label, with the scale "
                    "of the final norm fixed for each image. Effects through later layers are "
                    "not included.",
                    title="Direct contributions of the heads",
                    rows="contributions",
                    only=lambda row: row.head is not None,
                ),
            ),
        ),
        Section(
            "What remains after pruning?",
            "pruned",
            opening="{{ rows[1].cut|length }} heads ({{ rows[1].cut|names }}) were pruned, "
            "{{ record.model.parameters_cut|value }} of the parameters. The model was not trained "
            "afterwards.",
            columns=("model", "heads", "parameters", "accuracy", "time"),
        ),
    ),
)
