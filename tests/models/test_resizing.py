"""The same architecture at another image size: as large as it was, made for more or fewer tokens."""

import pytest
import torch

from vitlens.errors import InputError, ModelError
from vitlens.models.loading import load
from vitlens.models.rebuild import prune_heads, untrained_like


def untrained_at(model, size):
    return untrained_like(model, seed=0, size=size)


def test_a_vit_has_the_positions_of_its_new_grid():
    model = load("vit-mini", random_weights=True)
    larger = untrained_at(model, (64, 48))
    assert larger.layout.grid == (16, 12)
    assert larger.parameter_count() - model.parameter_count() == (16 * 12 - 64) * 128
    assert larger(torch.rand(1, 3, 64, 48)).shape == (1, 10)
    assert (larger.alias, larger.provenance.weights) == ("vit-mini", "random")
    assert not larger.training
    assert not any(parameter.requires_grad for parameter in larger.parameters())


@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18"])
def test_a_resnet_keeps_its_stem(name):
    model = load(name, random_weights=True)
    other = untrained_at(model, (96, 128))
    assert other.module.conv1.weight.shape == model.module.conv1.weight.shape
    assert other.parameter_count() == model.parameter_count()
    assert other.input_size == (96, 128)


def test_lost_heads_stay_lost():
    pruned = prune_heads(load("vit-mini", random_weights=True), {0: {1}})
    assert untrained_at(pruned, (16, 16)).module.blocks[0].attn.qkv.out_features == 3 * 96


def test_a_size_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="divisible by the patch's, found 30 and 4 px"):
        untrained_at(load("vit-mini", random_weights=True), (30, 32))
    with pytest.raises(ModelError, match=r"expected alexnet to run at 8x8 px, found: .*; check --sizes"):
        untrained_at(load("alexnet=torchvision:alexnet", random_weights=True), (8, 8))
