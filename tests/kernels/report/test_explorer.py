"""The explorer of a page: what the browser decodes is what was measured, within the stated error and size."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.explorer_page import picture_of, shown_data, shown_map, shown_rollout, shown_weights
from tests.kit.nasty import NASTY
from tests.kit.pages import explorer, page_problems
from vitlens.errors import InputError
from vitlens.report.explorer import Explorer, ExplorerImage, averaged, pooled
from vitlens.report.html import explorer_fragment

PIXEL = np.zeros((1, 1, 3), np.uint8)


def attention(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows of softmax with a few large weights."""
    scores = np.exp(3 * np.random.default_rng(seed).normal(size=shape))
    return (scores / scores.sum(-1, keepdims=True)).astype(np.float32)


def of(weights: NDArray[np.float32] | None, special: int, grid: tuple[int, int], **more: object) -> Explorer:
    """One image."""
    image = ExplorerImage("x", PIXEL, weights, **more)  # type: ignore[arg-type]
    return Explorer("m", (image,), grid, tuple(f"t{at}" for at in range(special)), grid)


def rollout(means: NDArray[np.floating], special: int) -> NDArray[np.float64]:
    """The product of all layers so far, the row of CLS, or the mean of all."""
    product, rows = np.eye(means.shape[-1]), []
    for layer in means.astype(np.float64):
        product = (0.5 * layer + 0.5 * np.eye(len(layer))) @ product
        rows.append(product[0] if special else product.mean(0))
    return np.stack(rows)


@pytest.mark.parametrize("special", [0, 1, 5])
def test_weights_come_back_within_their_steps(special):
    weights = attention(2, 3, special + 20, special + 20)
    weights[0, 0, 2], weights[0, 1, 3, 0] = np.nan, np.nan  # which count as nothing
    page = explorer_fragment(of(weights, special, (4, 5)))
    back = shown_weights(page, 0)
    assert back is not None
    known = np.nan_to_num(weights)
    assert np.abs(back - known).max() <= known.max() / 255
    assert back[0, 0, 2].tolist() == [0.0] * (special + 20)
    rows = known.max(-1) > 0
    error = (np.abs(back - known).max(-1)[rows] / known.max(-1)[rows]).max()
    (said,) = shown_data(page)["exactness"]
    assert f"the largest error is {100 * error:.1f} %" in said


def test_patches_keep_their_steps_beside_a_token_with_most_of_the_weight():
    weights = np.full((1, 1, 5, 5), [0.999, 0.0001, 0.0005, 0.0004, 0.0], np.float32)
    page = explorer_fragment(of(weights, 1, (2, 2)))
    np.testing.assert_allclose(shown_weights(page, 0), weights, atol=0.0005 / 255)


@pytest.mark.parametrize("special", [0, 1])
def test_a_rollout_is_given_or_the_row_of_the_product_of_all_layers(special):
    tokens = special + 9
    weights = attention(4, 2, tokens, tokens)
    means, own = weights.mean(1), attention(2, tokens, seed=1)
    expected = rollout(means, special)
    for given in (of(weights, special, (3, 3)), of(None, special, (3, 3), layer_weights=means)):
        found = shown_rollout(explorer_fragment(given), 0)
        np.testing.assert_allclose(found, expected, atol=expected.max() / 255)
    given = of(weights, special, (3, 3), rollout=own)
    np.testing.assert_allclose(shown_rollout(explorer_fragment(given), 0), own, atol=own.max() / 255)


def test_pooled_queries_have_no_rollout_but_the_one_that_is_given():
    weights = attention(2, 1, 1 + 4, 1 + 16)
    image = ExplorerImage("x", PIXEL, weights)
    whole = Explorer("m", (image,), (4, 4), ("CLS",), (2, 2))
    assert shown_rollout(explorer_fragment(whole), 0) is None
    own = attention(2, 17)
    given = replace(whole, images=(replace(image, rollout=own),))
    np.testing.assert_allclose(shown_rollout(explorer_fragment(given), 0), own, atol=own.max() / 255)


def test_an_image_of_layer_means_and_one_of_nothing():
    given = explorer()
    nothing = replace(given.images[1], layer_weights=None)
    page = explorer_fragment(replace(given, images=(*given.images, nothing)))
    first, second, third = shown_data(page)["images"]
    assert (first["weights"]["heads"], second["weights"]["heads"], third["weights"]) == (2, 0, None)
    np.testing.assert_array_equal(shown_weights(page, 0), given.images[0].weights)
    means = given.images[1].layer_weights
    assert means is not None
    np.testing.assert_allclose(shown_weights(page, 1), means[:, None], atol=means.max() / 255)
    assert shown_rollout(page, 2) is None
    assert not shown_data(page)["exactness"]  # the planted weights are exact


