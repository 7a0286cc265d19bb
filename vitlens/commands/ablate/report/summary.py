"""The sentences of the summary: what matters, how certain it is, and what measuring it took."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import ACCURACY, CROSS_ENTROPY, FORWARDS, NOTES, RANK_CORRELATION
from vitlens.commands.ablate.record.rows import UnitRow
from vitlens.commands.ablate.report.ranking import (
    REPLACED,
    Ranking,
    agreement_of_shown_rankings,
    fewest_images,
    heads_of,
    main_replacement,
    main_rows,
    most_harmful_to_remove,
    ranking_of,
)
from vitlens.commands.ablate.report.units import unit_figures
from vitlens.commands.scaffold.describe import data_sentences, predicted_sentences
from vitlens.names import UnitKind
from vitlens.records import Record
from vitlens.report.document import Section, Sentence, Table
from vitlens.report.numbers import in_words

_NAMED: Final = 5  # heads that the summary names
_KINDS: Final[dict[UnitKind, str]] = {"mlp": "MLP", "block": "block"}


def summary(record: Record) -> Section:
    """The first section: what was found of each kind of unit, its figures, and whether the rankings agree."""
    agreement = agreement_of_shown_rankings(record)
    table = Table.of(
        "Do the rankings of heads agree?",
        agreement,
        {
            "ranking": lambda row: row.first,
            "and": lambda row: row.second,
            "Spearman": lambda row: row.rank_correlation,
        },
    )
    return Section(
        "What was found",
        (*what_was_done(record), *_findings(record)),
        (table,) if agreement else (),
        tuple(unit_figures(record)),
        leading=True,
    )


def what_was_done(record: Record) -> Iterator[Sentence]:
    """The images, what was taken for their labels, and why another replacement than the mean was taken."""
    yield from data_sentences(record)
    yield from predicted_sentences(record.options(AblateOptions).predicted)
    for row in record.rows(NOTES):
        if row.about == "replacement":
            yield Sentence(f"{row.note}.", (row,))


def notes(record: Record) -> Iterator[Sentence]:
    """What the measurements say of themselves."""
    for row in record.rows(NOTES):
        if row.about == "measurement":
            yield Sentence(f"Note: {row.note}.", (row,))


def _findings(record: Record) -> Iterator[Sentence]:
    (alias,), rows = record.aliases, main_rows(record)
    right, loss = record.metric(ACCURACY(model=alias)), record.metric(CROSS_ENTROPY(model=alias))
    by = REPLACED[main_replacement(record)]
    yield Sentence(
        f"The unchanged model has a top-1 accuracy of {in_words(right)} and a mean cross-entropy of "
        f"{in_words(loss, with_n=False)}. The output of each unit was replaced by {by}; the change of loss is exact "
        "and measured image by image."
    )
    heads = heads_of(rows)
    yield from _head_sentences(heads, images=right.n or 0)
    yield from _other_sentences(rows)
    if ranking_of(heads) is Ranking.SHOWN:
        for _, rho in record.all(RANK_CORRELATION):
            yield Sentence(
                f"The first-order estimate ranks the heads with a Spearman correlation of {rho.value:.2f} to the exact "
                "ranking."
            )
    yield from _cost_sentences(record, len(rows))
    yield from notes(record)


def _head_sentences(heads: Sequence[UnitRow], *, images: int) -> Iterator[Sentence]:
    """How many heads have an effect; those that do, in order; without one, that there is no order."""
    if not heads:
        return
    ranking = ranking_of(heads)
    if ranking is Ranking.UNTESTED:
        yield Sentence(
            "There are fewer than two images, so no interval and no test is defined: the table below holds what was "
            "measured, and heads are not ranked."
        )
        return
    matter = [row for row in heads if row.matters]
    rise = sum(row.delta_loss > 0 for row in matter)
    yield Sentence(
        f"{len(matter)} of {len(heads)} heads have an effect on the loss after Holm's correction"
        + (f"; without {rise} of them the loss rises, without {len(matter) - rise} it falls." if matter else _UNRANKED),
        tuple(heads),
    )
    if ranking is Ranking.NO_EFFECT and images < fewest_images(len(heads)):
        yield Sentence(
            f"With {images} images no effect on one of {len(heads)} heads can pass this test, however large: it takes "
            f"at least {fewest_images(len(heads))}."
        )
    most = most_harmful_to_remove(heads, "head")[:_NAMED]
    if most:
        listed = "; ".join(f"{row.label} ({in_words(row.loss, with_n=False)})" for row in most)
        yield Sentence(f"The loss rises most without these heads: {listed}.", tuple(most))


_UNRANKED: Final = (
    ". Heads are therefore not ranked, nor removed in order or two by two; it does not show that none of them matters."
)


def _other_sentences(rows: Sequence[UnitRow]) -> Iterator[Sentence]:
    for kind, word in _KINDS.items():
        own = most_harmful_to_remove(rows, kind)[:1]
        for row in own:
            yield Sentence(
                f"Of the {word}s, that of layer {row.layer} is the one without which the loss rises most: "
                f"{in_words(row.loss)}.",
                (row,),
            )


def _cost_sentences(record: Record, units: int) -> Iterator[Sentence]:
    """What exact measurement cost, beside a full forward pass for each unit."""
    spent = record.metrics.get(FORWARDS(model=record.aliases[0], what=main_replacement(record)))
    if spent is not None:
        yield Sentence(
            f"Measuring {units} units took {spent.value:.1f} forward passes an image (counted by linear layers), "
            f"{spent.value / units:.2f} of one pass a unit."
        )
