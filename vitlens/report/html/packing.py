"""Attention weights as the page holds them: one byte a weight, deflated, in base64.

A row of attention weights has a few large values and many tiny ones, so bytes hold the square root of each weight's
share of a maximum of the row: w = m * (byte / levels)^2. Special tokens and patches have a maximum each, in float32, as
CLS often takes most of a row and would leave the patches a few steps. The largest error is about m / levels, at the
largest weights, and falls with the square root of the weight.
"""

import zlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.report.explorer import Explorer, averaged, block_starts

BUDGET: Final = 7_500_000  # bytes of base64 for all weights of a page
_ONE: Final = 5_700_000  # of one image
# measured on DeiT-tiny's attention: bytes that a weight takes deflated, by the number of levels
_DEFLATED: Final = {255: 0.80, 191: 0.75, 127: 0.68, 63: 0.56, 31: 0.44}
_BASE64: Final = 4 / 3


@dataclass(frozen=True)
class Detail:
    """How finely weights are kept: levels of a byte, and the most rows and columns of queries and of keys."""

    levels: int = 255
    queries: int = 1000
    keys: int = 1000


_PLANS: Final = (  # the detail of weights by head, and of layer means, which a page shows for its other images
    (Detail(255), Detail(255)),
    (Detail(255), Detail(127, 7)),
    (Detail(191), Detail(127, 7)),
    (Detail(127), Detail(127, 7)),
    (Detail(127), Detail(63, 7)),
    (Detail(63), Detail(63, 7)),
    (Detail(63), Detail(31, 5)),
    (Detail(63, 10), Detail(31, 5)),
    (Detail(63, 7), Detail(31, 5)),
    (Detail(63, 7, 28), Detail(31, 5, 28)),
    (Detail(63, 7, 14), Detail(31, 5, 14)),
    (Detail(31, 5, 10), Detail(31, 5, 10)),
)


@dataclass(frozen=True)
class Packed:
    """Weights (layers, heads, queries, keys) in base64; queries, keys: their grids after the special tokens.

    error: the largest one of this packing, as a share of the largest weight of its row.
    """

    data: str
    layers: int
    heads: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    levels: int
    error: float


def packed_explorer(explorer: Explorer, *, budget: int = BUDGET) -> tuple[Packed | None, ...]:
    """Return the weights of each image, of its heads or its layer means; None where it has neither.

    They are packed by the finest plan with which they take at most `budget` bytes, or by the coarsest.
    """
    for plan in _PLANS[:-1]:
        if _fits(list(_expected(explorer, plan)), budget):
            done = tuple(_by_plan(explorer, plan))
            if _fits([len(each.data) for each in done if each is not None], budget):
                return done
    return tuple(_by_plan(explorer, _PLANS[-1]))


def _by_plan(explorer: Explorer, plan: tuple[Detail, Detail]) -> Iterator[Packed | None]:
    special, (heads, means) = len(explorer.special), plan
    for image in explorer.images:
        if image.weights is not None:
            yield packed(image.weights, special, explorer.queries, explorer.keys, heads)
        elif image.layer_weights is not None:
            one_head = image.layer_weights[:, None]
            yield replace(packed(one_head, special, explorer.queries, explorer.keys, means), heads=0)
        else:
            yield None


def _fits(sizes: list[float], budget: int) -> bool:
    return sum(sizes) <= budget and max(sizes, default=0) <= _ONE


def _expected(explorer: Explorer, plan: tuple[Detail, Detail]) -> Iterator[float]:
    """Bytes of base64 that the weights of each image are expected to take."""
    for image in explorer.images:
        weights = image.weights if image.weights is not None else image.layer_weights
        if weights is not None:
            detail = plan[image.weights is None]
            rows = _tokens(explorer.queries, detail.queries, len(explorer.special))
            columns = _tokens(explorer.keys, detail.keys, len(explorer.special))
            maps = np.prod(weights.shape[:-2], dtype=np.int64)
            yield float(maps) * rows * (columns * _DEFLATED[detail.levels] + 8) * _BASE64


def _tokens(grid: tuple[int, int], most: int, special: int) -> int:
    return special + min(grid[0], most) * min(grid[1], most)


def packed(
    weights: NDArray[np.floating],
    special: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    detail: Detail = Detail(),
) -> Packed:
    """Weights (layers, heads, queries, keys) packed; a value that is not finite counts as 0.

    Queries beyond the detail are averaged over blocks, keys added up, so that rows keep their sum.
    """
    fewer, query_grid = averaged(weights, special, queries, detail.queries)
    fewer, key_grid = _with_fewer_keys(np.nan_to_num(fewer.astype(np.float32)), special, keys, detail.keys)
    bytes_, maxima = quantised(fewer, special, detail.levels)
    back = restored(bytes_, maxima, special, detail.levels)
    largest = maxima.max(axis=-1)
    above = largest > 0
    error = np.abs(back - fewer).max(axis=-1)[above] / largest[above]
    data = in_base64(zlib.compress(maxima.astype("<f4").tobytes() + bytes_.tobytes(), 6))
    layers, heads = fewer.shape[:2]
    return Packed(data, layers, heads, query_grid, key_grid, detail.levels, float(error.max(initial=0.0)))


def quantised(rows: NDArray[np.floating], special: int, levels: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows (..., keys) as bytes from 0 to `levels`; and their maxima (..., 2), of special tokens and of patches."""
    parts = [np.clip(part, 0, None) for part in (rows[..., :special], rows[..., special:])]
    maxima = np.stack([part.max(axis=-1, initial=0) for part in parts], axis=-1).astype(np.float32)
    shares = [part / np.where(most > 0, most, 1)[..., None] for part, most in zip(parts, np.moveaxis(maxima, -1, 0))]
    return np.round(np.sqrt(np.concatenate(shares, axis=-1)) * levels).clip(0, levels).astype(np.uint8), maxima


def restored(bytes_: NDArray[np.uint8], maxima: NDArray[np.float32], special: int, levels: int) -> NDArray[np.float32]:
    """Return the weights that the page computes from bytes and maxima of rows."""
    of = np.repeat(maxima, (special, bytes_.shape[-1] - special), axis=-1)
    return np.asarray((bytes_ / np.float32(levels)) ** 2 * of, dtype=np.float32)


def _with_fewer_keys(
    weights: NDArray[np.float32], special: int, grid: tuple[int, int], most: int
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """Return the keys added up over blocks of patches."""
    smaller = min(grid[0], most), min(grid[1], most)
    if smaller == grid:
        return weights, grid
    patches = weights[..., special:].reshape(*weights.shape[:-1], *grid)
    for axis, blocks in zip((-2, -1), smaller):
        patches = np.add.reduceat(patches, block_starts(patches.shape[axis], blocks), axis=axis)
    flat = patches.reshape(*weights.shape[:-1], smaller[0] * smaller[1])
    return np.concatenate([weights[..., :special], flat], axis=-1), smaller


def in_base64(content: bytes) -> str:
    """Bytes in base64."""
    return b64encode(content).decode()