def test_maps_are_raw_and_large_ones_are_means_of_blocks():
    small, large = np.arange(20.0).reshape(4, 5) - 8, np.random.default_rng(0).normal(size=(128, 70))
    image = ExplorerImage("x", PIXEL, None, maps={"small": small, "large": large, "same": np.full((2, 2), 3.0)})
    page = explorer_fragment(Explorer("m", (image,), (2, 2), (), (2, 2)))
    np.testing.assert_allclose(shown_map(page, 0, "small"), small, atol=19 / 510 + 1e-9)
    assert shown_map(page, 0, "same").tolist() == [[3.0, 3.0], [3.0, 3.0]]
    across = [part.mean(1) for part in np.array_split(large, 64, axis=1)]
    means = np.stack(across, 1).reshape(64, 2, 64).mean(1)
    np.testing.assert_allclose(shown_map(page, 0, "large"), means, atol=np.ptp(means) / 500)


def test_pictures_are_small_and_keep_their_size_in_the_data():
    image = ExplorerImage("x", np.full((900, 450, 3), 200, np.uint8), None)
    (shown,) = shown_data(explorer_fragment(Explorer("m", (image,), (2, 2), (), (2, 2))))["images"]
    assert (shown["width"], shown["height"]) == (450, 900)
    assert picture_of(shown["picture"]).size == (224, 448)


def test_names_are_read_back_and_no_json_ends_its_script():
    odd = "".join(NASTY).encode("ascii", "backslashreplace").decode()  # "/" begins no path of the machine
    page = explorer_fragment(explorer(name="</script><script>alert(1)</script>", label="<!--"))
    assert page_problems(page) == []
    data = shown_data(page)
    assert data["images"][0]["name"] == "</script><script>alert(1)</script>"
    assert data["labels"][0] == ["next patch", "<!--"]
    assert data["importance"][1] == [0.02, None]
    page = explorer_fragment(explorer(name=odd, label="".join(NASTY)))
    block = page.partition('id="vl-explorer">')[2].partition("</script>")[0]
    assert block.isascii()
    assert not set(block) & set("<>&")


def test_a_page_of_many_weights_loses_detail_then_queries_and_says_so():
    """Rows of fewer queries are means, of fewer keys sums, so that each is a distribution still."""
    weights, found = attention(2, 6, 1 + 22 * 22, 1 + 22 * 22), []
    for count in (1, 7):
        images = tuple(ExplorerImage(str(seed), PIXEL, weights) for seed in range(count))
        page = explorer_fragment(Explorer("m", images, (22, 22), ("CLS",), (22, 22)))
        data, back = shown_data(page), shown_weights(page, count - 1)
        assert len(page) < 8_000_000
        assert back is not None
        (rows, columns), levels = data["images"][0]["weights"]["queries"], data["images"][0]["weights"]["levels"]
        found.append((rows, levels))
        assert back.shape == (2, 6, 1 + rows * columns, 1 + 22 * 22)
        np.testing.assert_allclose(back.sum(-1), 1, atol=2 / levels)
        (said,) = data["exactness"]
        assert (f"{rows}x{columns}" in said) == (rows < 22)
        assert f"{levels + 1} steps" in said
    assert found == sorted(found, reverse=True)
    assert found[0] == (22, 255)
    assert found[-1][0] < 22


def test_keys_of_a_page_of_very_many_are_added_up_over_blocks():
    weights = attention(12, 10, 1 + 49, 1 + 37 * 37)
    page = explorer_fragment(Explorer("m", (ExplorerImage("x", PIXEL, weights),), (37, 37), ("CLS",), (7, 7)))
    back, block = shown_weights(page, 0), np.eye(28)[np.arange(37) * 28 // 37]
    assert back is not None
    expected = block.T @ weights[..., 1:].reshape(12, 10, 50, 37, 37) @ block
    np.testing.assert_allclose(back[..., 1:], expected.reshape(12, 10, 50, 784), atol=expected.max() / 63)
    (said,) = shown_data(page)["exactness"]
    assert "28x28 blocks" in said


def test_pooled_rows_are_means_over_blocks_of_patches_and_few_tokens_are_not_pooled():
    rows, columns, special = 29, 18, 2
    many = attention(2, special + rows * columns, 7)
    fewer, grid = pooled(many, special, (rows, columns))
    assert grid == (14, 14)
    np.testing.assert_array_equal(fewer[:, :special], many[:, :special])
    by_block: dict[tuple[int, int], list[int]] = {}
    for row in range(rows):
        for column in range(columns):
            by_block.setdefault((row * 14 // rows, column * 14 // columns), []).append(special + row * columns + column)
    for (row, column), patches in by_block.items():  # a plain loop
        np.testing.assert_allclose(fewer[:, special + row * 14 + column], many[:, patches].mean(1), atol=1e-6)
    few = attention(2, 3, 1 + 16 * 24, 1 + 16 * 24)  # 385 tokens
    same, grid = pooled(few, 1, (16, 24))
    assert same is few
    assert grid == (16, 24)
    narrow, grid = averaged(attention(1, 3 * 40, 5), 0, (3, 40), 14)
    assert (grid, narrow.shape) == ((3, 14), (1, 42, 5))
    with pytest.raises(InputError):
        pooled(attention(1, 16, 16), 1, (4, 4))
