"""Maps of attention: which row they are, where the prefix goes, and positions' similarity."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.lens.tiny import images, model_of, ours, timm_model, torchvision_swin, torchvision_vit
from vitlens.analysis.attention.positions import position_similarity
from vitlens.analysis.attention.weights import attention, attention_maps
from vitlens.errors import UnsupportedError
from vitlens.models.resnet import build_resnet


def test_all_rows_and_the_cls_row():
    model = ours(registers=2)
    batch = images((32, 48))
    layers, rows = attention(model, batch), attention(model, batch, rows="cls")
    assert [layer.shape for layer in layers] == [(2, 2, 15, 15)] * 2
    for layer, row in zip(layers, rows):
        torch.testing.assert_close(row, layer[:, :, :1], atol=1e-6, rtol=0)


def test_a_model_without_cls_has_no_cls_row():
    with pytest.raises(UnsupportedError, match="expected a CLS token in siglip"):
        attention(timm_model("vit_base_patch16_siglip_224", alias="siglip"), images(), rows="cls")
    with pytest.raises(UnsupportedError, match="softmax attention"):
        attention(model_of(build_resnet("resnet20", classes=5, image_size=(32, 32))), images())


CASES = {  # whose rows a map is the mean of, over which keys
    "cls": (lambda: ours(registers=2), (0,), 3),
    "distilled": (lambda: timm_model("deit_tiny_distilled_patch16_224"), (0,), 2),
    "torchvision": (torchvision_vit, (0,), 1),
    "mean": (lambda: ours(pooling="mean", registers=1), range(1, 13), 1),
    "beit": (lambda: timm_model("beit_base_patch16_224"), range(1, 17), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_map_is_the_readouts_row_over_the_patches(case):
    make, rows, prefix = CASES[case]
    model = make()
    batch = images(model.input_size)
    for layer, weights in zip(attention_maps(model, batch), attention(model, batch)):
        row = weights[:, :, list(rows)].mean(2)
        torch.testing.assert_close(layer.maps.flatten(2), row[..., prefix:], atol=1e-6, rtol=0)
        torch.testing.assert_close(layer.prefix, row[..., :prefix], atol=1e-6, rtol=0)
        torch.testing.assert_close(layer.maps.sum((2, 3)) + layer.prefix.sum(-1), torch.ones(2, 2))
        assert layer.maps.shape[2:] == model.layout.grid


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "vit_pe_core_tiny_patch16_384", "cait_xxs24_224"])
def test_a_pooling_query_is_its_own_row(name):
    model = timm_model(name)
    layer, weights = attention_maps(model, images())[-1], attention(model, images())[-1]
    assert layer.reading == "the pooling query"
    torch.testing.assert_close(layer.maps.flatten(2), weights[:, :, 0, -16:])
    torch.testing.assert_close(layer.prefix, weights[:, :, 0, :-16])


class Global(nn.Module):
    """A CNN with one attention over its map, as CAFormer or Visformer have it: no layout is known."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, stride=8)
        self.attn = Attention()
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(pixels).flatten(2).mT
        result: torch.Tensor = self.head(self.attn(tokens).mean(1))
        return result


class Attention(nn.Module):
    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.query(tokens)[:, None], tokens[:, None], tokens[:, None])[:, 0]


@pytest.mark.parametrize(("size", "grid"), [((32, 32), (4, 4)), ((16, 64), (2, 8)), ((64, 16), (8, 2))])
def test_without_a_layout_the_grid_follows_the_images_shape(size, grid):
    """16 patches could be 4 x 4 as well as 2 x 8; a map of the wrong shape would be wrong in silence."""
    model = model_of(Global(), size=size)
    layer = attention_maps(model, images(size))[0]
    assert layer.maps.shape == (2, 1, *grid)


@pytest.mark.parametrize("make", [ours, torchvision_vit])
def test_position_similarity_is_the_cosine(make):
    model = make()
    positions = getattr(model.module, "pos_embed", None)
    positions = model.module.encoder.pos_embedding if positions is None else positions
    patches = positions[0, 1:]
    expected = F.cosine_similarity(patches[:, None], patches, dim=-1)
    torch.testing.assert_close(position_similarity(model), expected, atol=1e-5, rtol=1e-5)


def test_no_positions_no_similarity():
    assert position_similarity(ours(positions=False)) is None
    assert position_similarity(torchvision_swin()) is None


@pytest.mark.parametrize("size", [(16, 48), (64, 48)])
def test_positions_learned_on_another_grid_are_not_sliced(size):
    model = model_of(ours().module, size=size)  # our ViT interpolates to other sizes by itself
    assert attention_maps(model, images(size))[0].maps.shape[2:] == (size[0] // 8, 3)
    assert position_similarity(model) is None
