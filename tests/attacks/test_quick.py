"""Layers by oneDNN: the same logits and gradients, and only where they fit."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from tests.attacks.models import perceptron, pictures, tiny_cnn, tiny_vit
from vitlens.attacks import quick
from vitlens.attacks.quick import quick_convolutions, quick_gradients
from vitlens.models.model import Model

CPU = torch.device("cpu")


def both(model: Model, images: Tensor, *, within: bool) -> tuple[Tensor, Tensor]:
    leaf = images.clone().requires_grad_()
    if within:
        with quick_gradients(CPU):
            logits = model(leaf)
    else:
        logits = model(leaf)
    (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), leaf)
    return logits.detach(), gradient


@pytest.mark.parametrize("make", [perceptron, tiny_vit])
def test_the_same_to_rounding(make, monkeypatch):
    calls: list[tuple[int, ...]] = []
    product = quick._product
    monkeypatch.setattr(quick, "_product", lambda *args: calls.append(tuple(args[0].shape)) or product(*args))
    model, images = make(), pictures(3)
    plain, quickly = both(model, images, within=False), both(model, images, within=True)
    for one, other in zip(quickly, plain):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(calls) in (0, 2 * layers)  # forward and back, or a torch without oneDNN
    assert bool(calls) == hasattr(torch.ops.mkldnn, "_linear_pointwise")


def test_weights_that_want_a_gradient_get_theirs():
    model, images = perceptron(), pictures(3)
    model.requires_grad_(True)
    leaf = images.clone().requires_grad_()
    with quick_gradients(CPU):
        model(leaf).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["double", "autocast"])
def test_other_precisions_are_left_alone(precision):
    model, images = perceptron(), pictures(3)
    if precision == "double":
        model, images = model.double(), images.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        plain, within = both(model, images, within=False), both(model, images, within=True)
    assert all(torch.equal(one, other) for one, other in zip(within, plain))


def test_convolutions_with_channels_last_say_the_same_and_their_weights_come_back():
    model, images = tiny_cnn(), pictures(3)
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    places = [(weight.data_ptr(), weight.stride()) for weight in weights]
    plain = both(model, images, within=False)
    with suppress(KeyError), quick_convolutions(model):
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
        assert any(weight.stride() != stride for weight, (_, stride) in zip(weights, places))
        quickly = both(model, images, within=False)
        raise KeyError
    for one, other in zip(quickly, plain):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert [(weight.data_ptr(), weight.stride()) for weight in weights] == places


def test_a_model_that_only_cuts_patches_is_left_alone():
    model = tiny_vit()
    places = [weight.data_ptr() for weight in model.parameters()]
    with quick_convolutions(model):
        assert [weight.data_ptr() for weight in model.parameters()] == places
