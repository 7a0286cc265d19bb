"""What the commands tell of maps: their information in bits, how much of it is the same in other images, how alike."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

import vitlens
from vitlens.uncertainty import student_mean


def bits(maps: Tensor) -> list[float]:
    """log2 of the patches minus the entropy of each map."""
    flat = maps.flatten(1).double().clamp_min(0).numpy()
    return [np.log2(len(each)) - stats.entropy(each, base=2) for each in flat]


def explained(maps: Tensor) -> list[float]:
    """The gain in log2-likelihood over an even map, in parts of the bits (at least one), of each map under the mean of
    those of other images, which is mixed with an even map with the weight of one image."""
    flat = maps.flatten(1).double()
    flat = flat / flat.sum(1, keepdim=True)
    patches, gains = flat.shape[1], []
    for image, own in enumerate(flat):
        others = torch.cat([flat[:image], flat[image + 1 :], torch.full((1, patches), 1 / patches)]).mean(0)
        gain = float((own * (others * patches).log2()).sum())
        gains.append(min(1.0, max(0.0, gain / max(1.0, bits(maps)[image]))))
    return gains


def test_information_and_what_is_the_same_in_other_images(golden, places):
    record = golden("rollout").record
    model, digits = vitlens.load(str(places["vit"])), vitlens.load_data("digits", limit=record.methods[0].information.n)
    rows = {row.maps: row for row in record.methods}
    assert set(rows) == {"rollout-max", "rollout-min"}
    for fusion in ("max", "min"):
        maps = vitlens.rollout(model, digits, fusion=fusion)
        row = rows[f"rollout-{fusion}"]
        assert row.information.value == pytest.approx(np.mean(bits(maps)), abs=1e-4)
        assert row.by_place.value == pytest.approx(np.mean(explained(maps)), abs=1e-3)


def test_how_alike_the_heads_of_a_layer_and_neighbouring_layers_are(golden, places):
    record = golden("attention of digits").record
    model, digits = vitlens.load(str(places["vit"])), vitlens.load_data("digits", limit=record.layers[0].information.n)
    weights = vitlens.attention(model, digits, rows="cls")
    means = [layer[:, :, 0, 1:].mean(1) for layer in weights]
    for layer, row in enumerate(record.layers):
        first, second = weights[layer][:, 0, 0, 1:], weights[layer][:, 1, 0, 1:]
        alike = F.cosine_similarity(first.double(), second.double())
        own = student_mean(alike.numpy(), groups=digits.groups.numpy(), unit="", least=-1.0, most=1.0)
        assert row.alike.value == pytest.approx(own.value, abs=1e-4)
        assert (row.alike.low, row.alike.high) == pytest.approx((own.low, own.high), abs=1e-3)
        assert row.information.value == pytest.approx(np.mean(bits(means[layer])), abs=1e-4)
        if layer:
            previous = F.cosine_similarity(means[layer - 1].double(), means[layer].double()).mean()
            assert row.previous.value == pytest.approx(float(previous), abs=1e-4)
