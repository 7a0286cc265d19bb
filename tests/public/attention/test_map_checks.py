"""What the commands tell of maps beside their information: how much of it is the same in other images, how alike the
heads are, with intervals. Their values are compared in tests/golden/test_rollout.py and test_attention.py."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.planted_maps import bits
from vitlens.uncertainty import student_mean


def explained(maps: Tensor) -> list[float]:
    """The gain in log2-likelihood over an even map, in parts of the bits (at least one), of each map under the mean of
    those of other images, which is mixed with an even map with the weight of one image."""
    flat = maps.flatten(1).double()
    flat = flat / flat.sum(1, keepdim=True)
    patches, gains = flat.shape[1], []
    for image, (own, information) in enumerate(zip(flat, bits(maps.numpy()))):
        others = torch.cat([flat[:image], flat[image + 1 :], torch.full((1, patches), 1 / patches)]).mean(0)
        gain = float((own * (others * patches).log2()).sum())
        gains.append(min(1.0, max(0.0, gain / max(1.0, information))))
    return gains


def test_what_is_the_same_in_other_images(golden, places):
    record = golden("rollout").record
    model, digits = vitlens.load(str(places["vit"])), vitlens.load_data("digits", limit=record.methods[0].information.n)
    rows = {row.maps: row for row in record.methods}
    assert set(rows) == {"rollout-max", "rollout-min"}
    for fusion in ("max", "min"):
        expected = np.mean(explained(vitlens.rollout(model, digits, fusion=fusion)))
        assert rows[f"rollout-{fusion}"].by_place.value == pytest.approx(expected, abs=1e-3)


def test_how_alike_the_heads_of_a_layer_are_with_an_interval(golden, places):
    record = golden("attention of digits").record
    model, digits = vitlens.load(str(places["vit"])), vitlens.load_data("digits", limit=record.layers[0].information.n)
    for weights, row in zip(vitlens.attention(model, digits, rows="cls"), record.layers, strict=True):
        first, second = weights[:, :, 0, 1:].double().unbind(1)
        alike = F.cosine_similarity(first, second)
        own = student_mean(alike.numpy(), groups=digits.groups.numpy(), unit="", least=-1.0, most=1.0)
        assert (row.alike.low, row.alike.high) == pytest.approx((own.low, own.high), abs=1e-3)
