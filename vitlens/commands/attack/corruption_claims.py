"""The claims of `vitlens attack` about common corruptions: what they cost, and where two models
differ.
"""

from collections.abc import Iterator
from dataclasses import replace

from vitlens.commands.attack.record import (
    AttackedModelRow,
    AttackRecord,
    CorruptionPairRow,
    CorruptionRow,
)
from vitlens.commands.shared.comparison import signed
from vitlens.report.claims import FEWEST, Claim, above, found
from vitlens.report.prose import listed, say
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import LEVEL, Estimate


def corruption_cost(record: AttackRecord, row: AttackedModelRow, lost: Estimate) -> Claim:
    """Return what common corruptions cost a model."""
    because = "accuracy lost, mean over all kinds and severities"
    state = LIMITS["corruptions"].judge(lost)
    if _is_at_chance(record, row):
        because = "its clean accuracy is not above chance: nothing to lose"
        state = "inconclusive"
    elif record.images < FEWEST:
        because = f"{because}, of few images"
        state = "inconclusive"
    says = ""
    brief = ""
    if record.images >= FEWEST:
        corruptions = [
            corruption for corruption in record.corruptions if corruption.model == row.model
        ]
        worst = min(corruptions, key=_accuracy_of)
        says = say(
            "{% if costs %}Common corruptions cost **{{ row.model }}** {{ row.lost }} of top-1 "
            "accuracy on average.{% else %}Common corruptions do not significantly lower the top-1 "
            "accuracy of **{{ row.model }}**: the mean loss is {{ row.lost }}.{% endif %} "
            "The worst is {{ worst.title }} at severity {{ worst.severity }}: "
            "{{ worst.accuracy|value }}.",
            row=row,
            costs=above(lost, 0.0),
            worst=worst,
        )
        brief = _worst_corruptions(record)  # one sentence on all models, which their claims share
    return Claim(
        "common corruptions",
        row.model,
        says,
        brief=brief,
        effect=lost,
        verdict=Verdict(state, because, "corruptions"),
        evidence="intervened",
        place="corruptions",
    )


def _worst_corruptions(record: AttackRecord) -> str:
    """Return a sentence on the corruption that leaves the least accuracy, for all models."""
    worst_by_model: dict[str, CorruptionRow] = {}
    for row in record.corruptions:
        worst = worst_by_model.get(row.model)
        if worst is None or row.accuracy.value < worst.accuracy.value:
            worst_by_model[row.model] = row
    titles = {row.title for row in worst_by_model.values()}
    model_and_accuracy = "**{{ row.model }}** {{ row.accuracy|value }}"
    common_title = ""
    if len(titles) == 1:
        common_title = titles.pop()
    else:
        model_and_accuracy += " ({{ row.title }})"
    return say(
        "The worst common corruption{% if title %}, {{ title }},{% endif %} leaves {{ left }}.",
        title=common_title,
        left=listed([say(model_and_accuracy, row=row) for row in worst_by_model.values()]),
    )


def _accuracy_of(row: CorruptionRow) -> float:
    return row.accuracy.value


def _is_at_chance(record: AttackRecord, row: AttackedModelRow) -> bool:
    """Return True if the clean accuracy of a model is not significantly above chance."""
    classes = 1
    if record.config.data:
        classes = max(classes, record.config.data.classes)
    for model in record.config.models:  # the data may have only some of a model's classes
        classes = max(classes, model.classes)
    lower_bound = row.clean.low  # None without an interval, e.g. of a single image
    return lower_bound is None or lower_bound <= 1 / classes


def corruption_gap(row: CorruptionPairRow, record: AttackRecord) -> Claim:
    """Return the claim of one difference between two models under a corruption.

    Its p is not corrected for other corruptions.
    """
    first_leads = row.difference.value >= 0
    ahead = row.first if first_leads else row.second
    behind = row.second if first_leads else row.first
    accuracies = {}
    for corruption in record.corruptions:
        if (corruption.kind, corruption.severity) == (row.kind, row.severity):
            accuracies[corruption.model] = corruption.accuracy
    return found(
        f"corruption: {row.kind}",
        f"{row.first} and {row.second}",
        "Under {{ row.title }} at severity {{ row.severity }} **{{ ahead }}** keeps "
        "{{ kept[ahead]|value }}, **{{ behind }}** {{ kept[behind]|value }}: {{ effect|alone }}.",
        signed(row.difference, first_leads),
        brief="The corruption {{ row.title }} (severity {{ row.severity }}) leaves **{{ ahead }}** "
        "{{ kept[ahead]|value }} accuracy, **{{ behind }}** {{ kept[behind]|value }}.",
        given={"row": row, "ahead": ahead, "behind": behind, "kept": accuracies},
        headline="{{ row.title }} (severity {{ row.severity }}) leaves {{ ahead }} "
        "{{ kept[ahead]|value(0) }}, {{ behind }} {{ kept[behind]|value(0) }}",
        p=row.p,
        better=ahead,
        kind="comparison",
        evidence="intervened",
        place="corruptions",
    )


def largest_corruption_gap(record: AttackRecord) -> Iterator[Claim]:
    """Yield the largest difference between two models under a corruption that survives Holm's
    correction.
    """
    significant = [row for row in record.corruption_pairs if row.p_holm <= LEVEL]
    if significant and record.images >= FEWEST:
        largest = max(significant, key=lambda row: abs(row.difference.value))
        # no title: a report on attacks is not titled by a corruption
        yield replace(corruption_gap(largest, record), title="", p=largest.p_holm)
