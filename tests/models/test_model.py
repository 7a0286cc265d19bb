"""Model: pixels in, normalisation inside, its own size; gradients and modes where they belong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.lens.tiny import images, model_of, ours, timm_model, torchvision_swin
from vitlens.errors import UnsupportedError
from vitlens.models.model import Model, Provenance, trainable
from vitlens.models.rebuild import Architecture, assemble
from vitlens.preprocessing import Preprocessing


def with_preprocessing(preprocessing: Preprocessing) -> Model:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    return assemble(model, Architecture("timm", "x"), preprocessing, ("a", "b"), "x", Provenance("x", "random"))


def test_normalisation_is_the_first_step():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    model = with_preprocessing(Preprocessing((8, 8), mean=mean, std=std))
    batch = images((8, 8))
    expected = torch.stack([(batch[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(model.prepare(batch), expected)
    torch.testing.assert_close(model(batch), model.module(expected))


@pytest.mark.parametrize("size", [(20, 30), (4, 4)])
def test_other_sizes_are_resized_with_a_gradient(size):
    model = with_preprocessing(Preprocessing((8, 8)))
    batch = images(size).requires_grad_()
    prepared = model.prepare(batch)
    expected = F.interpolate(batch, size=(8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(prepared, (expected - 0.5) / 0.5)
    assert torch.autograd.grad(model(batch).sum(), batch)[0].abs().sum() > 0


def test_a_model_without_a_sequence_of_tokens_says_so():
    for model in (torchvision_swin(), model_of(nn.Sequential(nn.Conv2d(3, 5, 32), nn.Flatten()))):
        with pytest.raises(UnsupportedError, match="has no single sequence of tokens"):
            _ = model.layout


def test_a_distilled_model_in_training_mode_answers_with_one():
    model = timm_model("deit_tiny_distilled_patch16_224")
    model.train()
    assert hasattr(model.module, "set_distilled_training")
    model.module.set_distilled_training(True)
    first, second = model.module(model.prepare(images()))
    torch.testing.assert_close(model(images()), (first + second) / 2)


def test_trainable_brings_flags_and_modes_back():
    model = ours()
    next(model.parameters()).requires_grad_(True)
    model.module.blocks[1].train()
    flags = [parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    with trainable(model) as same:
        assert same is model
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert all(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(KeyError), trainable(model):
        raise KeyError
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
