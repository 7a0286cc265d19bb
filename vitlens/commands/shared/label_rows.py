"""The three labels of every head as rows, which reports of several commands show; free of torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vitlens.analysis.naming.words import (
    CORRELATES,
    MATTERS,
    NOTHING,
    SEVERAL,
    describe_labels,
    names_one,
    plain,
)
from vitlens.record import OfModel, col, head_name
from vitlens.report.prose import listed, say
from vitlens.uncertainty import Estimate

# clauses about the heads or latents with a state, of which {{ n }} is the number
_REST: Final = {
    CORRELATES: "{{ n }} only correlate{{ 's' if n == 1 }} with a class",
    SEVERAL: "{{ n }} separate{{ 's' if n == 1 }} several classes equally well",
    NOTHING: "{{ n }} separate{{ 's' if n == 1 }} none",
}


@dataclass(frozen=True)
class NameRow(OfModel):
    """Three tested labels for one head: what it attends by, looks at and writes.

    attends: the first label, the component that determines the attention; None if not given.
    share: the share of the attention logits that this component explains.
    holds: True if the first label holds on shuffled patches.
    looks: the second label, the pattern of the attention; None if not given.
    looks_hold: True if the second label holds on shuffled patches.
    writes: the third label, the class or attribute that the head adds to; None if not given.
    auc: how well the head's output separates images of this class from others.
    state: the result of removing the head, None if it was not removed.
    margin: how much more the log-odds fall without the head in images of the class.
    """

    layer: int = col("layer")
    head: int = col("head")
    attends: str | None = col("attends by", default=None)
    share: Estimate | None = col("share of the logits", default=None)
    holds: bool | None = col("holds on shuffled patches", default=None)
    looks: str | None = col("looks at", default=None)
    looks_hold: bool | None = col("that holds, too", default=None)
    writes: str | None = col("writes", default=None)
    auc: Estimate | None = col(
        "AUC",
        term="the chance that the head adds more to the class in an image of it than in another "
        "image",
        default=None,
    )
    state: str | None = col("test of what it writes", default=None)
    margin: Estimate | None = col(
        "more log-odds lost",
        term="by how much the log-odds of the label fall more in images of the class",
        default=None,
    )

    name = head_name

    @property
    def words(self) -> str:
        """Return all three labels in one line."""
        return describe_labels(
            self.attends, self.holds, self.looks, self.looks_hold, self.writes, self.state
        )

    @property
    def tested(self) -> bool:
        """Return True if one label was tested and holds; "uniform" and "dead" are not tested."""
        pattern_holds = names_one(self.looks) and bool(self.looks_hold)
        return bool(self.holds) or pattern_holds or self.state == MATTERS

    @property
    def correlates(self) -> bool:
        """Return True if no label survived its test, and what the head adds only correlates with a
        class.
        """
        return not self.tested and self.state == CORRELATES


@dataclass(frozen=True)
class NoteRow:
    """A label that could not be given or tested, and why."""

    note: str = col("note")


def note_sentences(rows: Iterable[NoteRow]) -> Iterator[str]:
    """Yield notes as sentences of the first page."""
    for row in rows:
        yield f"{row.note[0].upper()}{row.note[1:].rstrip('.')}."


def rest_words(rest: Mapping[str, int]) -> str:
    """Return how many of the other heads or latents have each result.

    An example is "2 only correlate with a class". It is "" without any.

    rest: the number of them by the state of the label, which is CORRELATES, SEVERAL or NOTHING.
    """
    clauses = []
    for state, clause in _REST.items():
        count = rest.get(state, 0)
        if count:
            clauses.append(say(clause, n=count))
    return listed(clauses) if clauses else ""


def name_rows(alias: str, heads: Iterable[Any]) -> Iterator[NameRow]:
    """Yield a row for each head.

    heads: `HeadName` of analysis.naming.labels, which needs torch.
    """
    for name in heads:
        row = NameRow(alias, name.layer, name.head)
        if name.attends:
            row = replace(
                row,
                attends=plain(name.attends.word),
                share=name.attends.share,
                holds=name.holds,
            )
        if name.looks:
            row = replace(row, looks=plain(name.looks.word), looks_hold=name.looks.holds)
        if name.writes:
            row = replace(
                row,
                writes=name.writes.word,
                auc=name.writes.auc,
                state=name.writes.state,
                margin=name.writes.margin,
            )
        yield row


def word_table(heads: Iterable[Any]) -> list[list[str]]:
    """Return the labels of every head by layer and head, "" for a head that is not given.

    heads: NameRow or `HeadName`.
    """
    words_of_head = {(name.layer, name.head): name.words for name in heads}
    # -1: without heads, the table is empty
    layers = 1 + max((layer for layer, _ in words_of_head), default=-1)
    most_heads = 1 + max((head for _, head in words_of_head), default=-1)
    table = []
    for layer in range(layers):
        table.append([words_of_head.get((layer, head), "") for head in range(most_heads)])
    return table
