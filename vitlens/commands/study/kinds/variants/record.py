"""The record of a study of small models that differ in one factor."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.arrays import Matrix, Pixels
from vitlens.commands.shared.receptive import FieldArrays, FieldRow
from vitlens.commands.study.kinds.record import KindRecord, OfVariant
from vitlens.record import arrays, col, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class PositionRow(OfVariant):
    """How well the similarity of position embeddings follows the distance of their patches, over
    the trained seeds.

    all, rows, columns: over all pairs of patches, over those in one row and over those in one
        column.
    before: over all pairs before training.
    """

    seeds: int = col("seeds")
    all: Estimate | None = col(
        "all pairs",
        term="Spearman's rank correlation of the cosine similarity of two patches' position "
        "embeddings with minus their distance: 1 where nearer patches are always more similar, 0 "
        "without such order",
        metric="positions/{label}/rank_correlation/all",
        default=None,
    )
    rows: Estimate | None = col(
        "pairs in one row", metric="positions/{label}/rank_correlation/rows", default=None
    )
    columns: Estimate | None = col(
        "pairs in one column", metric="positions/{label}/rank_correlation/columns", default=None
    )
    before: float | None = col("all pairs, before training", default=None)


@dataclass(frozen=True)
class SinkRow(OfVariant):
    """Outlying tokens of a variant, means over layers, heads and test images, then over seeds.

    high_norm: patches of an image whose norm is an outlier.
    sink_mass, register_mass: the share of the patches' attention on keys that all of them prefer,
        and on registers.
    """

    high_norm: Estimate = col("high-norm patches", metric="high_norm_patches/{label}")
    sink_mass: Estimate = col("mass on sinks", metric="sink_mass/{label}")
    register_mass: Estimate = col("mass on registers", metric="register_mass/{label}")


@dataclass(frozen=True)
class CutArrays:
    """An image that the report shows as the patches of each variant.

    image: the first test image (1, 3, height, width).
    """

    image: Pixels


@dataclass(frozen=True)
class OrderArrays:
    """Cosine similarities of position embeddings, after the training with the first seed.

    similarity: of each pair of patches (patches, patches), by the variant's row in the table of
        points; variants without position embeddings are left out.
    """

    similarity: Mapping[int, Matrix]


@dataclass(frozen=True, kw_only=True)
class VariantsRecord(KindRecord):
    """A comparison of small models that differ in one factor; most fields are for some factors."""

    receptive_fields: tuple[FieldRow, ...] = table()
    position_order: tuple[PositionRow, ...] = table()
    sinks: tuple[SinkRow, ...] = table()
    cut: CutArrays | None = arrays("cut")
    field_maps: FieldArrays | None = arrays("receptive_fields")
    position_similarity: OrderArrays | None = arrays("position_similarity")
