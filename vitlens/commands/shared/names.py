"""The three labels of every head as rows, which reports of several commands show; free of torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vitlens.analysis.naming.words import CORRELATES, MATTERS, names_one, plain, three_words
from vitlens.record import OfModel, col, head_name
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class NameRow(OfModel):
    """Three tested labels for one head. share: of the attention logits; holds,
    looks_hold: whether the first two words hold on shuffled patches; state: what removing the head said of the third,
    None where nothing was removed."""

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
        term="the chance that the head adds more to the class in an image of it than in another image",
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
        return three_words(self.attends, self.holds, self.looks, self.looks_hold, self.writes, self.state)

    @property
    def tested(self) -> bool:
        """Return True if one of its words was tested and holds; "uniform" and "dead" are no such words."""
        pattern = names_one(self.looks) and bool(self.looks_hold)
        return bool(self.holds) or pattern or self.state == MATTERS

    @property
    def correlates(self) -> bool:
        """Return True if no label survived its test, and what the head adds only correlates with a class."""
        return not self.tested and self.state == CORRELATES


@dataclass(frozen=True)
class NoteRow:
    """A label that could not be given or tested, and why."""

    note: str = col("note")


def noted(rows: Iterable[NoteRow]) -> Iterator[str]:
    """Yield notes as sentences of the first page."""
    yield from (f"{row.note[0].upper()}{row.note[1:].rstrip('.')}." for row in rows)


def name_rows(alias: str, heads: Iterable[Any]) -> Iterator[NameRow]:
    """Yield a row for each `HeadName`."""
    for one in heads:
        attends = one.attends
        looks = one.looks
        writes = one.writes
        yield NameRow(
            alias,
            one.layer,
            one.head,
            *((plain(attends.word), attends.share, one.holds) if attends else (None, None, None)),
            *((plain(looks.word), looks.holds) if looks else (None, None)),
            *((writes.word, writes.auc, writes.state, writes.margin) if writes else (None, None, None, None)),
        )


def word_table(heads: Iterable[Any]) -> list[list[str]]:
    """Return the labels of each head, of a NameRow or `HeadName`, by layer and head."""
    known = {(one.layer, one.head): one.words for one in heads}
    layers, most = (1 + max((at[axis] for at in known), default=-1) for axis in (0, 1))
    return [[known.get((layer, head), "") for head in range(most)] for layer in range(layers)]
