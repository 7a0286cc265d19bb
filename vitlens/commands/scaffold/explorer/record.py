"""What a run keeps for the attention explorer, as rows and 8-bit arrays; free of torch."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, TableOf


@dataclass(frozen=True)
class ExplorerRow:
    """One model. reason: why there is no explorer of it, "" where there is one.

    keys, queries: grids (rows, columns) of the patches that are looked at, and of those that look (fewer where they
    were pooled); special: the tokens before the patches; images: their number, of the first `whole` with every head.
    """

    model: str
    reason: str = ""
    keys: tuple[int, int] = (0, 0)
    queries: tuple[int, int] = (0, 0)
    special: tuple[str, ...] = ()
    images: int = 0
    whole: int = 0


_Bytes = NDArray[np.uint8]
_Scales = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class ExplorerArrays:
    """Attention weights, each row as shares of its largest weight in 255ths, and that weight.

    heads (whole, layers, heads, queries, keys), heads_most (whole, layers, heads, queries): of the first images; means
    (n - whole, layers, queries, keys), means_most: over heads, of the others; rollout (n, layers, keys): through the
    layers so far.
    """

    heads: Annotated[_Bytes, Form("u", (None, None, None, None, None))]
    heads_most: Annotated[_Scales, Form("f", (None, None, None, None))]
    means: Annotated[_Bytes, Form("u", (None, None, None, None))]
    means_most: Annotated[_Scales, Form("f", (None, None, None))]
    rollout: Annotated[_Scales, Form("f", (None, None, None))]


EXPLORER = TableOf("explorer", ExplorerRow, optional=True)
EXPLORER_ARRAYS = ArraysOf("explorer-{model}", ExplorerArrays)


def packed(weights: NDArray[np.floating[Any]]) -> tuple[_Bytes, NDArray[np.float16]]:
    """Weights (..., queries, keys) in 8 bits, and the largest of each row: an error of at most 0.2 % of that."""
    most = weights.max(-1, initial=0.0, keepdims=True).astype(np.float16)
    shares = weights / np.where(most > 0, most, 1).astype(np.float32)
    return np.rint(255 * np.clip(shares, 0, 1)).astype(np.uint8), most[..., 0]


def unpacked(shares: _Bytes, most: _Scales) -> NDArray[np.float32]:
    """The weights again."""
    return shares * (most[..., None].astype(np.float32) / 255)
