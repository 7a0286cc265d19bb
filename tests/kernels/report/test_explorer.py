"""The explorer's data: pooled queries, and the rollout of layer means."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vitlens.errors import InputError
from vitlens.report.explorer import averaged, pooled, rollout_of


def weights(*shape: int) -> NDArray[np.float32]:
    raw = np.random.default_rng(0).random(shape, dtype=np.float32)
    return np.asarray(raw / raw.sum(-1, keepdims=True))


def test_pooled_rows_are_means_over_blocks_of_patches_and_few_tokens_are_not_pooled():
    rows, columns, special = 29, 18, 2
    many = weights(2, special + rows * columns, 7)
    fewer, grid = pooled(many, special, (rows, columns))
    assert grid == (14, 14)
    np.testing.assert_array_equal(fewer[:, :special], many[:, :special])
    by_block: dict[tuple[int, int], list[int]] = {}
    for row in range(rows):
        for column in range(columns):
            by_block.setdefault((row * 14 // rows, column * 14 // columns), []).append(special + row * columns + column)
    for (row, column), patches in by_block.items():  # a plain loop
        np.testing.assert_allclose(fewer[:, special + row * 14 + column], many[:, patches].mean(1), atol=1e-6)
    few = weights(2, 3, 1 + 16 * 24, 1 + 16 * 24)  # 385 tokens
    same, grid = pooled(few, 1, (16, 24))
    assert same is few
    assert grid == (16, 24)
    narrow, grid = averaged(weights(1, 3 * 40, 5), 0, (3, 40), 14)
    assert (grid, narrow.shape) == ((3, 14), (1, 42, 5))
    with pytest.raises(InputError, match=r"expected 1 \+ 4x4 queries, found 16"):
        pooled(weights(1, 16, 16), 1, (4, 4))


@pytest.mark.parametrize("special", [0, 1])
def test_rollout_is_the_row_of_the_product_of_all_layers(special):
    layers = weights(4, 9, 9).astype(np.float64)
    product, rows = np.eye(9), []
    for layer in layers:
        product = (0.5 * layer + 0.5 * np.eye(9)) @ product
        rows.append(product[0] if special else product.mean(0))
    np.testing.assert_allclose(rollout_of(layers, special), rows, atol=1e-6)
