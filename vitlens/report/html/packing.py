"""Attention weights as the page holds them: one byte per weight, deflated, in base64.

A row of attention weights has a few large values and many tiny ones. So a byte holds the square
root of a weight w as a share of a maximum m: w = m * (byte / levels)^2. The maxima are in float32.
A row has two of them, one for special tokens and one for patches: CLS often has most of a row, and
would leave only a few steps to the patches. The largest error is about m / levels, at the largest
weights, and falls with the square root of the weight.

Queries and keys have COMPONENT_STEPS steps to either side of 0, up to the largest component of
their vector. The 255 steps of a byte would change weights by some per cent.
"""

import zlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitlens.report.explorer import Explorer, averaged, block_starts

BUDGET: Final = 7_500_000  # bytes of base64 for all weights of a page
_BUDGET_OF_IMAGE: Final = 5_700_000  # bytes of base64 for the weights of one image
# bytes of a deflated weight by the number of levels, measured on DeiT-tiny's attention
_DEFLATED: Final = {255: 0.80, 191: 0.75, 127: 0.68, 63: 0.56, 31: 0.44}
_MAXIMA: Final = 8  # bytes of the two maxima of a row
_BASE64: Final = 4 / 3  # bytes of base64 per byte
_COMPRESSION: Final = 6  # level of zlib, its default between speed and size
VECTORS: Final = 2_000_000  # bytes of base64 for all queries and keys of a page
COMPONENT_STEPS: Final = 1023


@dataclass(frozen=True)
class Detail:
    """The resolution of packed weights.

    levels: the largest value of a byte.
    queries: the most rows, and the most columns, of the grid of queries.
    keys: the most rows, and the most columns, of the grid of keys.
    """

    levels: int = 255
    queries: int = 1000
    keys: int = 1000


class _Plan(NamedTuple):
    """The detail of all weights of a page.

    heads: the detail of the weights of heads.
    means: the detail of layer means, which a page shows for images without weights of heads.
    """

    heads: Detail
    means: Detail


_PLANS: Final = (  # from fine to coarse; Detail(levels, queries, keys)
    _Plan(Detail(255), Detail(255)),
    _Plan(Detail(255), Detail(127, 7)),
    _Plan(Detail(191), Detail(127, 7)),
    _Plan(Detail(127), Detail(127, 7)),
    _Plan(Detail(127), Detail(63, 7)),
    _Plan(Detail(63), Detail(63, 7)),
    _Plan(Detail(63), Detail(31, 5)),
    _Plan(Detail(63, 10), Detail(31, 5)),
    _Plan(Detail(63, 7), Detail(31, 5)),
    _Plan(Detail(63, 7, 28), Detail(31, 5, 28)),
    _Plan(Detail(63, 7, 14), Detail(31, 5, 14)),
    _Plan(Detail(31, 5, 10), Detail(31, 5, 10)),
)


@dataclass(frozen=True)
class Packed:
    """Weights (layers, heads, queries, keys) in base64.

    data: the maxima of all rows, then the bytes of all weights; deflated, in base64.
    layers: the number of layers.
    heads: the number of heads, 0 for means over heads.
    queries, keys: the grids (rows, columns) of patches after the special tokens.
    levels: the largest value of a byte.
    error: the largest error of a weight, as a share of the largest weight of its row.
    """

    data: str
    layers: int
    heads: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    levels: int
    error: float


def packed_explorer(explorer: Explorer, *, budget: int = BUDGET) -> tuple[Packed | None, ...]:
    """Return the weights of each image: of its heads, or layer means, or None if it has neither.

    They are packed by the finest plan that needs at most `budget` bytes, else by the coarsest.
    """
    for plan in _PLANS[:-1]:
        # the expected sizes are checked first, because packing takes long
        if _fits(list(_expected_sizes(explorer, plan)), budget):
            weights = tuple(_by_plan(explorer, plan))
            if _fits([len(packed.data) for packed in weights if packed is not None], budget):
                return weights
    return tuple(_by_plan(explorer, _PLANS[-1]))


def _by_plan(explorer: Explorer, plan: _Plan) -> Iterator[Packed | None]:
    special = len(explorer.special)
    for image in explorer.images:
        if image.weights is not None:
            yield pack(image.weights, special, explorer.queries, explorer.keys, plan.heads)
        elif image.layer_weights is not None:
            as_one_head = image.layer_weights[:, None]
            means = pack(as_one_head, special, explorer.queries, explorer.keys, plan.means)
            yield replace(means, heads=0)
        else:
            yield None


def _fits(sizes: list[float], budget: int) -> bool:
    """Return True if the weights of all images, of these bytes of base64, fit on a page."""
    return sum(sizes) <= budget and max(sizes, default=0) <= _BUDGET_OF_IMAGE


def _expected_sizes(explorer: Explorer, plan: _Plan) -> Iterator[float]:
    """Yield the expected bytes of base64 of the weights of each image."""
    for image in explorer.images:
        weights = image.weights
        detail = plan.heads
        if weights is None:
            weights = image.layer_weights
            detail = plan.means
        if weights is None:
            continue
        special = len(explorer.special)
        rows = special + _blocks(explorer.queries, detail.queries)
        columns = special + _blocks(explorer.keys, detail.keys)
        maps = np.prod(weights.shape[:-2], dtype=np.int64)  # of all layers and heads
        bytes_of_row = columns * _DEFLATED[detail.levels] + _MAXIMA
        yield float(maps) * rows * bytes_of_row * _BASE64


