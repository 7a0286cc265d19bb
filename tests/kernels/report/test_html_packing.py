"""Weights in a page: what the browser decodes is what was measured, within the stated error and size."""

import zlib
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.pages import explorer
from vitlens.report.explorer import Explorer, ExplorerImage
from vitlens.report.html.fragment import explorer_fragment
from vitlens.report.html.packing import Detail, Packed, packed, packed_explorer, quantised, restored


def attention(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows of softmax with a few large weights."""
    scores = np.exp(3 * np.random.default_rng(seed).normal(size=shape))
    return (scores / scores.sum(-1, keepdims=True)).astype(np.float32)


def unpacked(one: Packed, special: int) -> NDArray[np.float32]:
    """As explorer.js does."""
    content = zlib.decompress(b64decode(one.data))
    rows, columns = (special + grid[0] * grid[1] for grid in (one.queries, one.keys))
    shape = (one.layers, max(one.heads, 1), rows)
    maxima = np.frombuffer(content[: 8 * np.prod(shape)], "<f4").reshape(*shape, 2)
    return restored(
        np.frombuffer(content[maxima.nbytes :], np.uint8).reshape(*shape, columns), maxima, special, one.levels
    )


@pytest.mark.parametrize(("levels", "special"), [(255, 0), (127, 1), (63, 5)])
def test_weights_come_back_within_the_error_that_is_stated(levels, special):
    weights = attention(2, 3, special + 20, special + 20)
    one = packed(weights, special, (4, 5), (4, 5), Detail(levels))
    back = unpacked(one, special)
    assert back.shape == weights.shape
    error = np.abs(back - weights) / weights.max(-1, keepdims=True)
    np.testing.assert_allclose(error.max(), one.error, rtol=1e-4)
    assert error.max() <= 1 / levels


def test_rows_at_the_ends():
    row = np.array([[0.999, 0.0001, 0.0005, 0.0004]], np.float32)  # patches keep their steps beside such a token
    np.testing.assert_allclose(restored(*quantised(row, 1, 63), 1, 63), row, atol=0.0005 / 63)
    rows = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
    np.testing.assert_array_equal(restored(*quantised(rows, 1, 255), 1, 255), rows)
    weights = attention(1, 1, 5, 5)
    weights[0, 0, 2] = np.nan  # counts as nothing
    assert unpacked(packed(weights, 1, (2, 2), (2, 2)), 1)[0, 0, 2].tolist() == [0.0] * 5


def test_fewer_keys_are_sums_over_blocks():
    weights = attention(1, 2, 1 + 6 * 6, 1 + 6 * 6)
    one = packed(weights, 1, (6, 6), (6, 6), Detail(255, 3, 2))
    assert (one.queries, one.keys) == ((3, 3), (2, 2))
    rows = weights[:, :, 1:].reshape(1, 2, 3, 2, 3, 2, 37).mean((3, 5)).reshape(1, 2, 9, 37)
    wanted = rows[..., 1:].reshape(1, 2, 9, 2, 3, 2, 3).sum((4, 6)).reshape(1, 2, 9, 4)
    np.testing.assert_allclose(unpacked(one, 1)[:, :, 1:, 1:], wanted, atol=1 / 255)


def test_a_small_budget_costs_detail_and_then_queries():
    image = ExplorerImage("x", np.zeros((8, 8, 3), np.uint8), attention(2, 2, 197, 197))
    whole = Explorer("m", (image,), (14, 14), ("CLS",), (14, 14))
    details = []
    for budget in (300_000, 140_000, 40_000, 1):
        (one,) = packed_explorer(whole, budget=budget)
        assert one is not None
        assert len(one.data) <= budget or budget == 1
        details.append((one.levels, one.queries[0], one.keys[0]))
    assert details[0] == (255, 14, 14)
    assert details == sorted(details, reverse=True)
    assert details[-1] == (31, 5, 10)


def test_an_image_of_layer_means_and_one_of_nothing():
    given = explorer()
    nothing = replace(given.images[1], layer_weights=None)
    heads, means, none = packed_explorer(replace(given, images=(*given.images, nothing)))
    assert heads is not None
    assert means is not None
    assert (heads.heads, means.heads, none) == (2, 0, None)


@pytest.mark.slow
def test_sizes_on_real_attention(real_data: Path):
    """One image with all heads of DeiT-tiny under 3 MB, of ViT-B's shape under 6 MB."""
    import torch
    from PIL import Image

    import vitlens

    weights_file = real_data / "weights" / "deit_tiny_patch16_224.safetensors"
    model = vitlens.load("timm:deit_tiny_patch16_224", weights=str(weights_file))
    pixels = []
    for file in sorted(real_data.glob("photos/*/*.jpg"))[:4]:
        with Image.open(file) as photo:
            pixels.append(np.asarray(photo.convert("RGB").resize((224, 224))))
    images = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2) / 255
    maps = torch.stack(list(vitlens.attention(model, images)), 1).numpy()  # (images, layers, heads, query, key)
    for shown, limit in ((maps[0], 3), (np.concatenate(list(maps), axis=1), 6)):
        image = ExplorerImage("photo", pixels[0], shown)
        page = explorer_fragment(Explorer("deit", (image,), (14, 14), ("CLS",), (14, 14)))
        assert len(page) < limit * 1_000_000, shown.shape
