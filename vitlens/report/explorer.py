"""The data of the attention explorer: images, attention weights of every head, places of tokens.

They are plain arrays, without torch. The report of a command makes them from its record, a notebook
from a model; the HTML renderer packs them into the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError

MOST_TOKENS: Final = 400  # above which queries are pooled
POOLED: Final = 14  # rows and columns of the pooled queries, at most


@dataclass(frozen=True)
class ExplorerImage:
    """One image as the model saw it, and its attention.

    name, facts: shown under it (file; prediction and label).
    picture: (height, width, 3) uint8.
    weights: (layers, heads, queries, keys), each row a distribution over the keys, or None where
        only layer means are kept.
    layer_weights: (layers, queries, keys), the mean over heads.
    rollout: (layers, keys), from CLS (or the mean of all tokens) through the layers so far.
    maps: (rows, columns) by name, e.g. the relevance for a class, raw.
    query_vectors, key_vectors: (last layers, heads, tokens, head_dim), for scores by dimension.
    """

    name: str
    picture: NDArray[np.uint8]
    weights: NDArray[np.floating] | None
    layer_weights: NDArray[np.floating] | None = None
    rollout: NDArray[np.floating] | None = None
    maps: "dict[str, NDArray[np.floating]]" = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    query_vectors: NDArray[np.floating] | None = None
    key_vectors: NDArray[np.floating] | None = None


@dataclass(frozen=True)
class Explorer:
    """Images of one model for the explorer.

    model: its alias.
    keys: the grid (rows, columns) of the patches that are looked at, after `special` tokens that
        come first and are no patches (their names, e.g. ("CLS",)).
    queries: the grid of the rows of the weights; that of the keys unless queries were pooled.
    labels: what each head attends to, (layers, heads).
    words: its three tested labels in words, (layers, heads).
    importance: the rise of the loss without each head in nats, (layers, heads), NaN where it is not
        known.
    notes: sentences shown above it.
    layers: their numbers, () for 0, 1, 2 and so on.
    scales: the factor on q · k, for each layer of the query and key vectors.
    without_pairs: why images have no query and key vectors.

    Raises InputError where the shapes do not fit.
    """

    model: str
    images: tuple[ExplorerImage, ...]
    keys: tuple[int, int]
    special: tuple[str, ...]
    queries: tuple[int, int]
    labels: Sequence[Sequence[str]] = ()
    importance: NDArray[np.floating] | None = None
    notes: tuple[str, ...] = ()
    words: Sequence[Sequence[str]] = ()
    layers: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    without_pairs: str = ""

    def __post_init__(self) -> None:
        queries = len(self.special) + self.queries[0] * self.queries[1]
        keys = len(self.special) + self.keys[0] * self.keys[1]
        expected = (queries, keys)
        for image in self.images:
            for weights in (image.weights, image.layer_weights):
                if weights is not None and weights.shape[-2:] != expected:
                    raise InputError(
                        f"expected weights of {expected} queries and keys, found "
                        f"{weights.shape[-2:]}"
                    )


def pooled(
    weights: NDArray[np.floating], special: int, grid: tuple[int, int]
) -> tuple[NDArray[np.floating], tuple[int, int]]:
    """Average patch queries to POOLED x POOLED if there are more than MOST_TOKENS tokens.

    Returns the weights and the grid of their queries, as `averaged`; fewer tokens are returned as
    they are.

    weights: (..., queries, keys), the queries being `special` tokens and then the patches of the
        grid (rows, columns).

    Raises InputError if the queries are not those of the grid.
    """
    tokens = special + grid[0] * grid[1]
    most = POOLED if tokens > MOST_TOKENS else max(grid)
    return averaged(weights, special, grid, most)


def averaged(
    weights: NDArray[np.floating], special: int, grid: tuple[int, int], most: int
) -> tuple[NDArray[np.floating], tuple[int, int]]:
    """Average patch queries of attention weights over at most `most` rows and columns of blocks.

    Each row of the result is a mean of rows, and so still a distribution over the keys; special
    tokens are not averaged. Returns the weights and the grid of the blocks. Raises InputError as
    `pooled`.
    """
    rows, columns = grid
    if weights.shape[-2] != special + rows * columns:
        raise InputError(
            f"expected {special} + {rows}x{columns} queries, found {weights.shape[-2]}"
        )
    blocks = min(rows, most), min(columns, most)
    if blocks == grid:
        return weights, grid
    keys = weights.shape[-1]
    patches = weights[..., special:, :].reshape(*weights.shape[:-2], rows, columns, keys)
    means = _block_means(patches, blocks[0], axis=-3)
    means = _block_means(means, blocks[1], axis=-2)
    flat = means.reshape(*weights.shape[:-2], blocks[0] * blocks[1], keys)
    return np.concatenate([weights[..., :special, :], flat], axis=-2), blocks


def block_starts(count: int, blocks: int) -> NDArray[np.intp]:
    """Return where each block of neighbours begins.

    Element i is in block floor(i * blocks / count).
    """
    return np.asarray(-(-np.arange(blocks) * count // blocks), dtype=np.intp)


def rollout_of(layer_weights: NDArray[np.floating], special: int) -> NDArray[np.float32]:
    """Compute rollout (layers, keys) up to each layer, from CLS or else from all tokens.

    Half of each layer is the residual connection (Abnar & Zuidema 2020).

    layer_weights: (layers, tokens, tokens), the mean over heads.
    """
    layers, tokens, _ = layer_weights.shape
    mixed = 0.5 * layer_weights.astype(np.float32) + 0.5 * np.eye(tokens, dtype=np.float32)
    start = np.full(tokens, 1 / tokens, np.float32)
    if special:
        start = np.eye(1, tokens, dtype=np.float32)[0]
    rows = []
    for last in range(layers):
        # a vector times matrices, from the last layer down: never a product of two matrices
        row = start
        for layer in reversed(range(last + 1)):
            row = row @ mixed[layer]
        rows.append(row)
    return np.stack(rows)


def _block_means(values: NDArray[np.floating], blocks: int, *, axis: int) -> NDArray[np.floating]:
    """Average neighbours along one axis, in blocks whose lengths differ by at most one."""
    starts = block_starts(values.shape[axis], blocks)
    lengths = np.diff([*starts, values.shape[axis]]).astype(np.float32)
    sums = np.add.reduceat(values.astype(np.float32), starts, axis=axis)
    shape = [1] * values.ndim
    shape[axis] = -1
    return np.asarray(sums / lengths.reshape(shape))
