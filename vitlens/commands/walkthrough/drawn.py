"""What the figures of `vitlens walkthrough` draw, from its record."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import Picture
from vitlens.commands.walkthrough.record import (
    AnswerRow,
    EmbeddingArrays,
    HeadArrays,
    PermutationRow,
    WalkRow,
    WalkthroughRecord,
)
from vitlens.figures.patches import in_order, patch_grid
from vitlens.figures.walkthrough.embedding import patch_embedding, sum_of_vectors
from vitlens.figures.walkthrough.matrices import head_matrices, matrix_with_row, token_vectors, weighted_values
from vitlens.record import col
from vitlens.report.numbers import percent

_RANKS: Final = 32  # weights that are drawn, the largest
_POINTS: Final = 60  # of a training's curve that are drawn


@dataclass(frozen=True)
class SortedRow:
    """A weight of the followed query, by its rank."""

    rank: int = col("keys, the largest weight first")
    weight: float = col("weight", unit="fraction")
    how: str = col("scores")


@dataclass(frozen=True)
class EntropyRow:
    """The entropy of a head's weights."""

    layer: int = col("layer")
    entropy: float = col("entropy", unit="nats")
    how: str = col("scores")


@dataclass(frozen=True)
class LossRow:
    """The error of a training of the reversal check."""

    step: int = col("step")
    loss: float = col("mean squared error")
    how: str = col("layer")


def _head(record: WalkthroughRecord) -> HeadArrays:
    assert record.head is not None  # every run writes it
    return record.head


def pixels_of(record: WalkthroughRecord) -> NDArray[np.floating]:
    """The image (3, height, width) in [0, 1]."""
    return np.asarray(_head(record).pixels[0] / np.float32(255))


def _patch(row: WalkRow) -> int:
    """The number of the patch that the followed query attends to most."""
    return row.key - len(row.prefix)


def draw_patches(record: WalkthroughRecord, _: str) -> Figure:
    """The image and its patches."""
    return patch_grid(image=pixels_of(record), patch_size=record.row.patch_size)


def whole_patches(record: WalkthroughRecord) -> list[WalkthroughRecord]:
    """The record, where patches fill the image."""
    row = record.row
    filled = all(count * side == size for count, side, size in zip(row.grid, row.patch_size, row.image_size))
    return [record] if filled else []


def _embedding(record: WalkthroughRecord) -> EmbeddingArrays:
    assert record.embedding is not None  # else there is no such section
    return record.embedding


def draw_embedding(record: WalkthroughRecord, title: str) -> Figure:
    """The patch that the query attends to most, filters, and the embedding both ways."""
    arrays, (tall, wide) = _embedding(record), record.row.patch_size
    down, across = divmod(_patch(record.row), record.row.grid[1])
    return patch_embedding(
        patch=pixels_of(record)[:, down * tall : (down + 1) * tall, across * wide : (across + 1) * wide],
        filters=arrays.filters,
        responses=arrays.responses.tolist(),
        numbers=arrays.numbers.tolist(),
        embedded=arrays.embedded,
        convolved=arrays.convolved,
        title=title,
    )


def draw_positions(record: WalkthroughRecord, title: str) -> Figure:
    """What is added to that patch."""
    arrays = _embedding(record)
    embedded, position = arrays.convolved[_patch(record.row)], np.asarray(arrays.position)
    parts = (("embedding", embedded), ("position", position), ("sum", embedded + position))
    return sum_of_vectors(parts=parts, title=title)


def with_position(record: WalkthroughRecord) -> list[WalkthroughRecord]:
    """The record, where a fixed vector is added to a patch."""
    return [record] if record.embedding is not None and record.embedding.position is not None else []


def draw_vectors(record: WalkthroughRecord, title: str) -> Figure:
    """Queries, keys and values."""
    head, row = _head(record), record.row
    panels = [("queries", head.queries), ("keys", head.keys), ("values", head.values)]
    return token_vectors(panels=panels, marked=[row.query, row.key, None], prefix=row.prefix, title=title)


