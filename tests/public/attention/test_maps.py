"""Attention weights and their maps: the row that they show, the explorer, and reports."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.attention import by_rollout
from tests.kit.select import index_by, values_of
from tests.kit.tiny import TIMM, images, ours, shared_model, small_cnn, timm_model, torchvision_vit
from vitlens.errors import InputError, UnsupportedError
from vitlens.uncertainty import student_mean


def test_all_rows_and_the_cls_row():
    model = ours(registers=2)
    batch = images((32, 48))
    layers = vitlens.attention(model, batch)
    rows = vitlens.attention(model, batch, rows="cls")
    assert values_of(layers, "shape") == [(2, 2, 15, 15)] * 2
    for layer, row in zip(layers, rows, strict=True):
        torch.testing.assert_close(row, layer[:, :, :1], atol=1e-6, rtol=0)
    with pytest.raises(UnsupportedError, match="found none; try rows='all'"):
        vitlens.attention(shared_model("siglip"), images(), rows="cls")


# a model, the rows whose mean is its map, and how many keys come before the patches
CASES = {
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


XCIT = partial(timm_model, "xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)


def test_attention_of_channels_is_in_no_map():
    """XCiT's last layer is a CLS that reads the patches; those before it are channels."""
    assert vitlens.explain(XCIT(), images(), method="attention").shape == (2, 2, 2)
    with pytest.raises(UnsupportedError, match="layer 0 of tiny; choose another layer="):
        vitlens.explain(XCIT(), images(), method="attention", layer=0)


@pytest.mark.parametrize("name", ["dinov2-registers", "vit-mean", "siglip", "cait"])
def test_the_explorer_shows_the_models_own_attention_and_the_rollout_so_far(name):
    """To half precision; of the first images every head, of the others the mean over heads of each
    layer.
    """
    model = shared_model(name)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-3)
    batch = images(batch=3)
    tokens = model.layout.tokens
    prefix = len(model.layout.prefix)
    data = vitlens.explorer(model, batch, whole=2).explorer
    square = [layer for layer in vitlens.attention(model, batch) if layer.shape[-2] == tokens]
    expected = torch.stack(square, 1)  # without a last layer of one query
    assert (expected[:, :, 0] - expected[:, :, 1]).abs().max() > 0.01  # the two heads differ
    assert [image.weights is None for image in data.images] == [False, False, True]
    for image, weights in zip(data.images, expected, strict=True):
        mean_over_heads = weights.mean(1)  # (layers, query, key)
        if image.weights is not None:
            close(torch.tensor(image.weights).float(), weights)
        else:
            close(torch.tensor(image.layer_weights).float(), mean_over_heads)
        for layer, row in enumerate(image.rollout):
            so_far = [layer_weights[None] for layer_weights in mean_over_heads[: layer + 1]]
            matrix = by_rollout(so_far, tokens)[0, 1:, 1:]
            readout_row = matrix[0] if model.anatomy.readout == "cls" else matrix[prefix:].mean(0)
            close(torch.tensor(row).float(), readout_row)


@pytest.mark.parametrize("make", [partial(shared_model, "torchvision-swin"), small_cnn, XCIT])
def test_layers_that_are_not_of_all_tokens_are_not_explored(make):
    model = make()
    with pytest.raises(UnsupportedError, match=r"found"):
        vitlens.explorer(model, images(model.input_size))
    with pytest.raises(InputError):
        vitlens.explorer(ours(), images((32, 48), batch=0))


def bits(maps: Tensor) -> list[float]:
    """Return log2 of the number of patches minus the entropy of each map."""
    flat = maps.flatten(1).double().clamp_min(0).numpy()
    return [np.log2(len(row)) - stats.entropy(row, base=2) for row in flat]


def explained(maps: Tensor) -> list[float]:
    """Return how well the mean map of the other images, mixed with an even map, predicts each map.

    The gain in log2-likelihood over an even map is a fraction of the map's bits, of at least one
    bit. In the mixture an even map weighs as much as one image.
    """
    flat = maps.flatten(1).double()
    flat = flat / flat.sum(1, keepdim=True)
    patches = flat.shape[1]
    gains = []
    even = torch.full((1, patches), 1 / patches)
    bits_of_maps = bits(maps)
    for image, row in enumerate(flat):
        mean_of_others = torch.cat([flat[:image], flat[image + 1 :], even]).mean(0)
        gain = float((row * (mean_of_others * patches).log2()).sum())
        share = gain / max(1.0, bits_of_maps[image])
        gains.append(min(1.0, max(0.0, share)))
    return gains


def test_information_and_what_is_the_same_in_other_images(golden, places):
    record = golden("rollout").record
    model = vitlens.load(str(places["vit"]))
    digits = vitlens.load_data("digits", limit=record.methods[0].information.n)
    rows = index_by(record.methods, "maps")
    assert set(rows) == {"rollout-max", "rollout-min"}
    for fusion in ("max", "min"):
        maps = vitlens.rollout(model, digits, fusion=fusion)
        row = rows[f"rollout-{fusion}"]
        assert row.information.value == pytest.approx(np.mean(bits(maps)), abs=1e-4)
        assert row.by_place.value == pytest.approx(np.mean(explained(maps)), abs=1e-3)


def test_how_alike_the_heads_of_a_layer_and_neighbouring_layers_are(golden, places):
    record = golden("attention of digits").record
    model = vitlens.load(str(places["vit"]))
    digits = vitlens.load_data("digits", limit=record.layers[0].information.n)
    weights = [
        layer[:, :, 0, 1:].double() for layer in vitlens.attention(model, digits, rows="cls")
    ]
    means = [layer.mean(1) for layer in weights]
    for layer, row in enumerate(record.layers):
        alike = F.cosine_similarity(weights[layer][:, 0], weights[layer][:, 1])
        mean_similarity = student_mean(
            alike.numpy(), groups=digits.groups.numpy(), unit="", least=-1.0, most=1.0
        )
        assert row.alike.value == pytest.approx(mean_similarity.value, abs=1e-4)
        assert (row.alike.low, row.alike.high) == pytest.approx(
            (mean_similarity.low, mean_similarity.high), abs=1e-3
        )
        assert row.information.value == pytest.approx(np.mean(bits(means[layer])), abs=1e-4)
        if layer:
            previous = F.cosine_similarity(means[layer - 1], means[layer]).mean()
            assert row.previous.value == pytest.approx(float(previous), abs=1e-4)
