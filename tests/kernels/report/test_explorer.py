"""The explorer of a page decodes what was measured, within the stated error and size."""

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
Grid = tuple[int, int]


def attention(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Draw rows of softmax with a few large weights."""
    scores = np.exp(3 * np.random.default_rng(seed).normal(size=shape))
    return (scores / scores.sum(-1, keepdims=True)).astype(np.float32)


def page_of(
    *images: ExplorerImage, special: int = 0, keys: Grid = (2, 2), queries: Grid | None = None
) -> str:
    return explorer_fragment(
        Explorer("m", images, keys, tuple(f"t{at}" for at in range(special)), queries or keys)
    )


def of(
    weights: NDArray[np.float32] | None, picture: NDArray[np.uint8] = PIXEL, **more: object
) -> ExplorerImage:
    return ExplorerImage("x", picture, weights, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [0, 5])
def test_weights_come_back_within_their_steps(special):
    weights = attention(2, 3, special + 20, special + 20)
    weights[0, 0, 2], weights[0, 1, 3, 0] = np.nan, np.nan  # which count as nothing
    page = page_of(of(weights), special=special, keys=(4, 5))
    back = shown_weights(page, 0)
    expected = np.nan_to_num(weights)
    assert back is not None
    assert np.abs(back - expected).max() <= expected.max() / 255
    assert back[0, 0, 2].tolist() == [0.0] * (special + 20)
    rows = expected.max(-1) > 0
    error = (np.abs(back - expected).max(-1)[rows] / expected.max(-1)[rows]).max()
    (said,) = shown_data(page)["exactness"]
    assert f"the largest error is {100 * error:.1f} %" in said


def test_patches_keep_their_steps_beside_a_token_with_most_of_the_weight():
    weights = np.full((1, 1, 5, 5), [0.999, 0.0001, 0.0005, 0.0004, 0.0], np.float32)
    np.testing.assert_allclose(
        shown_weights(page_of(of(weights), special=1), 0), weights, atol=0.0005 / 255
    )


@pytest.mark.parametrize("special", [0, 1])
def test_a_rollout_is_given_or_the_row_of_the_product_of_all_layers(special):
    tokens = special + 9
    weights = attention(4, 2, tokens, tokens)
    rollout = attention(2, tokens, seed=1)
    means = weights.mean(1)
    product = np.eye(tokens)
    rows = []
    for layer in means.astype(np.float64):
        product = (0.5 * layer + 0.5 * np.eye(tokens)) @ product
        rows.append(product[0] if special else product.mean(0))
    for image, expected in (
        (of(weights), np.stack(rows)),
        (of(None, layer_weights=means), np.stack(rows)),
        (of(weights, rollout=rollout), rollout),
    ):
        from_page = shown_rollout(page_of(image, special=special, keys=(3, 3)), 0)
        np.testing.assert_allclose(from_page, expected, atol=expected.max() / 255)
    image = of(attention(2, 1, special + 4, special + 9))  # of pooled queries
    assert shown_rollout(page_of(image, special=special, keys=(3, 3), queries=(2, 2)), 0) is None
    page = page_of(replace(image, rollout=rollout), special=special, keys=(3, 3), queries=(2, 2))
    np.testing.assert_allclose(shown_rollout(page, 0), rollout, atol=rollout.max() / 255)


def test_an_image_of_layer_means_and_one_of_nothing():
    data = explorer()
    nothing = replace(data.images[1], layer_weights=None)
    means = data.images[1].layer_weights
    page = explorer_fragment(replace(data, images=(*data.images, nothing)))
    first, second, third = shown_data(page)["images"]
    assert (first["weights"]["heads"], second["weights"]["heads"], third["weights"]) == (2, 0, None)
    np.testing.assert_array_equal(shown_weights(page, 0), data.images[0].weights)
    assert means is not None
    np.testing.assert_allclose(shown_weights(page, 1), means[:, None], atol=means.max() / 255)
    assert shown_rollout(page, 2) is None
    assert not shown_data(page)["exactness"]  # the planted weights are exact


def test_maps_are_raw_or_means_of_blocks_and_small_pictures_keep_their_size_in_the_data():
    small = np.arange(20.0).reshape(4, 5) - 8
    large = np.random.default_rng(0).normal(size=(128, 70))
    maps = {"small": small, "large": large, "same": np.full((2, 2), 3.0)}
    page = page_of(of(None, np.full((900, 450, 3), 200, np.uint8), maps=maps))
    np.testing.assert_allclose(shown_map(page, 0, "small"), small, atol=19 / 510 + 1e-9)
    assert shown_map(page, 0, "same").tolist() == [[3.0, 3.0], [3.0, 3.0]]
    across = [part.mean(1) for part in np.array_split(large, 64, axis=1)]
    means = np.stack(across, 1).reshape(64, 2, 64).mean(1)
    np.testing.assert_allclose(shown_map(page, 0, "large"), means, atol=np.ptp(means) / 500)
    (image,) = shown_data(page)["images"]
    assert (image["width"], image["height"]) == (450, 900)
    assert picture_of(image["picture"]).size == (224, 448)


def test_names_are_read_back_and_no_json_ends_its_script():
    page = explorer_fragment(explorer(name="</script><script>alert(1)</script>", label="<!--"))
    assert page_problems(page) == []
    data = shown_data(page)
    assert data["images"][0]["name"] == "</script><script>alert(1)</script>"
    assert data["labels"][0] == ["next patch", "<!--"]
    assert data["importance"][1] == [0.02, None]
    # "/" begins no path of the machine
    odd = "".join(NASTY).encode("ascii", "backslashreplace").decode()
    page = explorer_fragment(explorer(name=odd, label="".join(NASTY)))
    block = page.partition('id="vl-explorer">')[2].partition("</script>")[0]
    assert block.isascii()
    assert not set(block) & set("<>&")


def test_a_page_of_many_weights_loses_detail_then_queries_and_says_so():
    """Rows of fewer queries are means, of fewer keys sums, so that each is a distribution still."""
    weights = attention(2, 6, 1 + 22 * 22, 1 + 22 * 22)
    settings = []
    for count in (1, 7):
        page = page_of(*[of(weights)] * count, special=1, keys=(22, 22))
        data = shown_data(page)
        back = shown_weights(page, count - 1)
        assert len(page) < 8_000_000
        assert back is not None
        (rows, columns), levels = (
            data["images"][0]["weights"]["queries"],
            data["images"][0]["weights"]["levels"],
        )
        settings.append((rows, levels))
        assert back.shape == (2, 6, 1 + rows * columns, 1 + 22 * 22)
        np.testing.assert_allclose(back.sum(-1), 1, atol=2 / levels)
        (said,) = data["exactness"]
        assert (f"{rows}x{columns}" in said) == (rows < 22)
        assert f"{levels + 1} steps" in said
    assert settings[0] == (22, 255)
    assert settings[1][0] < 22
    assert settings[1][1] < 255


def blocks(patches: int, count: int) -> NDArray[np.float64]:
    """Return the block of each patch of a row: zeros and ones of shape (patches, blocks)."""
    return np.eye(count)[np.arange(patches) * count // patches]


def test_keys_of_a_page_of_very_many_are_added_up_over_blocks(monkeypatch):
    # a tenth, as of 120 heads a tenth are here
    monkeypatch.setattr("vitlens.report.html.packing._BUDGET_OF_IMAGE", 570_000)
    weights = attention(3, 4, 1 + 49, 1 + 37 * 37)
    page = page_of(of(weights), special=1, keys=(37, 37), queries=(7, 7))
    back = shown_weights(page, 0)
    block = blocks(37, 28)
    assert back is not None
    expected = block.T @ weights[..., 1:].reshape(3, 4, 50, 37, 37) @ block
    np.testing.assert_allclose(
        back[..., 1:], expected.reshape(3, 4, 50, 784), atol=expected.max() / 63
    )
    (said,) = shown_data(page)["exactness"]
    assert "28x28 blocks" in said


def test_pooled_rows_are_means_over_blocks_of_patches_and_few_tokens_are_not_pooled():
    many = attention(2, 2 + 29 * 18, 7)
    fewer, grid = pooled(many, 2, (29, 18))
    assert grid == (14, 14)
    np.testing.assert_array_equal(fewer[:, :2], many[:, :2])
    down, across = (block / block.sum(0) for block in (blocks(29, 14), blocks(18, 14)))
    means = np.einsum("hrck,ri,cj->hijk", many[:, 2:].reshape(2, 29, 18, 7), down, across)
    np.testing.assert_allclose(fewer[:, 2:], means.reshape(2, 196, 7), atol=1e-6)
    few = attention(2, 3, 1 + 16 * 24, 1 + 16 * 24)  # 385 tokens
    same, grid = pooled(few, 1, (16, 24))
    assert same is few
    assert grid == (16, 24)
    narrow, grid = averaged(attention(1, 3 * 40, 5), 0, (3, 40), 14)
    assert (grid, narrow.shape) == ((3, 14), (1, 42, 5))
    with pytest.raises(InputError):
        pooled(attention(1, 16, 16), 1, (4, 4))


def test_the_error_of_weights_from_vectors_is_the_largest_of_all_images():
    generator = np.random.default_rng(0)
    images = []
    for spread in (0.0, 3.0):  # of equal vectors, the packed ones give the weights exactly
        queries, keys = spread * generator.normal(size=(2, 1, 1, 4, 8)).astype(np.float32)
        scores = np.exp(queries @ keys.swapaxes(-1, -2))
        weights = scores / scores.sum(-1, keepdims=True)
        images.append(of(weights, query_vectors=queries, key_vectors=keys))
    notes = []
    for pair in (images, images[::-1]):
        data = Explorer("m", tuple(pair), (2, 2), (), (2, 2), scales=(1.0,))
        notes.append(shown_data(explorer_fragment(data))["pairs"]["note"])
    assert notes[0] == notes[1]
    assert "at most 0.0 %" not in notes[0]
