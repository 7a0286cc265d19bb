"""What a run keeps for the attention explorer, as rows and 8-bit arrays; free of torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form


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
_Scales = NDArray[np.float32]


@dataclass(frozen=True)
class ExplorerArrays:
    """Attention weights in the bytes that a page has (report/html/packing.py), and each row's largest weights on the
    special tokens and on the patches.

    heads (whole, layers, heads, queries, keys), heads_most (whole, layers, heads, queries, 2): of the first images;
    means (n - whole, layers, queries, keys), means_most: over heads, of the others; rollout (n, layers, keys): through
    the layers so far.
    """

    heads: Annotated[_Bytes, Form("u", (None, None, None, None, None))]
    heads_most: Annotated[_Scales, Form("f", (None, None, None, None, 2))]
    means: Annotated[_Bytes, Form("u", (None, None, None, None))]
    means_most: Annotated[_Scales, Form("f", (None, None, None, 2))]
    rollout: Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None))]


LEVELS: Final = 255  # of a byte
