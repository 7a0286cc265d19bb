"""The report of `vitlens head`: three words for a head, and whether they stand their tests."""

from collections.abc import Iterator
from typing import Final

from vitlens.analysis.heads.registry import LABELS, MIXED, UNLABELLED
from vitlens.analysis.naming.words import MATTERS
from vitlens.charts import Picture, bars, images, intervals
from vitlens.charts.pictures import patch_mask
from vitlens.commands.head.record import HeadRecord, PartnerRow, PushedRow, WritesRow
from vitlens.commands.shared.names import noted
from vitlens.report.claims import ASKED, Claim, found
from vitlens.report.numbers import percent
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section

PAIRS: Final = 8  # other heads that are drawn


def claims(record: HeadRecord) -> Iterator[Claim]:
    """Yield the three words, and whether each stands its test."""
    for row in record.writes:
        yield _written(row)
    for by in record.attends:
        named = by.word not in (MIXED, UNLABELLED, "uniform")
        yield found(
            "attends by",
            by.model,
            "{% if uniform %}**{{ row.name }}** attends evenly: its logits spread by {{ row.spread|number }} nats."
            "{% elif not named %}No product of query and key has most of the logits of **{{ row.name }}**: "
            "{{ row.best }} has {{ row.share|value }}, {{ row.next }} {{ row.next_share|percent }}."
            "{% else %}{{ row.share|value }} of the attention logits of **{{ row.name }}** are **{{ row.word }}**"
            "{% if row.word == same %} (whichever patch asks){% endif %}"
            "{% if row.holds %}, and on shuffled patches they do as it says{% elif row.holds is false %}, but on "
            "shuffled patches they do not do as it says{% endif %}.{% endif %}",
            by.share,
            given={"row": by, "named": named, "uniform": by.word == "uniform", "same": "same keys"},
            headline="{{ row.name }} attends by {{ row.best }}" if named and by.holds else "",
            kind="answer",
            evidence="observed" if by.holds is None else "intervened",
            place="parts",
        )
    for seen in record.looks:
        named = seen.word in LABELS and seen.word not in (MIXED, UNLABELLED)
        yield found(
            "looks at",
            seen.model,
            "{% if named %}The pattern of **{{ row.name }}** is **{{ row.word }}** (score {{ row.score|value }}"
            "{% if row.moved %}; {{ row.moved|value }} on shuffled patches{% endif %})."
            "{% else %}No single pattern explains half of the attention of **{{ row.name }}** (the best: "
            "{{ row.score|value }}).{% endif %}",
            seen.score,
            given={"row": seen, "named": named},
            kind="answer",
            evidence="observed" if seen.holds is None else "intervened",
        )


def _written(row: WritesRow) -> Claim:
    """Return what the head writes, and whether it matters."""
    if row.word is not None:
        matters = row.state == MATTERS
        says = (
            "**{{ row.name }}** {{ 'writes' if matters else 'correlates with' }} **{{ row.word }}** "
            "(AUC {{ row.auc|value }}, permuted labels at most {{ row.control|number }})"
            "{% if not matters %}, not shown to matter to {{ 'them' if several else 'it' }}{% endif %}: "
            "without the head the images of {{ row.word }} lose {{ effect|alone }} more log-odds than the "
            "others{% if same %}; no prediction changes{% else %}, and {{ row.lost|value }} of accuracy compared with "
            "{{ row.others_lost|value }}{% endif %}."
            "{% if several %} Their AUCs do not differ significantly.{% endif %}"
        )
        headline = "{{ row.name }} writes {{ row.word }}"
        if not matters:
            headline = "{{ row.name }} correlates with {{ row.word }}, not shown to matter"
    elif row.alike:
        matters = False
        says = (
            "**{{ row.name }}** writes no single class: the AUCs of {{ row.alike|length }} classes or "
            "attributes do not differ significantly (the highest: {{ row.best }}, AUC {{ row.auc }})."
        )
        headline = "{{ row.name }} writes no single class"
    else:
        matters = False
        says = "**{{ row.name }}** separates no class better than chance (best: {{ row.best }}, AUC {{ row.auc }})."
        headline = "{{ row.name }} writes no class"
    return found(
        "writes",
        row.model,
        says,
        row.margin or row.auc,
        given={"row": row, "matters": matters, "several": len(row.alike) > 1, "same": _no_change(row)},
        headline=headline,
        kind="answer",
        evidence="intervened" if row.word else "attributed",
        p=row.p,
        place="exemplars",
    )


def _no_change(row: WritesRow) -> bool:
    """Return True if removing the head changes the accuracy on no class."""
    return not any(lost is not None and lost.value for lost in (row.lost, row.others_lost))


