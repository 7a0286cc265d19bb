"""The record of `vitlens head`: three labels for one head, their tests, and losses without it."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.analysis.naming.rows import AttendsRow, LooksRow, OfHead, WritesRow
from vitlens.arrays import Flags, Indices, Matrix, Pixels, Stack
from vitlens.commands.shared.label_rows import NoteRow
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import LEVEL, Estimate


@dataclass(frozen=True)
class PartRow:
    """One product of query and key, and its share of the head's logits."""

    part: str = col("query to key")
    share: Estimate = col("share of the logits")


@dataclass(frozen=True, kw_only=True)
class PlacedRow(OfHead):
    """The share of the head's attention on the object, compared with the objects of other images.

    Without masks, patches with evidence for the class stand for the object.

    thing: the object, or what stands for it, in words.
    on: the share of attention on the object of the same image.
    elsewhere: the share on the places of the objects of the other images, mean over these.
    difference: `on` minus `elsewhere`, in points.
    """

    thing: str = col("thing")
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
    """Another head, and the rise of the loss without both beyond the sum of the rises without each.

    p: the p-value, after Holm's correction.
    """

    partner: str = col("head")
    synergy: Estimate = col(
        "lost beyond the sum",
        term="rise of the loss without both heads, beyond the sum of the rises without each",
    )
    p: float = col("p")


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
    """An image, and what the head adds to the logit of the class that it separates best.

    quantile: the share of the images to whose class logit the head adds less.
    patch: the patch through which it adds most, None if that is not known.
    patch_adds: what it adds through that patch.
    """

    image: str = col("image")
    label: str | None = col("label")
    adds: float = col("adds to the class", unit="")
    quantile: float = col("more than this share of the images", unit="fraction")
    patch: tuple[int, int] | None = col("most through the patch (row, column)", default=None)
    patch_adds: float | None = col("through it", unit="", default=None)


@dataclass(frozen=True)
class PushedRow:
    """A class, and what the head adds to its logit; a class with a negative value is suppressed."""

    name: str = col("class")
    adds: Estimate = col(
        "added to its logit", term="direct contribution beyond the mean of all classes"
    )


@dataclass(frozen=True, kw_only=True)
class PairRow(OfHead):
    """The score of one query and one key on one image, and the weight without some dimensions.

    query, key: the two tokens in words.
    query_patch, key_patch: their row and column, None for a token before the patches.
    grid: rows and columns of patches.
    bias: the part of the score that is a bias.
    weight: the attention weight.
    dropped: the number of dimensions, those with the largest products, that are set to zero.
    without: the weight without them.
    control: the mean weight without as many others, None if there are too few others.
    """

    image: str = col("image")
    query: str = col("query")
    key: str = col("key")
    query_patch: tuple[int, int] | None = None
    key_patch: tuple[int, int] | None = None
    grid: tuple[int, int] = (1, 1)
    score: float = col("score")
    bias: float = col("of it bias")
    weight: float = col("weight", unit="fraction")
    dropped: int = col("dimensions")
    without: float = col("weight without them", unit="fraction")
    control: float | None = col("weight without as many others", unit="fraction", default=None)


@dataclass(frozen=True)
class DimensionRow:
    """One dimension of the pair's score."""

    dimension: int = col("dimension")
    query: float = col("query")
    key: float = col("key")
    product: float = col("query × key / √d")


@dataclass(frozen=True, kw_only=True)
class SpaceRow(OfHead):
    """Queries and keys of the head as points in one plane.

    tokens: the number of tokens, each of which has a query and a key.
    before: the correlation of distance and score for the raw queries and keys.
    after: the correlation in the space from which the map is made.
    near: the share of queries with the key of the largest score among the nearest tenth of keys.
    """

    tokens: int = col("tokens")
    before: float = col("correlation of distance and score, as they are")
    after: float = col(
        "correlation of distance and score",
        term="Pearson's correlation over the keys of a query, in the space from which the map is "
        "made: -1 if a key with a larger score is always nearer",
    )
    near: Estimate | None = col(
        "key with the largest score among the nearest tenth",
        term="share of queries; by chance a tenth",
        default=None,
    )
    trustworthiness: float = col("trustworthiness of the map")


@dataclass(frozen=True)
class SpaceArrays:
    """Queries and keys as points in two planes: a map of this head, and a map of all heads.

    own (n, 2), own_is_key (n,): the points of the map of this head; True for keys.
    every (m, 2), every_is_key (m,): the points of the map of all heads; True for keys.
    every_layer (m,): the layer of each point of the second map.
    every_is_own (m,): True for points of this head.
    """

    own: Matrix
    own_is_key: Flags
    every: Matrix
    every_is_key: Flags
    every_layer: Indices
    every_is_own: Flags


@dataclass(frozen=True)
class PairArrays:
    """The image of the pair."""

    pixels: Pixels  # (1, 3, height, width)


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
    """One head with three tested labels.

    attends, looks, writes: the three labels, one row each; none for a label that was not given.
    parts: the shares of the head's logits by product of query and key.
    placed: its attention on the object.
    classes: losses by class without it.
    pushed: what it adds to the logits.
    partners: losses without it and another head.
    heads: how many heads of the model have tested labels.
    exemplars: images at quantiles of what it adds.
    pair, dimensions, pair_image: the score of one query and key.
    space, space_maps: the map of queries and keys.
    shown: the maps of the exemplars.
    """

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
    pair: tuple[PairRow, ...] = table()
    dimensions: tuple[DimensionRow, ...] = table()
    space: tuple[SpaceRow, ...] = table()
    space_maps: SpaceArrays | None = arrays("query_key")
    pair_image: PairArrays | None = arrays("pair")
    shown: Mapping[str, HeadArrays] = arrays("head-{model}")
