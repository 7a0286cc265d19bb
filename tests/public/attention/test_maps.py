"""Attention weights, and maps of them: which row they are, and where the prefix goes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.tiny import TIMM, images, model_of, ours, shared_model, small_cnn, timm_model, torchvision_vit
from vitlens.errors import UnsupportedError


def test_all_rows_and_the_cls_row():
    model, batch = ours(registers=2), images((32, 48))
    layers, rows = vitlens.attention(model, batch), vitlens.attention(model, batch, rows="cls")
    assert [layer.shape for layer in layers] == [(2, 2, 15, 15)] * 2
    for layer, row in zip(layers, rows, strict=True):
        torch.testing.assert_close(row, layer[:, :, :1], atol=1e-6, rtol=0)
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 2, 15))


def test_a_model_without_cls_or_without_attention_is_refused():
    with pytest.raises(UnsupportedError, match="found none; try rows='all'"):
        vitlens.attention(shared_model("siglip"), images(), rows="cls")
    with pytest.raises(UnsupportedError, match="softmax attention"):
        vitlens.attention(small_cnn(), images((32, 48)))


CASES = {  # whose rows a map is the mean of, and how many keys come before the patches
    "cls": (lambda: ours(registers=2), [0], 3),
    "distilled": (lambda: timm_model(TIMM["deit-distilled"]), [0], 2),
    "torchvision": (torchvision_vit, [0], 1),
    "mean": (lambda: ours(pooling="mean", registers=1), list(range(1, 13)), 1),
    "beit": (lambda: timm_model(TIMM["beit"]), list(range(1, 17)), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_map_is_the_readouts_row_over_the_patches(case):
    make, rows, prefix = CASES[case]
    model = make()
    batch = images(model.input_size)
    for layer, weights in enumerate(vitlens.attention(model, batch)):
        row = weights[:, :, rows].mean((1, 2))
        maps = vitlens.explain(model, batch, method="attention", layer=layer)
        torch.testing.assert_close(maps.flatten(1), row[:, prefix:], atol=1e-6, rtol=0)
        assert maps.shape[1:] == model.layout.grid
    assert torch.equal(vitlens.explain(model, batch, method="attention"), maps)  # of the last


@pytest.mark.parametrize("name", ["siglip", "perception-encoder", "cait"])
def test_a_pooling_query_is_its_own_row(name):
    model = shared_model(name)
    row = vitlens.attention(model, images())[-1][:, :, 0, -16:].mean(1)
    torch.testing.assert_close(vitlens.explain(model, images(), method="attention").flatten(1), row)


class Attention(nn.Module):
    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(tokens)[:, None], tokens[:, None], tokens[:, None])[:, 0]


class Global(nn.Module):
    """A CNN with one attention over its map, as CAFormer or Visformer have it: no layout is known."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attn, self.head = nn.Conv2d(3, 8, 8, stride=8), Attention(), nn.Linear(8, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.attn(self.stem(pixels).flatten(2).mT).mean(1))


@pytest.mark.parametrize(("size", "grid"), [((32, 32), (4, 4)), ((16, 64), (2, 8)), ((64, 16), (8, 2))])
def test_without_a_layout_the_grid_follows_the_images_shape(size, grid):
    """16 patches could be 4 x 4 as well as 2 x 8; a map of the wrong shape would be wrong in silence."""
    maps = vitlens.explain(model_of(Global(), size=size), images(size), method="attention")
    assert maps.shape == (2, *grid)


@pytest.mark.parametrize("size", [(16, 48), (64, 48)])
def test_a_model_at_another_size_has_maps_of_that_size(size):
    model = model_of(ours().module, size=size)  # our ViT interpolates to other sizes by itself
    assert vitlens.explain(model, images(size), method="attention").shape[1:] == (size[0] // 8, 3)
