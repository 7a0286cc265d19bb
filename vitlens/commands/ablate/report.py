"""The report of `vitlens ablate`: which units matter, which heads do each other's work, and what the parts do."""

from typing import Final

import numpy as np

from vitlens.charts import bars, board, intervals, lines, matrix, scatter
from vitlens.commands.ablate.claims import (
    ENOUGH,
    agreement_shown,
    claims,
    definitions,
    significant,
    unknown,
    with_effect,
)
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    REPLACED,
    AblateRecord,
    fewest_images,
    is_ranked,
)
from vitlens.commands.ablate.shown import (
    agreeing,
    alike,
    by_loss,
    depths,
    draw_patching,
    example,
    loses_accuracy,
    named_heads,
    orders,
    others,
    paired,
    patched,
    removed,
    square,
    sums,
    where_accuracy_is_lost,
)
from vitlens.record import by
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section

_FAINTEST: Final = 0.01  # nats, of the full colour: below it differences are rounding errors or negligible
_RANKED: Final = 30  # units of the ranking that is drawn


def _heads(record: AblateRecord) -> str:
    """What is shown of the heads, and what was done to them."""
    heads = record.heads
    shown = sum(row.matters for row in heads)
    return say(
        "Each head's output was replaced by {{ by }}, for every image. {% if untested %}One image has no test{% elif "
        "shown %}{{ shown }} of {{ n }} heads change the loss significantly after Holm's correction{% else %}No head "
        "changes the loss significantly, so they are not ranked{% if few %}: with fewer than {{ fewest }} images none "
        "could{% endif %}{% endif %}.",
        by=REPLACED[record.model.replace], untested=all(row.p is None for row in heads), n=len(heads), shown=shown,
        fewest=fewest_images(len(heads)), few=record.images < fewest_images(len(heads)),
    )  # fmt: skip


def _others_said(record: AblateRecord) -> str:
    parts = []
    for kind, word in (("mlp", "MLP"), ("block", "block")):
        found = with_effect(record.of_kind(kind))  # type: ignore[arg-type]
        if found:
            says = "the {{ word }} of layer {{ lead.layer }} ({{ lead.loss|alone }})"
            parts.append(Marked(say(says, word=word, lead=found[0])))
    if not parts:
        return "No MLP and no block is shown to matter when it is removed alone."
    return say("The loss rises most without {{ parts }}; a removed block leaves the residual stream as it is.",
               parts=listed(parts))  # fmt: skip


def _agreement(record: AblateRecord) -> str:
    exact = next((row for row in agreement_shown(record) if FIRST_ORDER in (row.first, row.second)), None)
    others = [row for row in agreement_shown(record) if FIRST_ORDER not in (row.first, row.second)]
    lines = [
        say("The ranking by {{ row.first }} and that by {{ row.second }} have a Spearman correlation of "
            "{{ row.rank_correlation|number }}.", row=row)
        for row in others[:1] if row.rank_correlation is not None
    ]  # fmt: skip
    if exact is not None and exact.rank_correlation is not None:
        says = "The first-order estimate (one backward pass) has a correlation of {{ rho }} with the exact ranking."
        lines.append(say(says, rho=exact.rank_correlation))
    return " ".join(lines)


def _removal(record: AblateRecord) -> str:
    return say(
        "{% if share %}{{ share }} of the heads can be removed, least important first, before accuracy falls by more "
        "than {{ one }} point{% else %}Accuracy without any head is not shown to be lower by more than {{ one }} "
        "point, so these images do not tell how many heads can be removed{% endif %}. Orders were chosen on "
        "{% if halved %}the other half of the images{% else %}the same images{% endif %} and measured on {{ n }}.",
        share=record.model.removable, one=1, n=record.curves[0].accuracy.n,
        halved=(record.curves[0].accuracy.n or 0) < record.images,
    )  # fmt: skip


def _pairs(record: AblateRecord) -> str:
    shown = [row for row in record.pairs if significant(row)]
    return say(
        "Of {{ n }} pairs that were removed together, the loss rises by more than the sum of both heads alone for "
        "{{ more }} and by less for {{ less }}, after Holm's correction. They are the most important heads in pairs, "
        "and the heads of the most similar outputs.",
        n=len(record.pairs), more=sum(row.synergy.value > 0 for row in shown),
        less=sum(row.synergy.value < 0 for row in shown),
    )  # fmt: skip


