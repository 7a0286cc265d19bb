"""The report of `vitlens ablate`: which units matter, which heads do each other's work, and what the parts do."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import board, intervals, lines
from vitlens.commands.ablate.claims import claims, definitions, significant, unknown, with_effect
from vitlens.commands.ablate.record import FIRST_ORDER, REPLACED, AblateRecord, UnitRow, fewest_images, is_ranked
from vitlens.figures.patching import patching_maps
from vitlens.record import by as grouped
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section

_FAINTEST: Final = 0.01  # nats, of the full colour: below it differences are rounding errors or negligible


def _by_loss(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """The greatest rise of the loss first; in order of the layers where no effect is shown, as a ranking were noise."""
    return sorted(rows, key=lambda row: -row.loss.value) if is_ranked(rows) else list(rows)


def _heads(record: AblateRecord) -> str:
    """What is shown of the heads, and what was done to them."""
    heads, fewest = record.heads, fewest_images(len(record.heads))
    return say(
        "Each head's output was replaced by {{ by }}, for every image. {% if untested %}One image has no test{% elif "
        "shown %}{{ shown }} of {{ n }} heads change the loss significantly after Holm's correction{% else %}No head "
        "changes the loss significantly, so they are not ranked{% if few %}: with fewer than {{ fewest }} images none "
        "could{% endif %}{% endif %}.",
        by=REPLACED[record.model.replace], untested=all(row.p is None for row in heads), n=len(heads),
        shown=sum(row.matters for row in heads), fewest=fewest, few=record.images < fewest,
    )  # fmt: skip


def _others(record: AblateRecord) -> str:
    leads = [found[0] for found in map(with_effect, (record.of_kind("mlp"), record.of_kind("block"))) if found]
    return say(
        "{% if parts %}The loss rises most without {{ parts }}; a removed block leaves the residual stream as it is."
        "{% else %}No MLP and no block is shown to matter when it is removed alone.{% endif %}",
        parts=leads and listed([Marked(say("{{ row.unit }} ({{ row.loss|alone }})", row=row)) for row in leads]),
    )  # fmt: skip


def _pairs(record: AblateRecord) -> str:
    shown = [row.synergy.value for row in record.pairs if significant(row)]
    return say(
        "Of {{ n }} pairs that were removed together, the loss rises by more than the sum of both heads alone for "
        "{{ more }} and by less for {{ less }}, after Holm's correction. They are the most important heads in pairs, "
        "and the heads of the most similar outputs.",
        n=len(record.pairs), more=sum(value > 0 for value in shown), less=sum(value < 0 for value in shown),
    )  # fmt: skip


def _patching(record: AblateRecord) -> str:
    heads = np.zeros((1, 1)) if record.patched is None else record.patched.heads
    layer, head = divmod(int(np.nan_to_num(heads, nan=-np.inf).argmax()), heads.shape[1])
    return say(
        "One pair of images, an example: the logit of {{ row.target }} minus {{ row.other }} is "
        "{{ row.difference_clean|number }} on the clean image ({{ row.clean }}) and "
        "{{ row.difference_corrupted|number }} on the corrupted one ({{ row.corrupted }}). The output of one head from "
        "the clean run restores at most {{ share|percent }} of the difference (L{{ layer }}.H{{ head }})"
        "{% if not row.corruption %}; positions of two different images need not correspond{% endif %}.",
        row=record.patching[0], share=float(heads[layer, head]), layer=layer, head=head,
    )  # fmt: skip


def _draw_patching(rows: Sequence[AblateRecord], title: str) -> Figure:
    """The pair and the maps of what its parts restore."""
    row, arrays = rows[0].patching[0], rows[0].patched
    assert arrays is not None
    prefix = row.prefix or ()
    names = [f"{name} {prefix[:at].count(name)}" if prefix.count(name) > 1 else name.replace("cls", "CLS")
             for at, name in enumerate(prefix)]  # fmt: skip
    placed = row.grid is not None and arrays.positions.shape[1] == len(names) + row.grid[0] * row.grid[1]
    grids = arrays.positions[:, len(names) :].reshape(-1, *row.grid) if placed and row.grid else None
    before = {name: arrays.positions[:, at] for at, name in enumerate(names)} if placed else {}
    return patching_maps(
        clean=arrays.clean, corrupted=arrays.corrupted, heads=arrays.heads, positions=grids, prefix=before or None,
        names=(f"clean: {row.clean}", f"corrupted: {row.corrupted}"), title=title,
    )  # fmt: skip


def _lens(record: AblateRecord) -> str:
    last = record.lens[-1]
    return say(
        "The final norm and classifier, applied to the residual stream, reach half of the final accuracy "
        "({{ last.accuracy }}) after {{ first.depth }} block{{ first.depth|s }} ({{ first.accuracy|alone }}).",
        first=next(row for row in record.lens if row.accuracy.value >= last.accuracy.value / 2), last=last,
    )  # fmt: skip


def _contributions(record: AblateRecord) -> str:
    parts = grouped(record.contributions, "part")
    sums = {part: sum(row.logit for row in rows) for part, rows in parts.items()}
    return say(
        "Heads add {{ heads|number }}, MLPs {{ mlps|number }}, embedding and biases {{ rest|number }} to the logit of "
        "the label, {{ logit|number }}; {{ most.unit }} adds most of the heads ({{ most.logit|number }}).",
        heads=sums["head"], mlps=sums["MLP"], rest=sums["rest"], logit=sum(sums.values()),
        most=max(parts["head"], key=lambda row: row.logit),
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
        *(Glance("ablated", name) for name in ("removable", "parameters_cut")),
        *(Glance("ablated", "rank_correlation", by, f"rank correlation ({by})") for by in (FIRST_ORDER, *REPLACED)),
    ),
    sections=(
        Section(
            "What does the model lose without each head?", lambda record: _by_loss(record.heads), opening=_heads,
            about=("heads without effect",),
            columns=("unit", "label", "loss", "accuracy", "effect", "other_losses"),
            charts=(Chart(
                "ranking", intervals("unit", "loss", "first_order", titles=("exact", "first-order estimate"),
                                     reference=0.0),
                "Exact rise of the mean cross-entropy with its paired 95 % bootstrap interval over images, and the "
                "estimate from one backward pass; the most important units first.",
                title="Rise of the loss without each head (nats)",
                rows=lambda record: _by_loss(record.heads) if is_ranked(record.heads) else [],
            ),),
        ),
        Section(
            "Which MLPs and blocks matter?", lambda record: _by_loss([row for row in record.units if row.head is None]),
            opening=_others,
            charts=(Chart(
                "others", intervals("unit", "loss", reference=0.0),
                "Rise of the loss without each MLP and each block, with 95 % intervals over images; right of the line: "
                "the model is worse without it.",
                title="Rise of the loss without each MLP and block",
            ),),
        ),
        Section(
            "How many heads can be removed?", "curves",
            opening="{% if record.model.removable %}{{ record.model.removable }} of the heads can be removed, least "
            "important first, before accuracy falls by more than {{ 1 }} point{% else %}Accuracy without any head is "
            "not shown to be lower by more than {{ 1 }} point, so these images do not tell how many heads can be "
            "removed{% endif %}.",
            charts=(Chart(
                "curves", lines("share", "accuracy", of="order"),
                "Accuracy as heads are removed one after another; bands: Wilson's 95 % intervals. Orders are chosen on "
                "other images, where there are enough; a better one may exist.",
                title="Accuracy as heads are removed",
            ),),
        ),
        Section(
            "Do heads do each other's work?", "pairs", opening=_pairs, order=lambda row: -abs(row.synergy.value),
            columns=("pair", "chosen", "similarity", "both", "synergy", "p"),
            charts=(Chart(
                "pairs", intervals("pair", "synergy", reference=0.0),
                "Rise of the loss without both heads minus the sum without each; right of the line: each compensates "
                "for the other; left: each depends on the other.",
                title="What removing two heads costs beyond the sum",
            ),),
        ),
        Section(
            "Where do two images differ for the model?", "patching", opening=_patching,
            charts=(Chart(
                "patching", _draw_patching,
                "Share of the logit difference restored when one head's output, or the residual stream at one token "
                "before a block, is that of the clean image; it may exceed the whole or oppose it.",
                title="What the clean image's activations restore",
                rows=lambda record: [record] if record.patched else [],
            ),),
        ),
        Section(
            "From which layer on can the classifier read the class?", "lens", opening=_lens,
            charts=(Chart(
                "lens", lines("depth", "accuracy"),
                "Share of images whose label the logit lens predicts after so many blocks, with its 95 % interval; "
                "early blocks were not trained for it.",
                title="Accuracy of the logit lens",
            ),),
        ),
        Section(
            "What do heads and MLPs write to the logit?", "contributions", opening=_contributions,
            charts=(Chart(
                "contributions", board("logit", signed=True),
                "Direct contribution of each head to the label's logit, with the final norm's scale fixed for each "
                "image; effects through later layers are not included.",
                title="Direct contributions of the heads", only=lambda row: row.head is not None,
            ),),
        ),
        Section(
            "What remains after pruning?", "pruned",
            opening="{{ rows[1].cut|length }} heads were cut from the weights ({{ rows[1].cut|names }}), "
            "{{ record.model.parameters_cut|value }} of the parameters. The model was not trained afterwards.",
            columns=("model", "heads", "parameters", "accuracy", "time"),
        ),
    ),
)  # fmt: skip
