"""The data of the attention explorer: images, attention weights of all heads, places of tokens.

It holds plain arrays, without torch. A command's report builds it from its record, a notebook from
a model. The HTML renderer packs it into the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError

MOST_TOKENS: Final = 400  # of an image with more, queries are pooled: weights grow with the square
POOLED: Final = 14  # most rows and columns of pooled queries, as many as a ViT has at 224 px


@dataclass(frozen=True)
class ExplorerImage:
    """One image as the model saw it, with the attention in it.

    name: the file name, shown under the image.
    picture (height, width, 3): uint8 pixels.
    weights (layers, heads, queries, keys): attention weights; each row is a distribution over the
        keys. None if only layer means are kept.
    layer_weights (layers, queries, keys): attention weights, averaged over heads.
    rollout (layers, keys): rollout from CLS (or the mean of all tokens) up to each layer.
    maps (rows, columns): raw maps by name, e.g. the relevance for a class.
    facts: short texts shown under the image, e.g. the prediction and the label.
    query_vectors, key_vectors (layers, heads, tokens, head_dim): queries and keys of the last
        layers.
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

    model: the alias of the model.
    images: the images with their attention.
    keys: the grid (rows, columns) of the patches as keys. The special tokens come before them.
    special: the names of the tokens that are no patches, e.g. ("CLS",).
    queries: the grid (rows, columns) of the patches as queries. It is `keys` unless queries were
        pooled.
    labels (layers, heads): the label of each head's attention.
    importance (layers, heads): the rise of the loss without each head, in nats; NaN if unknown.
    notes: sentences shown above the explorer.
    words (layers, heads): more about each head, e.g. its three tested labels.
    layers: the number of each layer; () stands for 0, 1, 2 and so on.
    scales: for each layer in `query_vectors`, the factor of the product of query and key.
    without_pairs: the reason why no image has query and key vectors; "" if they have them.

    Raises InputError if the shapes do not fit.
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
    """Average the patch queries to POOLED x POOLED if there are more than MOST_TOKENS tokens.

    weights (..., queries, keys): attention weights. The queries are the special tokens and then the
        patches of the grid.
    special: the number of special tokens.
    grid: rows and columns of patches.

    Returns the weights and the grid of their queries. Both are unchanged if there are few tokens.
    Raises InputError if the queries are not those of the grid.
    """
    tokens = special + grid[0] * grid[1]
    most = POOLED if tokens > MOST_TOKENS else max(grid)
    return averaged(weights, special, grid, most)


def averaged(
    weights: NDArray[np.floating], special: int, grid: tuple[int, int], most: int
) -> tuple[NDArray[np.floating], tuple[int, int]]:
    """Average patch queries within blocks, so that at most `most` rows and columns of them remain.

    A row of the result is a mean of rows, and so still a distribution over the keys. Special tokens
    are not averaged. Returns the weights and the grid of the blocks. Parameters and errors are
    those of `pooled`.
    """
    rows, columns = grid
    if weights.shape[-2] != special + rows * columns:
        raise InputError(
            f"expected {special} + {rows}x{columns} queries, found {weights.shape[-2]}"
        )
    block_rows = min(rows, most)
    block_columns = min(columns, most)
    if (block_rows, block_columns) == grid:
        return weights, grid
    leading = weights.shape[:-2]  # e.g. layers and heads
    keys = weights.shape[-1]
    patches = weights[..., special:, :].reshape(*leading, rows, columns, keys)
    means = _block_means(patches, block_rows, axis=-3)
    means = _block_means(means, block_columns, axis=-2)
    block_queries = means.reshape(*leading, block_rows * block_columns, keys)
    special_queries = weights[..., :special, :]
    return np.concatenate([special_queries, block_queries], axis=-2), (block_rows, block_columns)


def block_starts(count: int, blocks: int) -> NDArray[np.intp]:
    """Return the first element of each block, if `count` elements are cut into blocks.

    Element i is in block floor(i * blocks / count), so block b starts at ceil(b * count / blocks).
    """
    ceilings = -(-np.arange(blocks) * count // blocks)  # -(-a // b) rounds up
    return np.asarray(ceilings, dtype=np.intp)


def rollout_of(layer_weights: NDArray[np.floating], special: int) -> NDArray[np.float32]:
    """Compute rollout (layers, keys) up to each layer, from CLS (Abnar & Zuidema 2020).

    Without special tokens, rollout starts from the mean of all tokens. Half of each layer is the
    residual connection.

    layer_weights (layers, tokens, tokens): attention weights, averaged over heads.
    special: the number of special tokens; the first of them is CLS.
    """
    layers, tokens, _ = layer_weights.shape
    mixed = 0.5 * layer_weights.astype(np.float32) + 0.5 * np.eye(tokens, dtype=np.float32)
    start = np.full(tokens, 1 / tokens, np.float32)
    if special:
        start = np.eye(1, tokens, dtype=np.float32)[0]
    rows = []
    for last in range(layers):
        # Rollout is mixed[last] @ ... @ mixed[0]. Only one of its rows is needed: multiplied from
        # the last layer down, it takes vector times matrix products only.
        row = start
        for layer in range(last, -1, -1):
            row = row @ mixed[layer]
        rows.append(row)
    return np.stack(rows)


def _block_means(values: NDArray[np.floating], blocks: int, *, axis: int) -> NDArray[np.floating]:
    """Average neighbours along one axis, in blocks whose lengths differ by at most one."""
    count = values.shape[axis]
    starts = block_starts(count, blocks)
    lengths = np.diff([*starts, count]).astype(np.float32)
    sums = np.add.reduceat(values.astype(np.float32), starts, axis=axis)
    lengths_shape = [1] * values.ndim  # one length per block, the same along all other axes
    lengths_shape[axis] = blocks
    return np.asarray(sums / lengths.reshape(lengths_shape))