def _patching(record: AblateRecord) -> str:
    row, heads = record.patching[0], record.patched.heads if record.patched is not None else np.zeros((1, 1))
    most = divmod(int(np.nan_to_num(heads, nan=-np.inf).argmax()), heads.shape[1])
    return say(
        "One pair of images, an example: the logit of {{ row.target }} minus {{ row.other }} is {{ a|number }} on the "
        "clean image ({{ row.clean }}) and {{ b|number }} on the corrupted one ({{ row.corrupted }}). The output of "
        "one "
        "head from the clean run restores at most {{ share|percent }} of the difference (L{{ layer }}.H{{ head }})"
        "{% if not row.corruption %}; positions of two different images need not correspond{% endif %}.",
        row=row, a=row.difference_clean, b=row.difference_corrupted, share=float(heads[most]), layer=most[0],
        head=most[1],
    )  # fmt: skip


def _lens(record: AblateRecord) -> str:
    last = record.lens[-1]
    first = next(row for row in record.lens if row.accuracy.value >= last.accuracy.value / 2)
    return say(
        "The final norm and classifier, applied to the residual stream, reach half of the final accuracy "
        "({{ last.accuracy }}) {% if first.depth %}after layer {{ first.layer }}{% else %}at the embedding{% endif %} "
        "({{ first.accuracy|alone }}).",
        first=first, last=last,
    )  # fmt: skip


def _contributions(record: AblateRecord) -> str:
    sums = {part: sum(row.logit for row in rows) for part, rows in by(record.contributions, "part").items()}
    heads = [row for row in record.contributions if row.part == "head"]
    return say(
        "Heads add {{ heads|number }}, MLPs {{ mlps|number }}, embedding and biases {{ rest|number }} to the logit of "
        "the label, {{ row.logit|number }} in the mean of {{ row.images }} image{{ row.images|s }}; {{ most.unit }} "
        "adds "
        "most of the heads ({{ most.logit|number }}).",
        heads=sums.get("head", 0.0), mlps=sums.get("MLP", 0.0), rest=sums.get("rest", 0.0), row=record.logit[0],
        most=max(heads, key=lambda row: row.logit),
    )  # fmt: skip


def _pruned(record: AblateRecord) -> str:
    cut = listed([Marked(f"L{row.layer}.H{head}") for row in record.pruned_heads for head in row.heads][:12])
    return say(
        "{{ n }} heads were cut from the weights, {{ share|value }} of the parameters: {{ cut }}{% if more %} and "
        "others{% endif %}. The model was not trained afterwards{% if noise %}, and no head is shown to have an "
        "effect, "
        "so these images do not support the choice{% endif %}.",
        n=sum(len(row.heads) for row in record.pruned_heads), share=record.model.parameters_cut, cut=cut,
        more=sum(len(row.heads) for row in record.pruned_heads) > 12, noise=not is_ranked(record.heads),
    )  # fmt: skip


