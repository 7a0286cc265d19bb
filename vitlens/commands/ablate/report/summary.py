"""The summary: which units have an effect, with intervals and tests, and the cost of the measurement."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from vitlens.commands.ablate.conclusions import label_of
from vitlens.commands.ablate.judgement import fewest_images
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.ranking import (
    REPLACED,
    Ranking,
    agreement_of_shown_rankings,
    heads_of,
    main_replacement,
    main_rows,
    most_harmful_to_remove,
    ranking_of,
    rows_of,
)
from vitlens.commands.ablate.record import ACCURACY, BROKEN_CLASSES, CROSS_ENTROPY, FORWARDS, NOTES, RANK_CORRELATION
from vitlens.commands.ablate.record.rows import UnitRow
from vitlens.commands.ablate.report.units import unit_figures
from vitlens.commands.scaffold.describe import data_sentences, predicted_sentences
from vitlens.names import UnitKind
from vitlens.records import Record
from vitlens.report.document import Cell, Section, Sentence, Table
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate

_NAMED: Final = 5  # heads that the summary names
_KINDS: Final[dict[UnitKind, str]] = {"mlp": "MLP", "block": "block"}


def summary(record: Record) -> Section:
    """The first section: the results for each kind of unit, their figures, and the agreement of the rankings."""
    agreement = agreement_of_shown_rankings(record)
    table = Table.of(
        "Agreement of the rankings of heads",
        agreement,
        {
            "ranking": lambda row: row.first,
            "and": lambda row: row.second,
            "Spearman": lambda row: row.rank_correlation,
        },
    )
    named = named_heads(record)
    return Section(
        "Summary",
        tuple(_results(record)),
        (*((_head_table(record, named),) if named else ()), *((table,) if agreement else ())),
        tuple(unit_figures(record)),
        leading=True,
    )


def named_heads(record: Record) -> list[UnitRow]:
    """The heads without which the loss rises most, as many as the summary names."""
    return most_harmful_to_remove(heads_of(main_rows(record)), "head")[:_NAMED]


def _head_table(record: Record, named: Sequence[UnitRow]) -> Table:
    """What these heads do, and what breaks without them."""
    labels = {row.unit: label_of(record, row) for row in named}
    classes = {row.head: row for row in record.rows(BROKEN_CLASSES)}
    columns: dict[str, Callable[[UnitRow], Cell]] = {"head": lambda row: row.label}
    if any(labels.values()):
        columns["what it does"] = lambda row: None if (label := labels[row.unit]) is None else label.words
        columns["score"] = lambda row: None if (label := labels[row.unit]) is None else label.scores
    columns[f"rise of the loss, replaced by {REPLACED[main_replacement(record)]}"] = lambda row: row.loss
    columns["accuracy lost"] = lambda row: row.accuracy
    for name in record.options(AblateOptions).replace[1:]:
        others = {row.unit: row for row in rows_of(record, name)}
        columns[f"rise, replaced by {REPLACED[name]}"] = lambda row, others=others: others[row.unit].loss  # type: ignore[misc]
    if classes:
        columns["class whose loss rises most"] = lambda row: (
            None
            if (found := classes.get(row.unit)) is None
            else f"{found.class_name} ({number(found.delta_loss)} nats, n = {found.images})"
        )
    return Table.of("The heads that matter most: what they do, and what breaks without them", named, columns)


def input_sentences(record: Record) -> Iterator[Sentence]:
    """The images, their labels where these are predictions, and the reason for another replacement than the mean."""
    yield from data_sentences(record)
    yield from predicted_sentences(record.options(AblateOptions).predicted)
    for row in record.rows(NOTES):
        if row.about == "replacement":
            yield Sentence(f"{row.note}.", (row,))


def notes(record: Record) -> Iterator[Sentence]:
    """The remarks of the measurements."""
    for row in record.rows(NOTES):
        if row.about == "measurement":
            yield Sentence(f"Note: {row.note}.", (row,))


def _results(record: Record) -> Iterator[Sentence]:
    (alias,), rows = record.aliases, main_rows(record)
    right, loss = record.metric(ACCURACY(model=alias)), record.metric(CROSS_ENTROPY(model=alias))
    by = REPLACED[main_replacement(record)]
    heads = heads_of(rows)
    yield from _head_sentences(record, heads, images=right.n or 0)
    yield from _other_sentences(rows)
    yield Sentence(
        f"The unchanged model has a top-1 accuracy of {in_words(right)} and a mean cross-entropy of "
        f"{in_words(loss, with_n=False)}.",
        (right, loss),
    )
    yield Sentence(
        f"The output of each unit was replaced by {by}; the change of the loss is measured exactly, for every image.",
        says="setting",
    )
    if ranking_of(heads) is Ranking.SHOWN:
        for _, rho in record.all(RANK_CORRELATION):
            yield Sentence(
                f"The first-order estimate ranks the heads with a Spearman correlation of {rho.value:.2f} to the exact "
                "ranking.",
                (rho,),
            )
    yield from _cost_sentences(record, len(rows))
    yield from notes(record)


def _head_sentences(record: Record, heads: Sequence[UnitRow], *, images: int) -> Iterator[Sentence]:
    """How many heads have an effect; those that do, in order; without one, that there is no order."""
    if not heads:
        return
    ranking = ranking_of(heads)
    if ranking is Ranking.UNTESTED:
        yield Sentence(
            "With fewer than two images no interval and no test is defined. Heads are not ranked; the table below "
            "gives the measured effects.",
            tuple(heads),
        )
        return
    significant = [row for row in heads if row.matters]
    rise = sum(row.delta_loss > 0 for row in significant)
    yield Sentence(
        f"{len(significant)} of {len(heads)} heads have a significant effect on the loss after Holm's correction"
        + (
            f"; removing them raises the loss for {rise}, lowers it for {len(significant) - rise}."
            if significant
            else _UNRANKED
        ),
        tuple(heads),
    )
    if ranking is Ranking.NO_EFFECT and images < fewest_images(len(heads)):
        yield Sentence(
            f"With {images} images no effect of one of {len(heads)} heads, however large, can be significant: the test "
            f"needs at least {fewest_images(len(heads))} images.",
            (*heads, Estimate(float(images), unit=""), Estimate(float(fewest_images(len(heads))), unit="")),
        )
    most = named_heads(record)
    if most:
        listed = "; ".join(_named(record, row) for row in most)
        labels = [label for row in most if (label := label_of(record, row)) is not None]
        yield Sentence(f"The loss rises most without these heads: {listed}.", (*most, *labels))


def _named(record: Record, row: UnitRow) -> str:
    """A head with what it does and what its removal costs."""
    label = label_of(record, row)
    does = "" if label is None else f"{label.words}; "
    return f"{row.label} ({does}{in_words(row.loss, with_n=False)})"


_UNRANKED: Final = (
    ". Heads are therefore not ranked, and not removed in order or in pairs. This does not show that no head matters."
)


def _other_sentences(rows: Sequence[UnitRow]) -> Iterator[Sentence]:
    for kind, word in _KINDS.items():
        own = most_harmful_to_remove(rows, kind)[:1]
        for row in own:
            yield Sentence(
                f"Of the {word}s, removing that of layer {row.layer} raises the loss most: {in_words(row.loss)}.",
                (row,),
            )


def _cost_sentences(record: Record, units: int) -> Iterator[Sentence]:
    """The cost of the exact measurement, relative to a full forward pass for each unit."""
    cost = record.metrics.get(FORWARDS(model=record.aliases[0], what=main_replacement(record)))
    if cost is not None:
        each = Estimate(cost.value / units, unit="")
        yield Sentence(
            f"Measuring {units} units took {cost.value:.1f} forward passes per image (by operations of linear layers), "
            f"{each.value:.2f} passes per unit.",
            (cost, each, Estimate(float(units), unit="")),
        )
