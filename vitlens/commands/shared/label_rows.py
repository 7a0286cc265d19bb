"""The three labels of every head as rows, which reports of several commands show; free of torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vitlens.analysis.naming.words import CORRELATES, MATTERS, describe_labels, names_one, plain
from vitlens.record import OfModel, col, head_name
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class NameRow(OfModel):
    """Three tested labels for one head.

    share: the share of the attention logits.
    holds, looks_hold: True if the first and the second label hold on shuffled patches.
    state: result of removing the head for the third label, None if nothing was removed.
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
    state: str | None = col("without the head", default=None)
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
        pattern = names_one(self.looks) and bool(self.looks_hold)
        return bool(self.holds) or pattern or self.state == MATTERS

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


def name_rows(alias: str, heads: Iterable[Any]) -> Iterator[NameRow]:
    """Yield a row for each `HeadName`."""
    for name in heads:
        labels: dict[str, Any] = {}
        if name.attends:
            labels |= {
                "attends": plain(name.attends.word),
                "share": name.attends.share,
                "holds": name.holds,
            }
        if name.looks:
            labels |= {"looks": plain(name.looks.word), "looks_hold": name.looks.holds}
        if name.writes:
            writes = name.writes
            labels |= {
                "writes": writes.word,
                "auc": writes.auc,
                "state": writes.state,
                "margin": writes.margin,
            }
        yield NameRow(alias, name.layer, name.head, **labels)


def word_table(heads: Iterable[Any]) -> list[list[str]]:
    """Return the labels of each head, of a NameRow or `HeadName`, by layer and head."""
    words = {(name.layer, name.head): name.words for name in heads}
    layers = 1 + max((layer for layer, _ in words), default=-1)
    most_heads = 1 + max((head for _, head in words), default=-1)
    table = []
    for layer in range(layers):
        table.append([words.get((layer, head), "") for head in range(most_heads)])
    return table