def _pictures(record: HeadRecord) -> Iterator[Picture]:
    """Yield the exemplars, the one to whose class the head adds most first."""
    shown = record.shown.get(record.aliases[0])
    if shown is None:
        return
    known = bool(record.writes)
    for index, row in enumerate(record.exemplars):
        column = (
            ""
            if not known
            else "most"
            if row.quantile == 1
            else "least"
            if row.quantile == 0
            else (f"more than {percent(row.quantile)}")
        )
        below = row.label or ""
        if known:
            below = f"{below}\nadds {row.adds:.2g}".strip()
        values = shown.maps[index]
        picture = shown.images[index] / 255
        mask = None if row.patch is None else patch_mask(row.patch, values.shape, picture.shape[1:])
        yield Picture(
            picture, None if values.size == 1 else values, "", column, below, mask=mask, signed=row.patch is not None
        )


def _strongest(record: HeadRecord) -> list[PartnerRow]:
    return list(record.partners[:PAIRS])


def _ends(record: HeadRecord) -> list[PushedRow]:
    """Return the classes that it pushes most, and those that it suppresses most."""
    ends = PAIRS // 2
    return list(record.pushed if len(record.pushed) <= 2 * ends else record.pushed[:ends] + record.pushed[-ends:])


def _pushes(record: HeadRecord) -> str:
    return say(
        "Over images of all classes it adds most to {{ first.name }} ({{ first.adds|value }}) and takes most from "
        "{{ last.name }} ({{ last.adds|value }}); the class that it tells is the one to which it adds more in its own "
        "images than in others.",
        first=record.pushed[0],
        last=record.pushed[-1],
    )


def _pairs(record: HeadRecord) -> str:
    clear = [row for row in record.partners if row.p <= ASKED]
    if not clear:
        return say(
            "With none of {{ n }} other heads is more lost, or less, than the sum of what is lost without each.",
            n=len(record.partners),
        )
    return say(
        "Without {{ lead.partner }} too, {{ lead.synergy|alone }} {{ 'more' if more else 'less' }} is lost than the "
        "sum: {{ 'each makes up for the other' if more else 'they depend on each other' }}. So it is, by a test, for "
        "{{ clear|length }} of {{ n }} other heads.",
        lead=clear[0],
        clear=clear,
        n=len(record.partners),
        more=clear[0].synergy.value > 0,
    )


def unknown(record: HeadRecord) -> Iterator[str]:
    """Yield what the words leave open."""
    yield from noted(record.notes)
    for row in record.heads:
        yield say(
            "Of {{ row.heads }} heads of {{ row.model }} {{ row.attends_hold }} of {{ row.attends }} tested words for "
            "what they attend by hold, {{ row.looks_hold }} of {{ row.looks }} for what they look at{% if told %}; "
            "{{ row.matter }} heads write classes to which they matter, {{ row.correlate }} only correlate with some, "
            "{{ row.several }} write no single class, {{ row.nothing }} none{% endif %}.",
            row=row,
            told=bool(record.writes),
        )
    if any(row.word for row in record.writes):
        yield "Which features of the class the head reads is not known: another class may share them."


REPORT: Final = Report(
    HeadRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "exemplars",
        images(largest=1.6),
        "{{ rows|length }} of {{ record.images }} images, {% if first.signed %}at spread quantiles of what the head "
        "adds to its class, with what it adds through each patch; the largest contribution is outlined"
        "{% else %}each with the head's attention on its patches, as a share of its maximum{% endif %}.",
        title="{% if record.writes %}What it adds to {{ record.writes[0].best }}{% else %}Where it attends{% endif %}",
        rows=_pictures,
    ),
    glance=Overview("writes", ("name", "best", "auc", "control", "state", "margin")),
    sections=(
        Section(
            "By what does it attend?",
            "parts",
            columns=("part", "share"),
            charts=(
                Chart(
                    "parts",
                    bars("part", "share"),
                    "Shares of the attention logits by the parts of query and key; together they make up all.",
                    title="What the attention logits are made of",
                ),
            ),
        ),
        Section(
            "Does it look at the object?",
            "placed",
            says="{{ on|value }} of the attention of {{ row.name }} on patches lies on {{ thing|whole }}, "
            "{{ elsewhere|value }} on that of other images: a difference of {{ difference|alone }}{% if not row.clear "
            "%}, which may be chance{% endif %}.",
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
                    "What the log-odds of the label fall without the head, by class, with 95 % intervals.",
                    title="What each class loses without the head",
                ),
            ),
        ),
        Section(
            "Which classes does it push?",
            "pushed",
            opening=_pushes,
            order=lambda row: -abs(row.adds.value),
            columns=("name", "adds"),
            charts=(
                Chart(
                    "pushed",
                    intervals("name", "adds"),
                    "What the head adds to the logit of a class beyond the mean "
                    "of all classes, a mean over images; negative: it is suppressed.",
                    title="What the head adds to the logits",
                    rows=_ends,
                ),
            ),
        ),
        Section(
            "With which heads does it work?",
            "partners",
            opening=_pairs,
            columns=("partner", "synergy", "p"),
            charts=(
                Chart(
                    "partners",
                    intervals("partner", "synergy"),
                    "Loss without both heads, beyond the sum of the losses "
                    "without each; positive: each makes up for the other.",
                    title="What is lost beyond the sum without another head, too",
                    rows=_strongest,
                ),
            ),
        ),
    ),
)
