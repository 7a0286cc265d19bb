"""The record of `vitlens head`: three labels for one head, their tests, and the losses without the
head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.analysis.naming.rows import AttendsRow, LooksRow, OfHead, WritesRow
from vitlens.arrays import Pixels, Stack
from vitlens.commands.shared.names import NoteRow
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import LEVEL, Estimate


@dataclass(frozen=True)
class PartRow:
    """One product of query and key, and its share of the head's logits."""

    part: str = col("query to key")
    share: Estimate = col("share of the logits")


@dataclass(frozen=True, kw_only=True)
class PlacedRow(OfHead):
    """The share of the head's attention on the object, compared with the objects of other
    images."""

    thing: str = col("thing")  # the object, or the area in its place, in words
    on: Estimate = col("attention on it", metric="attention_on_thing/{model}/L{layer}.H{head}")
    elsewhere: Estimate = col("on that of other images")
    difference: Estimate = col("difference")
    p: float = col("p")

    @property
    def clear(self) -> bool:
        """Return True if the difference is significant."""
        return self.p <= LEVEL


@dataclass(frozen=True)
class ClassRow:
    """The losses of the images of one class or attribute without the head; at least 5 images."""

    name: str = col("class or attribute")
    images: int = col("images")
    lost: Estimate = col("accuracy lost")
    fall: Estimate = col("log-odds lost", term="fall of the log-odds of the label without the head")


@dataclass(frozen=True)
class PartnerRow:
    """Another head, and the loss without both heads beyond the sum of the losses without each."""

    partner: str = col("head")
    synergy: Estimate = col(
        "lost beyond the sum",
        term="rise of the loss without both heads, beyond the sum of the rises without each",
    )
    p: float = col("p")  # after Holm's correction


@dataclass(frozen=True)
class ModelRow(OfModel):
    """The number of heads whose labels were tested, and survived their test."""

    heads: int = col("heads")
    attends: int = col("attends by, tested")
    attends_hold: int = col("and hold")
    looks: int = col("looks at, tested")
    looks_hold: int = col("and hold on shuffled patches")
    matter: int = col("a class that matters")
    correlate: int = col("a class that only correlates")
    nothing: int = col("no class")
    several: int = col("no single class", default=0)


@dataclass(frozen=True)
class ExemplarRow:
    """An image, and what the head adds to the class that it separates best."""

    image: str = col("image")
    label: str | None = col("label")
    adds: float = col("adds to the class", unit="")
    quantile: float = col("more than this share of the images", unit="fraction")
    patch: tuple[int, int] | None = col("most through the patch (row, column)", default=None)
    patch_adds: float | None = col(
        "through it", unit="", default=None
    )  # what the head adds through that patch


@dataclass(frozen=True)
class PushedRow:
    """A class, and what the head adds to its logit; a class with a negative value is suppressed."""

    name: str = col("class")
    adds: Estimate = col(
        "added to its logit", term="direct contribution beyond the mean of all classes"
    )


@dataclass(frozen=True)
class HeadArrays:
    """The exemplars with their maps.

    A map is what the head adds to its class through each patch, signed. If that is not known, it is
    the head's attention on the patches, from CLS or averaged over the patches.
    """

    images: Pixels
    maps: Stack  # (images, rows, columns)


@dataclass(frozen=True, kw_only=True)
class HeadRecord(Record):
    """One head with three tested labels."""

    attends: tuple[AttendsRow, ...] = table()
    parts: tuple[PartRow, ...] = table()
    looks: tuple[LooksRow, ...] = table()
    placed: tuple[PlacedRow, ...] = table()
    writes: tuple[WritesRow, ...] = table()
    classes: tuple[ClassRow, ...] = table()
    pushed: tuple[PushedRow, ...] = table()
    partners: tuple[PartnerRow, ...] = table()
    heads: tuple[ModelRow, ...] = table()
    exemplars: tuple[ExemplarRow, ...] = table()
    notes: tuple[NoteRow, ...] = table()
    shown: Mapping[str, HeadArrays] = arrays("head-{model}")