def _blocks(grid: tuple[int, int], most: int) -> int:
    """Return the number of blocks of a grid of patches with at most `most` rows and columns."""
    return min(grid[0], most) * min(grid[1], most)


def pack(
    weights: NDArray[np.floating],
    special: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    detail: Detail = Detail(),
) -> Packed:
    """Pack weights (layers, heads, queries, keys); a value that is not finite counts as 0.

    If there are more queries than the detail allows, they are averaged over blocks. Keys are added
    up, so that rows keep their sum.
    """
    averages, query_grid = averaged(weights, special, queries, most=detail.queries)
    averages = np.nan_to_num(averages.astype(np.float32))
    sums, key_grid = _with_fewer_keys(averages, special, keys, most=detail.keys)
    bytes_, maxima = quantised(sums, special, detail.levels)
    decoded = restored(bytes_, maxima, special, detail.levels)
    largest = maxima.max(axis=-1)
    is_positive = largest > 0
    error = np.abs(decoded - sums).max(axis=-1)[is_positive] / largest[is_positive]
    content = maxima.astype("<f4").tobytes() + bytes_.tobytes()
    layers, heads = sums.shape[:2]
    return Packed(
        data=in_base64(zlib.compress(content, _COMPRESSION)),
        layers=layers,
        heads=heads,
        queries=query_grid,
        keys=key_grid,
        levels=detail.levels,
        error=float(error.max(initial=0.0)),
    )


def quantised(
    rows: NDArray[np.floating], special: int, levels: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return rows (..., keys) as bytes from 0 to `levels`, and their maxima (..., 2).

    The maxima are those of special tokens and of patches.
    """
    shares = []
    maxima = []
    for part in (rows[..., :special], rows[..., special:]):
        values = np.clip(part, 0, None)
        maximum = values.max(axis=-1, initial=0).astype(np.float32)
        shares.append(values / np.where(maximum > 0, maximum, 1)[..., None])
        maxima.append(maximum)
    steps = np.round(np.sqrt(np.concatenate(shares, axis=-1)) * levels)
    return steps.clip(0, levels).astype(np.uint8), np.stack(maxima, axis=-1)


def restored(
    bytes_: NDArray[np.uint8], maxima: NDArray[np.float32], special: int, levels: int
) -> NDArray[np.float32]:
    """Return the weights that the page computes from bytes and maxima of rows."""
    maximum_of_weight = np.repeat(maxima, (special, bytes_.shape[-1] - special), axis=-1)
    return np.asarray((bytes_ / np.float32(levels)) ** 2 * maximum_of_weight, dtype=np.float32)


def packed_vectors(vectors: NDArray[np.floating]) -> bytes:
    """Return vectors (..., components) as bytes: the largest component of each, and all steps.

    A step has two bytes. All high ones come first: they vary little and so deflate well.
    """
    values = np.nan_to_num(vectors.astype(np.float32))
    largest = np.abs(values).max(axis=-1).astype("<f4")
    divisor = np.where(largest > 0, largest, 1)[..., None]
    steps = np.round(values / divisor * COMPONENT_STEPS).astype(np.int16)
    high_bytes = (steps >> 8).astype(np.int8)
    low_bytes = (steps & 255).astype(np.uint8)
    content: bytes = largest.tobytes() + high_bytes.tobytes() + low_bytes.tobytes()
    return content


def restored_vectors(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return vectors (..., components) as the page restores them from their bytes."""
    content = packed_vectors(vectors)
    count = vectors.size
    largest = np.frombuffer(content, "<f4", count=count // vectors.shape[-1])
    high_bytes = np.frombuffer(content, np.int8, count=count, offset=largest.nbytes)
    low_bytes = np.frombuffer(content, np.uint8, count=count, offset=largest.nbytes + count)
    steps = (high_bytes.astype(np.int32) * 256 + low_bytes).reshape(vectors.shape)
    scale = largest.reshape(*vectors.shape[:-1], 1) / np.float32(COMPONENT_STEPS)
    return np.asarray(steps * scale, dtype=np.float32)


def _with_fewer_keys(
    weights: NDArray[np.float32], special: int, grid: tuple[int, int], *, most: int
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """Return the weights with keys added up over blocks of patches, and the grid of the blocks."""
    block_rows = min(grid[0], most)
    block_columns = min(grid[1], most)
    if (block_rows, block_columns) == grid:
        return weights, grid
    leading = weights.shape[:-1]
    patches = weights[..., special:].reshape(*leading, *grid)
    sums = np.add.reduceat(patches, block_starts(grid[0], block_rows), axis=-2)
    sums = np.add.reduceat(sums, block_starts(grid[1], block_columns), axis=-1)
    block_keys = sums.reshape(*leading, block_rows * block_columns)
    special_keys = weights[..., :special]
    return np.concatenate([special_keys, block_keys], axis=-1), (block_rows, block_columns)


def in_base64(content: bytes) -> str:
    """Return bytes in base64."""
    return b64encode(content).decode()
