"""Queries and keys of the explorer's page: their products are the model's scores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import vitlens
from tests.kit.explorer_page import shown_data, shown_vectors, shown_weights
from tests.kit.tiny import ours

IMAGES = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def saved_page(model: vitlens.Model, folder: Path, **options: int) -> str:
    view = vitlens.explorer(model, IMAGES, **options)
    return view.save(folder / "page.html").read_text(encoding="utf-8")


def page_scores(page: str, image: int) -> NDArray[np.float64]:
    """Return the scores (layers, heads, queries, keys) that follow from the page's vectors."""
    vectors = shown_vectors(page, image)
    assert vectors is not None
    queries, keys = vectors
    scales = np.asarray(shown_data(page)["pairs"]["scales"])
    return np.asarray((queries @ keys.swapaxes(-1, -2)) * scales[:, None, None, None])


def test_the_products_of_a_pair_on_the_page_add_up_to_the_models_score(tmp_path):
    model = ours()
    scores = page_scores(saved_page(model, tmp_path), 1)
    for layer, head, query, key in ((0, 1, (0, 0), (3, 2)), (1, 0, (2, 1), (2, 1))):
        pair = vitlens.neurons(model, IMAGES[1:], layer=layer, head=head, query=query, key=key)
        on_page = scores[layer, head, pair.query, pair.key]
        assert on_page == pytest.approx(pair.score, abs=2e-3 * np.abs(scores).max())


def test_the_softmax_of_the_scores_gives_the_weights_of_the_page_and_of_attention(tmp_path):
    model = ours()
    page = saved_page(model, tmp_path)
    powers = np.exp(page_scores(page, 0))
    weights = powers / powers.sum(-1, keepdims=True)
    expected = torch.stack(vitlens.attention(model, IMAGES))[:, 0].numpy()
    largest = expected.max(-1, keepdims=True)
    assert (np.abs(weights - expected) / largest).max() <= 0.005
    on_map = shown_weights(page, 0)
    assert on_map is not None
    assert (np.abs(weights - on_map) / largest).max() <= 0.01
    assert "of the largest weight of the same query" in shown_data(page)["pairs"]["note"]


class Biased(nn.Module):
    """Attention with a bias that is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(1, 2, 16, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        joint = self.joint(tokens).unflatten(2, (3, 2, 4))
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.bias)
        return output.transpose(1, 2).flatten(2)


class BiasedModel(nn.Module):
    """A model of one biased layer, 4 x 4 patches and three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.blocks = nn.Sequential(Biased())
        self.head = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


def test_scores_with_a_bias_are_left_out_with_the_reason(tmp_path):
    torch.manual_seed(0)
    model = vitlens.wrap(BiasedModel(), image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    view = vitlens.explorer(model, IMAGES[..., :32])
    page = view.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert shown_vectors(page, 0) is None
    assert "a bias" in shown_data(page)["pairs"]["note"]


def test_only_images_with_every_head_have_queries_and_keys(tmp_path):
    page = saved_page(ours(), tmp_path, whole=1)
    assert shown_vectors(page, 0) is not None
    assert shown_vectors(page, 1) is None
    assert "the first 1 of 2" in shown_data(page)["pairs"]["note"]


def test_a_large_model_keeps_its_last_layers_on_a_page_of_bounded_size(tmp_path):
    model = ours(depth=4, dim=512, size=(152, 320))
    images = torch.rand(1, 3, 152, 320, generator=torch.Generator().manual_seed(0))
    page = vitlens.explorer(model, images).save(tmp_path / "page.html").read_text("utf-8")
    vectors = shown_vectors(page, 0)
    assert vectors is not None
    layers, _, tokens, dim = vectors[0].shape
    assert (layers, tokens, dim) == (2, 381, 256)
    assert "the last 2 layers" in shown_data(page)["pairs"]["note"]


def test_an_array_of_weights_says_that_it_has_no_queries(tmp_path):
    weights = np.full((2, 3, 17, 17), 1 / 17)
    view = vitlens.attention_explorer(weights, np.zeros((32, 32, 3), dtype="uint8"))
    page = view.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert shown_vectors(page, 0) is None
    assert "only the weights were saved" in shown_data(page)["pairs"]["note"]