REPORT: Final = Report(
    AblateRecord,
    claims=claims,
    unknown=unknown,
    definitions=definitions,
    picture=Chart(
        "importance",
        board("loss", signed=True, marked=lambda row: row.matters, least=_FAINTEST),
        "Rise of the loss without each head, exact; red: the model is worse without it; dots: significant after Holm's "
        "correction. Heads that do the same can each appear unimportant.",
        title="What {{ first.model }} loses without each head",
        rows="heads",
    ),
    glance=(
        *(Glance("ablated", name) for name in ("accuracy", "cross_entropy", "matter")),
        Glance("ablated", "without_effect", question="heads without effect"),
        *(Glance("ablated", name) for name in ("removable", "rank_correlation", "parameters_cut")),
    ),
    sections=(
        Section(
            "What does the model lose without each head?", lambda record: list(named_heads(record)), opening=_heads,
            about=("heads without effect",),
            columns=("unit", "does", "loss", "accuracy", "otherwise", "broken"),
            charts=(
                Chart(
                    "ranking", intervals("unit", "loss", "first_order", titles=("exact", "first-order estimate"),
                                         reference=0.0),
                    "Exact rise of the mean cross-entropy with its paired 95 % bootstrap interval over images, and the "
                    "estimate from one backward pass; the most important units first.",
                    title="Rise of the loss without each head (nats)",
                    rows=lambda record: by_loss(record.heads)[:_RANKED] if is_ranked(record.heads) else [],
                ),
                Chart(
                    "importance_accuracy",
                    board("accuracy", signed=True, marked=loses_accuracy, least=1.0),
                    "Points of accuracy lost without each head; red: the model is worse without it; dots: significant "
                    "after Holm's correction.",
                    title="Accuracy lost without each head", rows=where_accuracy_is_lost,
                ),
            ),
        ),
        Section(
            "Which MLPs and blocks matter?", others, opening=_others_said,
            columns=("unit", "loss", "p", "accuracy", "effect"),
            charts=(Chart(
                "others", intervals("unit", "loss", reference=0.0),
                "Rise of the loss without each MLP and each block, with 95 % intervals over images; right of the line: "
                "the model is worse without it.",
                title="Rise of the loss without each MLP and block",
            ),),
        ),
        Section(
            "Do other measures rank the heads alike?", agreement_shown, opening=_agreement,
            columns=("first", "second", "rank_correlation"),
            charts=(Chart(
                "agreement", scatter("exact", "other", of="measure", diagonal=True),
                "One point for each head and measure; dashed: equal. Zero, which no image produces, can raise the "
                "loss by "
                "more than a head's information is worth.",
                title="Importance of every head by two measures", rows=lambda record: list(agreeing(record)),
            ),),
        ),
        Section(
            "How many heads can be removed?", lambda record: list(removed(record)), opening=_removal,
            columns=("share", "least", "most", "estimated", "greedy"),
            charts=(Chart(
                "curves", lines("share", "accuracy", of="order"),
                "Accuracy as heads are removed one after another; bands: Wilson's 95 % intervals; dots: random "
                "orders. A better order may exist.",
                title="Accuracy as heads are removed, by order", rows=lambda record: list(orders(record)),
            ),),
        ),
        Section(
            "Do heads do each other's work?", paired, opening=_pairs,
            columns=("pair", "chosen", "similarity", "both", "synergy", "p"),
            charts=(Chart(
                "pairs", intervals("pair", "synergy", reference=0.0),
                "Rise of the loss without both heads minus the sum without each; right of the line: each compensates "
                "for the other; left: each depends on the other.",
                title="What removing two heads costs beyond the sum",
            ),),
        ),
        Section(
            "Which heads have similar outputs?", alike,
            opening="The most similar outputs are those of {{ first.first }} and {{ first.second }}: linear CKA "
            "{{ first.similarity }}, where {{ 1 }} is alike and {{ 0 }} unlike.",
            columns=("first", "second", "similarity"),
            charts=(Chart(
                "redundancy", matrix("first", "second", "similarity"),
                "Linear CKA (unbiased, values below zero drawn as zero) of heads' outputs over tokens and images, by "
                "layer and head.",
                title="Similarity of the outputs of any two heads", rows=square,
            ),),
        ),
        Section(
            "Which class needs which head?",
            lambda record: [row for row in record.classes if row.images >= ENOUGH],
            opening="For each class with enough images, the head without which its loss rises most; these differences "
            "were not tested.",
            order=lambda row: -row.loss,
            columns=("class_name", "images", "unit", "loss", "accuracy"),
        ),
        Section(
            "Where do two images differ for the model?", lambda record: list(patched(record)), opening=_patching,
            charts=(Chart(
                "patching", draw_patching,
                "Share of the logit difference restored when one head's output, or the residual stream at one token "
                "before a block, is that of the clean image; it may exceed the whole or oppose it.",
                title="What the clean image's activations restore",
            ),),
        ),
        Section(
            "From which layer on can the classifier read the class?", lambda record: list(depths(record)),
            opening=_lens,
            charts=(
                Chart(
                    "lens", lines("layer", "accuracy"),
                    "Share of images whose label the logit lens predicts after each block, with its 95 % interval; "
                    "early "
                    "blocks were not trained for it.",
                    title="Accuracy of the logit lens",
                ),
                Chart(
                    "lens_example", lines("layer", "probability", of="class_name"),
                    "An example, the first image: probabilities that the logit lens gives its five most probable "
                    "classes after each block.",
                    title="The logit lens on one image", rows=lambda record: list(example(record)),
                ),
            ),
        ),
        Section(
            "What do heads and MLPs write to the logit?", "contributions", opening=_contributions,
            charts=(
                Chart(
                    "contributions", board("logit", signed=True),
                    "Direct contribution of each head to the label's logit, with the final norm's scale fixed for each "
                    "image; effects through later layers are not included.",
                    title="Direct contributions of the heads", only=lambda row: row.head is not None,
                ),
                Chart(
                    "contributions_by_layer", bars("layer", "logit", of="part"),
                    "Direct contributions to the label's logit by layer: the sum of its heads, and its MLP.",
                    title="Direct contributions by layer", rows=lambda record: list(sums(record)),
                ),
            ),
        ),
        Section(
            "What remains after pruning?", "pruned", opening=_pruned,
            columns=("model", "heads", "parameters", "accuracy", "time"),
        ),
    ),
)  # fmt: skip
