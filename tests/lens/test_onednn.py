"""Layers by oneDNN: the same outputs and gradients, and only where they fit."""

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.attacks.models import perceptron, pictures, tiny_cnn, tiny_vit
from tests.lens.tiny import images, ours, timm_model
from vitlens.lens import quick_passes as onednn
from vitlens.lens.quick_passes import quick_convolutions, quick_layers, quick_linear
from vitlens.models.model import Model


def test_the_same_to_rounding_and_only_inside():
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7, bias=False)).eval()
    tokens = torch.randn(5, 9, 24, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    with torch.no_grad():
        plain = model(tokens)
        with quick_linear(torch.device("cpu")):
            torch.testing.assert_close(model(tokens), plain, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(model(tokens[0]), plain[0], atol=1e-6, rtol=1e-5)
        assert torch.equal(model(tokens), plain)
    assert not _get_current_function_mode_stack()


def test_gradients_and_other_precisions_are_left_alone():
    model = nn.Linear(8, 4)
    tokens = torch.randn(3, 8, requires_grad=True)
    with quick_linear(torch.device("cpu")):
        model(tokens).sum().backward()
        with torch.no_grad():
            assert model.double()(tokens.double()).dtype == torch.float64
    assert torch.equal(tokens.grad, model.weight.float().sum(0).expand(3, 8))


def test_another_device_is_left_alone():
    with quick_linear(torch.device("meta")):
        assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("build", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224")])
def test_an_mlp_with_its_gelu_in_one_call_is_itself(build, monkeypatch):
    model = build()
    batch = images(model.input_size)
    calls: list[str] = []
    product = onednn._product

    def counted(tokens: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
        calls.append(then)
        return product(tokens, weight, bias, then)

    monkeypatch.setattr(onednn, "_product", counted)
    with torch.no_grad():
        plain = model(batch)
        assert not calls
        with quick_layers(model):
            torch.testing.assert_close(model(batch), plain, atol=1e-5, rtol=1e-5)
        assert calls.count("gelu") == 2  # a block each
        assert torch.equal(model(batch), plain)
    with quick_layers(model):
        assert model(batch.clone().requires_grad_()).grad_fn is not None


def test_an_mlp_that_somebody_listens_to_is_left_alone():
    model, heard = ours(), []
    activation = model.module.blocks[0].mlp.activation
    handle = activation.register_forward_hook(lambda _module, _inputs, output: heard.append(output.shape))
    with torch.no_grad(), quick_layers(model):
        model(images(model.input_size))
    handle.remove()
    assert len(heard) == 1
    model = model.to("meta")
    with torch.no_grad(), quick_layers(model):
        assert not any("forward" in vars(module) for module in model.modules())


CPU = torch.device("cpu")


def both(model: Model, batch: Tensor, *, within: bool) -> tuple[Tensor, Tensor]:
    leaf = batch.clone().requires_grad_()
    if within:
        with quick_linear(CPU):
            logits = model(leaf)
    else:
        logits = model(leaf)
    (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), leaf)
    return logits.detach(), gradient


@pytest.mark.parametrize("make", [perceptron, tiny_vit])
def test_gradients_through_frozen_weights_are_the_same_to_rounding(make, monkeypatch):
    calls: list[tuple[int, ...]] = []
    product = onednn._product
    monkeypatch.setattr(onednn, "_product", lambda *args: calls.append(tuple(args[0].shape)) or product(*args))
    model, batch = make(), pictures(3)
    plain, quickly = both(model, batch, within=False), both(model, batch, within=True)
    for one, other in zip(quickly, plain):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(calls) in (0, 2 * layers)  # forward and back, or a torch without oneDNN
    assert bool(calls) == hasattr(torch.ops.mkldnn, "_linear_pointwise")


def test_weights_that_want_a_gradient_get_theirs():
    model, batch = perceptron(), pictures(3)
    model.requires_grad_(True)
    leaf = batch.clone().requires_grad_()
    with quick_linear(CPU):
        model(leaf).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["double", "autocast"])
def test_other_precisions_are_left_alone(precision):
    model, batch = perceptron(), pictures(3)
    if precision == "double":
        model, batch = model.double(), batch.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        plain, within = both(model, batch, within=False), both(model, batch, within=True)
    assert all(torch.equal(one, other) for one, other in zip(within, plain))


def test_convolutions_with_channels_last_say_the_same_and_their_weights_come_back():
    model, batch = tiny_cnn(), pictures(3)
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    places = [(weight.data_ptr(), weight.stride()) for weight in weights]
    plain = both(model, batch, within=False)
    with suppress(KeyError), quick_convolutions(model):
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
        assert any(weight.stride() != stride for weight, (_, stride) in zip(weights, places))
        quickly = both(model, batch, within=False)
        raise KeyError
    for one, other in zip(quickly, plain):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert [(weight.data_ptr(), weight.stride()) for weight in weights] == places


def test_a_model_that_only_cuts_patches_is_left_alone():
    model = tiny_vit()
    places = [weight.data_ptr() for weight in model.parameters()]
    with quick_convolutions(model):
        assert [weight.data_ptr() for weight in model.parameters()] == places


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_a_model_may_change_a_layers_output_in_place(shape):
    """As timm's NaFlexViT adds its positions."""
    layer = nn.Linear(4, 5).requires_grad_(False)
    tokens = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradients = []
    for fast in (False, True):
        with quick_linear(torch.device("cpu")) if fast else nullcontext():
            output = layer(tokens).add_(1.0).square()
            gradients.append(torch.autograd.grad(output.sum(), tokens)[0])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)
