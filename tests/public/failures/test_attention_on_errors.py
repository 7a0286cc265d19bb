"""Attention on errors is compared with correct predictions of the same class."""

import math

import pytest
import torch
from torch.nn import functional as F

import vitlens
from tests.kit.planted_attention import Planted, measured_values, rejections


def test_a_difference_between_classes_is_none_between_errors_and_correct_predictions():
    """Hard classes have more of the quantity, so errors have more of it over all classes."""
    rejected, covered = rejections(Planted(), range(60))
    assert rejected <= 0.15
    assert covered >= 0.87


def test_images_of_one_source_count_together():
    rejected, covered = rejections(Planted(of_source=8), range(60))
    assert rejected <= 0.15
    assert covered >= 0.87


@pytest.mark.parametrize("shift", [0.1, -0.1])
def test_a_planted_difference_is_found_with_its_sign(shift):
    (row,) = Planted(shift).rows(0)
    assert row.differs
    assert row.difference.value == pytest.approx(100 * shift, abs=3)
    assert 100 * (row.failed - row.passed) == pytest.approx(row.difference.value)
    assert (row.classes, row.errors + row.correct) == (5, 400)


def test_the_quantities_are_those_of_the_attention_weights():
    model = vitlens.load("vit-digits")
    split = vitlens.load_data("digits", limit=6)
    values = measured_values(model, split)
    (batch,) = split.batches(6)
    weights = vitlens.attention(model, batch.images)
    for layer, of_layer in enumerate(weights):
        row = of_layer[:, :, 0].double()
        entropy = -(row * row.log()).sum(-1).mean(1) / math.log(row.shape[-1])
        assert torch.from_numpy(values["entropy", layer]) == pytest.approx(entropy, abs=1e-5)
        prefix = torch.from_numpy(values["prefix", layer])
        assert prefix == pytest.approx(row[..., 0].mean(1), abs=1e-6)
    assert split.masks is not None
    on_patches = weights[-1][:, :, 0, 1:].double()
    shares = (on_patches / on_patches.sum(-1, keepdim=True)).mean(1).unflatten(1, (8, 8))
    pixels = F.interpolate(shares[:, None], split.size, mode="bilinear")[:, 0]
    inside = (pixels * split.masks).sum((1, 2)) / pixels.sum((1, 2))
    assert torch.from_numpy(values["object", len(weights) - 1]) == pytest.approx(inside, abs=1e-5)
