"""What `vitlens head` records: the words for one head, their tests, and what the images lose without it."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.arrays import Pixels, Stack
from vitlens.commands.shared.names import NoteRow
from vitlens.record import OfModel, Record, arrays, col, head_name, table
from vitlens.uncertainty import LEVEL, Estimate


@dataclass(frozen=True, kw_only=True)
class OfHead(OfModel):
    """A row about one head."""

    layer: int = col("layer")
    head: int = col("head")

    name = head_name


@dataclass(frozen=True, kw_only=True)
class AttendsRow(OfHead):
    """By what the head attends. word: None where no product has most of the logits; share: of `best`; next_share: of
    the product after it; spread: of the logits of a row; stays: by how much better they agree with what the word says,
    on its least certain side, when the patches are shuffled; holds: whether they do so after Holm's correction."""

    word: str = col("attends by")
    best: str = col("largest part")
    share: Estimate = col(
        "share of the logits",
        term="the share of the variance of the attention logits over the keys of a row",
        metric="attends/{model}/L{layer}.H{head}",
    )
    next: str = col("next part")
    next_share: float = col("next share", unit="fraction")
    spread: float = col("spread of the logits", unit="nats")
    stays: Estimate | None = col(
        "on shuffled patches",
        term="correlation of the logits of shuffled images with what the word says, minus that with what it excludes",
        default=None,
    )
    holds: bool | None = col("holds", default=None)


@dataclass(frozen=True)
class PartRow:
    """One product of query and key, and its share of the head's logits."""

    part: str = col("query to key")
    share: Estimate = col("share of the logits")


@dataclass(frozen=True, kw_only=True)
class LooksRow(OfHead):
    """What the head looks at; moved: the score on images whose patches, and masks, are shuffled."""

    word: str = col("looks at")
    score: Estimate = col("score", term="the share of the information in a head's attention that the pattern explains")
    moved: Estimate | None = col("on shuffled patches", default=None)
    holds: bool | None = col("holds", default=None)


@dataclass(frozen=True, kw_only=True)
class PlacedRow(OfHead):
    """How much of the head's attention on patches lies on the thing of an image. thing: in words; on, elsewhere: of its
    attention, on the thing of this image and of other images, the mean; difference: of both, a mean over images; p:
    that there is none."""

    thing: str = col("thing")
    on: Estimate = col("attention on it", metric="attention_on_thing/{model}/L{layer}.H{head}")
    elsewhere: Estimate = col("on that of other images")
    difference: Estimate = col("difference")
    p: float = col("p")

    @property
    def clear(self) -> bool:
        """Return True if the images show a difference."""
        return self.p <= LEVEL


@dataclass(frozen=True, kw_only=True)
class WritesRow(OfHead):
    """What the head writes. word: None where the AUC of no class or attribute is above chance, or those of too many are
    equally high; alike: the best and those whose AUC is not significantly lower; control: the largest AUC of any head
    when the labels are permuted; state: whether that is shown to matter."""

    word: str | None = col("writes")
    best: str = col("best told")
    auc: Estimate = col(
        "AUC",
        term="the chance that the head adds more to the class in an image of it than in another image",
        metric="writes/{model}/L{layer}.H{head}",
    )
    control: float = col("AUC with permuted labels", unit="")
    state: str = col("without the head")
    lost: Estimate | None = col("its images lose", default=None)
    others_lost: Estimate | None = col("others lose", default=None)
    margin: Estimate | None = col(
        "more log-odds lost",
        term="by how much the log-odds of the label fall more in images of the class",
        default=None,
    )
    p: float | None = col("p", default=None)
    alike: tuple[str, ...] = col("AUC not significantly below the best", default=())


@dataclass(frozen=True)
class ClassRow:
    """What the images of one class, or with one attribute, lose without the head; of at least 5 images."""

    name: str = col("class or attribute")
    images: int = col("images")
    lost: Estimate = col("accuracy lost")
    fall: Estimate = col("log-odds lost", term="how much the log-odds of the label fall without the head")


@dataclass(frozen=True)
class PartnerRow:
    """Another head, by what is lost without both beyond what is lost without each; p after Holm's correction."""

    partner: str = col("head")
    synergy: Estimate = col(
        "lost beyond the sum", term="the rise of the loss without both heads, beyond the sum of the rises without each"
    )
    p: float = col("p")


@dataclass(frozen=True)
class ModelRow(OfModel):
    """How many heads of the model have words that stand their test."""

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
    """An image by how much the head adds to the class that it tells best; quantile: its place among all images; patch:
    (row, column) of the patch through which it adds most, patch_adds: so much of it; None where that is not known."""

    image: str = col("image")
    label: str | None = col("label")
    adds: float = col("adds to the class", unit="")
    quantile: float = col("more than this share of the images", unit="fraction")
    patch: tuple[int, int] | None = col("most through the patch (row, column)", default=None)
    patch_adds: float | None = col("through it", unit="", default=None)


@dataclass(frozen=True)
class PushedRow:
    """A class by what the head adds to its logit beyond the mean of all classes: pushed, or suppressed where it is
    negative."""

    name: str = col("class")
    adds: Estimate = col("added to its logit", term="beyond what it adds to the mean of all classes, directly")


@dataclass(frozen=True)
class HeadArrays:
    """images: the exemplars; maps (images, rows, columns): what the head adds to its class through each patch, signed;
    where that is not known its attention on the patches, from CLS, or a mean over the patches."""

    images: Pixels
    maps: Stack


@dataclass(frozen=True, kw_only=True)
class HeadRecord(Record):
    """One head, in words that were tested."""

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
