"""rollout_by_layer: the last map is the rollout itself, the first that of one layer, and masses are kept."""

import pytest
import torch

import vitlens
from tests.analysis.attention.ways import product_by_matrices
from vitlens.analysis.attention.tokens import rollout_by_layer
from vitlens.errors import UnsupportedError


def test_the_map_up_to_the_last_layer_is_the_rollout_and_that_of_layer_0_is_one_layer() -> None:
    model, images = vitlens.load("vit-digits"), torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    maps = rollout_by_layer(model, images)
    assert maps.shape == (3, 6, 8, 8)
    torch.testing.assert_close(maps[:, -1], vitlens.rollout(model, images), rtol=1e-5, atol=1e-7)
    weights = vitlens.attention(model, images)
    for layer in (0, 2):
        matrix = product_by_matrices([layer_weights.mean(1) for layer_weights in weights[: layer + 1]])
        prefix = len(model.layout.prefix)
        torch.testing.assert_close(maps[:, layer].flatten(1), matrix[:, 0, prefix:], rtol=1e-4, atol=1e-6)


def test_windows_are_refused() -> None:
    model = vitlens.load("timm:swin_tiny_patch4_window7_224@random")
    with pytest.raises(UnsupportedError, match="found windows"):
        rollout_by_layer(model, torch.rand(1, 3, 224, 224))