def draw_scores(record: WalkthroughRecord, title: str) -> Figure:
    """Products of all pairs, and the row of the query over the image."""
    row = record.row
    return matrix_with_row(
        matrix=_head(record).products, query=row.query, image=pixels_of(record), grid=row.grid, prefix=row.prefix,
        label="q·k", signed=True, title=title, row_title=f"q·k of {row.query_name}",
    )  # fmt: skip


def draw_row(record: WalkthroughRecord, title: str) -> Figure:
    """Weights of all pairs, and the row of the query over the image."""
    row = record.row
    return matrix_with_row(
        matrix=100 * _head(record).weights, query=row.query, image=pixels_of(record), grid=row.grid,
        prefix=row.prefix, label="weight (%)", signed=False, title=title, row_title="its row, over the image",
    )  # fmt: skip


def draw_weights(record: WalkthroughRecord, title: str) -> Figure:
    """Scores and weights of all pairs."""
    head = _head(record)
    return head_matrices(scores=head.scores, weights=head.weights, prefix=record.row.prefix, title=title)


def draw_values(record: WalkthroughRecord, title: str) -> Figure:
    """The weighted sum of the values."""
    head, query = _head(record), record.row.query
    return weighted_values(weights=head.weights[query], values=head.values, output=head.output, title=title)


def sorted_weights(record: WalkthroughRecord) -> list[SortedRow]:
    """The largest weights of the query, with and without scaling."""
    head = _head(record)
    rows = (("scaled", head.weights[record.row.query]), ("not scaled", head.unscaled))
    return [
        SortedRow(rank, float(weight), how)
        for how, row in rows
        for rank, weight in enumerate(sorted(row)[: -1 - _RANKS : -1], start=1)
    ]


def entropy_rows(record: WalkthroughRecord) -> list[EntropyRow]:
    """The entropies of all heads, with and without scaling."""
    scaled = [EntropyRow(row.layer, row.scaled, "as they are") for row in record.entropies]
    return scaled + [EntropyRow(row.layer, row.unscaled, "not scaled") for row in record.entropies]


def by_positions(record: WalkthroughRecord) -> tuple[PermutationRow, PermutationRow]:
    """The permutation with positions, and the one without."""
    placed, without = sorted(record.permutations, key=lambda each: not each.positions)
    return placed, without


def permuted_patches(record: WalkthroughRecord) -> list[Picture]:
    """The image and its patches in another order, with the predictions."""
    placed, _ = by_positions(record)
    own, image = record.answers[0], pixels_of(record)
    moved = in_order(image, _head(record).order.tolist(), record.row.grid)
    return [
        Picture(image, below=_predicted("the image", own)),
        Picture(moved, below=_predicted("in another order", placed)),
    ]


def _predicted(name: str, row: AnswerRow | PermutationRow) -> str:
    if row.prediction is None or row.probability is None:
        return name
    return f"{name}\n{row.prediction} ({percent(row.probability, 1)})"


def _layer(positions: bool) -> str:
    return "with positions" if positions else "without positions"


def loss_rows(record: WalkthroughRecord) -> list[LossRow]:
    """Errors of the two trainings."""
    losses = {} if record.reversed is None else record.reversed.losses
    return [
        LossRow(int(at) + 1, float(losses[index][at]), _layer(row.positions))
        for index, row in enumerate(record.reversal)
        for at in np.linspace(0, len(losses[index]) - 1, _POINTS).round().astype(int)
    ]


def reversed_weights(record: WalkthroughRecord) -> list[Picture]:
    """Weights of the two layers after their training."""
    weights = {} if record.reversed is None else record.reversed.weights
    return [
        Picture(None, 100 * weights[index], below=_layer(row.positions)) for index, row in enumerate(record.reversal)
    ]
