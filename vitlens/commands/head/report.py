"""The report of `vitlens head`: three tested labels, exemplars, and losses without the head."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.analysis.naming.words import CORRELATES, NOTHING, SEVERAL
from vitlens.charts import Picture, bars, features, images, intervals, walkthrough
from vitlens.charts.pictures import patch_mask
from vitlens.commands.head.claims import claims, pair_words, space_words, unknown
from vitlens.commands.head.record import ExemplarRow, HeadRecord, PartnerRow, PushedRow
from vitlens.commands.shared.label_rows import rest_words
from vitlens.report.claims import ASKED
from vitlens.report.numbers import percent
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Overview, Report, Section

MOST_DRAWN: Final = 8  # other heads in a chart
MOST_CLASSES: Final = 12  # classes in a chart


def _pictures(record: HeadRecord) -> Iterator[Picture]:
    """Yield the exemplars with their maps, the one to which the head adds most first."""
    drawn = record.shown.get(record.aliases[0])
    if drawn is None:
        return
    has_class = bool(record.writes)
    for index, row in enumerate(record.exemplars):
        values = drawn.maps[index]
        picture = drawn.images[index] / 255
        mask = None
        if row.patch is not None:
            mask = patch_mask(row.patch, values.shape, picture.shape[1:])
        column = ""
        below = row.label or ""
        if has_class:
            column = _quantile_words(row)
            below = f"{below}\nadds {row.adds:.2g}".strip()
        has_map = values.size > 1  # else it is the NaN in place of a map
        yield Picture(
            picture,
            values if has_map else None,
            column=column,
            below=below,
            mask=mask,
            signed=row.patch is not None,  # contributions have signs, attention has none
        )


def _quantile_words(row: ExemplarRow) -> str:
    """Return the place of an exemplar among all images by what the head adds."""
    if row.quantile == 1:
        return "most"
    if row.quantile == 0:
        return "least"
    return f"above {percent(row.quantile)}"


def _strongest_pairs(record: HeadRecord) -> list[PartnerRow]:
    return list(record.partners[:MOST_DRAWN])


def _most_pushed(record: HeadRecord) -> list[PushedRow]:
    """Return the classes that the head pushes most and suppresses most."""
    if len(record.pushed) <= MOST_CLASSES:
        return list(record.pushed)
    half = MOST_CLASSES // 2
    return [*record.pushed[:half], *record.pushed[-half:]]


def _pushed_words(record: HeadRecord) -> str:
    return say(
        "Over the first {{ n }} images, the head adds most to {{ first.name }} "
        "({{ first.adds|value }}) and least to {{ last.name }} ({{ last.adds|value }}). It "
        "writes the class to which it adds more in images of the class than in others; that need "
        "not be a class that it pushes.",
        n=record.pushed[0].adds.n,
        first=record.pushed[0],
        last=record.pushed[-1],
    )


def _all_heads_words(record: HeadRecord) -> str:
    """Return how many labels of the model's heads survived their test, without those of which none
    was tested.
    """
    (row,) = record.heads
    survived = []
    if row.attends:
        survived.append(f"{row.attends_hold} of {row.attends} attends-by labels")
    if row.looks:
        survived.append(f"{row.looks_hold} of {row.looks} looks-at labels")
    rest = {CORRELATES: row.correlate, SEVERAL: row.several, NOTHING: row.nothing}
    return say(
        "{% if survived %}In {{ row.model }}, {{ survived }} survived their test.{% endif %}"
        "{% if has_classes %} Of {{ row.heads }} heads, {{ row.matter }} "
        "write{{ 's' if row.matter == 1 }} a class to which removing the head matters"
        "{% if rest %}; of the others, {{ rest|whole }}{% endif %}.{% endif %}",
        row=row,
        survived=listed(survived) if survived else "",
        has_classes=bool(record.writes),
        rest=rest_words(rest),
    ).strip()


def _partners_words(record: HeadRecord) -> str:
    significant = [row for row in record.partners if row.p <= ASKED]
    if not significant:
        return say(
            "For none of {{ n }} other heads does the loss without both differ "
            "significantly from the sum of the losses without each.",
            n=len(record.partners),
        )
    return say(
        "Without {{ lead.partner }} as well, the loss is {{ lead.synergy|alone }} "
        "{{ 'higher' if more else 'lower' }} than the sum: "
        "{{ 'each makes up for the other' if more else 'they depend on each other' }}. The "
        "difference is significant for {{ significant|length }} of {{ n }} other heads.",
        lead=significant[0],
        significant=significant,
        n=len(record.partners),
        more=significant[0].synergy.value > 0,
    )


def _pair_figure(record: Any, title: str) -> Figure:
    """Draw the score of the pair by dimension."""
    pair = record.pair[0]
    by_dimension = sorted(record.dimensions, key=lambda row: row.dimension)
    values = [
        ("query", np.array([row.query for row in by_dimension])),
        ("key", np.array([row.key for row in by_dimension])),
        ("q × k / √d", np.array([row.product for row in by_dimension])),
    ]
    image = record.pair_image.pixels[0] / np.float32(255)
    return walkthrough.score_by_dimension(
        image, [pair.query_patch, pair.key_patch], pair.grid, values, title
    )


def _space_figure(record: Any, title: str) -> Figure:
    """Draw the map of this head's queries and keys, and that of all heads."""
    maps = record.space_maps
    clouds = [
        features.QueryKeyCloud(record.space[0].name, maps.own, maps.own_is_key),
        features.QueryKeyCloud(
            "all heads (this one: black edges)",
            maps.every,
            maps.every_is_key,
            layers=maps.every_layer,
            marked=maps.every_is_own,
        ),
    ]
    return features.query_key_space(clouds, title)


