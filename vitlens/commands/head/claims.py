"""The claims of `vitlens head`: three tested labels for one head, and what they do not show."""

from collections.abc import Iterator
from dataclasses import dataclass

from vitlens.analysis.heads.registry import LABELS, MIXED, UNLABELLED
from vitlens.analysis.naming.rows import AttendsRow, LooksRow, WritesRow
from vitlens.analysis.naming.words import MATTERS
from vitlens.commands.head.record import HeadRecord
from vitlens.commands.shared.label_rows import note_sentences
from vitlens.report.claims import Claim, found
from vitlens.report.prose import say


def claims(record: HeadRecord) -> Iterator[Claim]:
    """Yield the three labels of the head with their tests, then its pair and its map of keys.

    Each of these tables has one row, or none where it was not measured.
    """
    for writes in record.writes:
        yield _writes_claim(writes)
    for attends in record.attends:
        yield _attends_claim(attends)
    for looks in record.looks:
        yield _looks_claim(looks)
    for pair in record.pair:
        yield Claim(
            "score of a pair",
            pair.model,
            pair_words(record),
            evidence="intervened",
            place="neurons",
        )
    for space in record.space:
        yield Claim(
            "distance of queries and keys", space.model, space_words(record), place="query_key"
        )


def pair_words(record: HeadRecord) -> str:
    """Return the score of the pair, and its weight without some dimensions."""
    return say(
        "On {{ row.image }}, the score of {{ row.query }} and {{ row.key }} is "
        "{{ row.score|number }}, which gives the key {{ row.weight|percent(1) }} of the query's "
        "attention. With the "
        "{{ row.dropped }} dimensions of the largest products set to zero it gets "
        "{{ row.without|percent(1) }}{% if row.control is not none %}; with as many others, "
        "{{ row.control|percent(1) }} on average{% endif %}.",
        row=record.pair[0],
    )


def space_words(record: HeadRecord) -> str:
    """Return how well distance stands for attention in the map of queries and keys."""
    return say(
        "Vectors are changed so that attention stays as it is and near keys have large scores: the "
        "correlation of distance and score is {{ row.after|number }} instead of "
        "{{ row.before|number }}.{% if row.near %} In the map, the key with the largest score is "
        "among the nearest tenth for {{ row.near|alone }} of the queries.{% endif %}",
        row=record.space[0],
    )


def _attends_claim(row: AttendsRow) -> Claim:
    headline = ""
    if row.word == "uniform":
        sentence = (
            "**{{ row.name }}** attends evenly: its logits spread by {{ row.spread|number }} nats."
        )
    elif row.word in (MIXED, UNLABELLED):
        sentence = (
            "No product of query and key has most of the logits of **{{ row.name }}**: "
            "{{ row.best }} has {{ row.share|value }}, {{ row.next }} "
            "{{ row.next_share|percent(1) }}."
        )
    else:
        sentence = (
            "{{ row.share|value }} of the attention logits of **{{ row.name }}** are "
            "**{{ row.word }}**{% if row.word == same %} (the same for every query){% endif %}"
            "{% if row.holds %}; shuffled patches confirm this"
            "{% elif row.holds is false %}; shuffled patches do not confirm this{% endif %}."
        )
        if row.holds:
            headline = "{{ row.name }} attends by {{ row.best }}"
    return found(
        "attends by",
        row.model,
        sentence,
        row.share,
        given={"row": row, "same": "same keys"},
        headline=headline,
        kind="answer",
        evidence="observed" if row.holds is None else "intervened",
        place="parts",
    )


def _looks_claim(row: LooksRow) -> Claim:
    has_label = row.word in LABELS and row.word not in (MIXED, UNLABELLED)
    return found(
        "looks at",
        row.model,
        "{% if has_label %}The pattern of **{{ row.name }}** is **{{ row.word }}** (score "
        "{{ row.score|value }}{% if row.moved %}; {{ row.moved|value }} on shuffled "
        "patches{% endif %}).{% else %}No single pattern explains half of the attention of "
        "**{{ row.name }}** (the best{% if row.best %}, {{ row.best }}{% endif %}: "
        "{{ row.score|value }}).{% endif %}",
        row.score,
        given={"row": row, "has_label": has_label},
        kind="answer",
        evidence="observed" if row.holds is None else "intervened",
    )


def _writes_claim(row: WritesRow) -> Claim:
    """Return what the head writes, and whether it matters."""
    words = _writes_templates(row)
    return found(
        "writes",
        row.model,
        words.sentence,
        # without the effect of its removal, how well its output tells a class from the others
        row.margin or row.auc,
        given={
            "row": row,
            "matters": row.state == MATTERS,
            "several": len(row.alike) > 1,
            "unchanged": _accuracy_unchanged(row),
        },
        headline=words.headline,
        kind="answer",
        evidence="intervened" if row.word else "attributed",
        p=row.p,
        place="exemplars",
    )


@dataclass(frozen=True)
class _Templates:
    """The templates of a claim's sentence and of its title."""

    sentence: str
    headline: str


def _writes_templates(row: WritesRow) -> _Templates:
    if row.word is None and row.alike:
        return _Templates(
            "**{{ row.name }}** writes no single class: the AUCs of {{ row.alike|length }} "
            "classes or attributes do not differ significantly (the highest: {{ row.best }}, AUC "
            "{{ row.auc }}).",
            "{{ row.name }} writes no single class",
        )
    if row.word is None:
        return _Templates(
            "**{{ row.name }}** separates no class better than chance (best: {{ row.best }}, AUC "
            "{{ row.auc }}).",
            "{{ row.name }} writes no class",
        )
    headline = "{{ row.name }} writes {{ row.word }}"
    if row.state != MATTERS:
        headline = "{{ row.name }} correlates with {{ row.word }}, not shown to matter"
    return _Templates(
        "**{{ row.name }}** {{ 'writes' if matters else 'correlates with' }} **{{ row.word }}** "
        "(AUC {{ row.auc|value }}, permuted labels at most "
        "{{ row.control|number }}){% if not matters %}, but is not shown to matter to "
        "{{ 'them' if several else 'it' }}{% endif %}. Without the head, images of "
        "{{ row.word }} lose {{ effect|alone }} more log-odds than the others{% if unchanged %}; "
        "no prediction changes{% else %}, and {{ row.lost|value }} of accuracy compared with "
        "{{ row.others_lost|value }}{% endif %}.{% if several %} Their AUCs do not differ "
        "significantly.{% endif %}",
        headline,
    )


def _accuracy_unchanged(row: WritesRow) -> bool:
    """Return True if removing the head changes the accuracy of no class."""
    losses = [loss for loss in (row.lost, row.others_lost) if loss is not None]
    return all(loss.value == 0 for loss in losses)


def unknown(record: HeadRecord) -> Iterator[str]:
    """Yield what the labels do not show."""
    yield from note_sentences(record.notes)
    if any(row.word for row in record.writes):
        yield (
            "It is not known which features of the class the head reads; another class may share "
            "them."
        )
