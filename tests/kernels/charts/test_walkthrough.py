"""The figures of one head: matrices show their numbers, a permuted image is one, and nothing is cut off."""

import numpy as np
import pytest
from matplotlib import colormaps

from tests.kit.axes import colour_at, cut_off, pixels, texts
from vitlens.charts.style import MAGNITUDE, SIGNED
from vitlens.charts.walkthrough import (
    head_matrices,
    patch_embedding,
    token_vectors,
    weighted_values,
    weights_with_row,
)
from vitlens.charts.windows import windows_and_shift
from vitlens.commands.walkthrough.report import in_order

TOKENS, DIM, GRID = 25, 12, (4, 6)


@pytest.fixture
def weights(random):
    return random.dirichlet(np.ones(TOKENS), TOKENS)


def test_a_matrix_has_the_colours_of_its_numbers():
    scores = np.zeros((10, 10))
    scores[2, 7], scores[8, 1], scores[:, 9] = 3.0, -3.0, -np.inf
    figure = head_matrices(scores=scores, weights=np.full((10, 10), 0.1), prefix=("cls",), title="t")
    left = figure.axes[0]
    for (row, column), share in (((2, 7), 1.0), ((8, 1), 0.0), ((5, 5), 0.5)):
        seen = colour_at(figure, left, (column + 0.5) / 10, (row + 0.5) / 10)
        np.testing.assert_allclose(seen, colormaps[SIGNED](share)[:3], atol=0.05)
    np.testing.assert_allclose(colour_at(figure, left, 0.95, 0.5), (1, 1, 1), atol=0.01)  # masked
    assert figure.axes[1].images[0].get_array().max() == pytest.approx(10)  # in %
    assert cut_off(figure) == []


def test_a_row_over_the_image_is_the_querys(image, weights):
    weights[3] = 0.0
    weights[3, 1 + 2 * 6 + 5] = 1.0  # the patch in row 2, column 5
    figure = weights_with_row(weights=weights, query=3, image=image, grid=GRID, prefix=("cls",), title="t")
    over = figure.axes[1].images[0].get_array()
    height, width = over.shape[:2]
    bright = np.linalg.norm(over - np.array(colormaps[MAGNITUDE](1.0)[:3]), axis=-1)
    row, column = np.unravel_index(bright.argmin(), bright.shape)
    assert (row * 4 // height, column * 6 // width) == (2, 5)
    assert cut_off(figure) == []


def test_patches_in_another_order(random):
    picture = random.uniform(size=(3, 8, 12))
    order = random.permutation(24)
    moved = in_order(picture, order.tolist(), GRID)
    for place, patch in enumerate(order):
        (to_row, to_column), (row, column) = divmod(place, 6), divmod(patch, 6)
        np.testing.assert_array_equal(
            moved[:, 2 * to_row : 2 * to_row + 2, 2 * to_column : 2 * to_column + 2],
            picture[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2],
        )
    np.testing.assert_array_equal(in_order(picture, range(24), GRID), picture)


def test_every_figure_is_drawn_whole(random, image, weights):
    rows = random.normal(size=(TOKENS, DIM))
    drawn = [
        patch_embedding(
            patch=image[:, :8, :8], filters=random.normal(size=(5, 3, 8, 8)), responses=[3.0, -2.0, 1.0, 0.5, 0.1],
            numbers=[1, 20, 3, 4, 100], embedded=rows, convolved=rows, title="patch embedding",
        ),
        token_vectors(panels=[("queries", rows), ("keys", rows)], marked=[0, 3], prefix=("cls",), title="vectors"),
        weighted_values(weights=weights[0], values=rows, output=weights[0] @ rows, title="values"),
    ]  # fmt: skip
    for figure in drawn:
        assert cut_off(figure) == [], texts(figure)
        assert pixels(figure).std() > 0.01


def test_windows_side_by_side_have_different_colours_and_the_panels_say_their_numbers():
    plain = np.arange(16).reshape(4, 4) // 8 * 2 + np.arange(4) // 2  # four windows of 2x2
    shifted = np.array([[0, 1, 1, 2], [3, 4, 4, 5], [3, 4, 4, 5], [6, 7, 7, 8]])
    figure = windows_and_shift(
        image=np.zeros((3, 16, 16)), parts=(plain, shifted), reach=(plain == 0, plain < 2), mask=np.eye(4),
        patch=(1, 1), layers=(4, 5), title="Windows",
    )  # fmt: skip
    words = " ".join(texts(figure))
    assert all(word in words for word in ("layer 4: 4 parts", "layer 5: 9 parts", "(1, 1)", "4, then 8"))
    assert not cut_off(figure)
    first, second, _, mask = figure.axes[:4]
    assert np.abs(colour_at(figure, first, 0.3, 0.2) - colour_at(figure, first, 0.7, 0.2)).max() > 0.1
    assert np.abs(colour_at(figure, second, 0.1, 0.1) - colour_at(figure, second, 0.35, 0.1)).max() > 0.1
    assert colour_at(figure, mask, 0.12, 0.88).max() < 0.3 or colour_at(figure, mask, 0.12, 0.12).max() < 0.3