REPORT: Final = Report(
    HeadRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "exemplars",
        images(largest=1.6),
        "{{ rows|length }} of {{ record.images }} images, {% if first.signed %}at quantiles of "
        "what the head adds to its class, with what it adds through each patch; the largest "
        "contribution is outlined{% else %}each with the head's attention on its patches, as a "
        "share of their 99.5th percentile{% endif %}.",
        title="{% if record.writes %}What it adds to {{ record.writes[0].best }}{% else %}Where it "
        "attends{% endif %}",
        rows=_pictures,
    ),
    glance=Overview("writes", ("name", "best", "auc", "control", "state", "margin")),
    sections=(
        Section(
            "What determines its attention?",
            "parts",
            columns=("part", "share"),
            charts=(
                Chart(
                    "parts",
                    bars("part", "share"),
                    "Shares of the attention logits by the parts of query and key; they sum to "
                    "one.",
                    title="Parts of the attention logits",
                ),
            ),
        ),
        Section(
            "Which dimensions make the score of a pair?",
            "dimensions",
            opening=pair_words,
            columns=("dimension", "query", "key", "product"),
            charts=(
                Chart(
                    "neurons",
                    _pair_figure,
                    "The pair on its image, and its query, key and product by dimension. The "
                    "products and the bias sum to the score.",
                    title="{{ record.pair[0].name }}: query times key, by dimension",
                    whole=True,
                ),
            ),
        ),
        Section(
            "Which keys lie near its queries?",
            "space",
            opening=space_words,
            columns=("tokens", "before", "after", "near", "trustworthiness"),
            charts=(
                Chart(
                    "query_key",
                    _space_figure,
                    "Queries and keys of the same tokens in one plane (t-SNE), of this head and of "
                    "all. Compare distances within a head; sizes of clusters mean nothing.",
                    title="Queries and keys of {{ record.space[0].name }}, and of all heads",
                    whole=True,
                ),
            ),
        ),
        Section(
            "Does it look at the object?",
            "placed",
            says="Of the attention of {{ row.name }} on patches, {{ on|value }} lies on "
            "{{ thing|whole }}. On that of other images it is {{ elsewhere|value }}, a difference "
            "of {{ difference|alone }}{% if not row.clear %}, which may be chance{% endif %}.",
        ),
        Section(
            "What breaks without it?",
            "classes",
            says="Images of {{ name }} lose {{ fall }} of log-odds and {{ lost }} of accuracy.",
            columns=("name", "images", "lost", "fall"),
            charts=(
                Chart(
                    "classes",
                    intervals("name", "fall"),
                    "Fall of the log-odds of the label without the head, by class, with 95 % "
                    "intervals.",
                    title="Loss of each class without the head",
                ),
            ),
        ),
        Section(
            "Which classes does it push?",
            "pushed",
            opening=_pushed_words,
            order=lambda row: -abs(row.adds.value),
            columns=("name", "adds"),
            charts=(
                Chart(
                    "pushed",
                    intervals("name", "adds"),
                    "Contribution of the head to the logit of a class beyond the mean of all "
                    "classes, mean of {{ first.adds.n }} images; negative: suppressed. "
                    "{{ rows|length }} of {{ record.pushed|length }} classes, from both ends.",
                    title="Contribution of the head to the logits",
                    rows=_most_pushed,
                ),
            ),
        ),
        Section("How do the other heads compare?", "heads", opening=_all_heads_words),
        Section(
            "With which heads does it work?",
            "partners",
            opening=_partners_words,
            columns=("partner", "synergy", "p"),
            charts=(
                Chart(
                    "partners",
                    intervals("partner", "synergy"),
                    "Loss without both heads, beyond the sum of the losses without each; "
                    "positive: each makes up for the other.",
                    title="Loss beyond the sum, without another head",
                    rows=_strongest_pairs,
                ),
            ),
        ),
    ),
)
