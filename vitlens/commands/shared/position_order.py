"""How well the similarity of position embeddings follows distance: the metric and its words; free of torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vitlens.records import MetricName

RANK_CORRELATION: Final = MetricName("positions/{model}/rank_correlation/{pairs}")
PAIRS: Final[Mapping[str, str]] = MappingProxyType(
    {"all": "all pairs", "rows": "pairs in one row", "columns": "pairs in one column"}
)
DEFINITION: Final = (
    "Rank correlation: Spearman's, of the cosine similarity of two patches' position embeddings with minus their "
    "distance; 1 where nearer patches are always more similar, 0 without such order."
)
