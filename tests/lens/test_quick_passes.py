"""Quick passes: the same logits and gradients to rounding, in parts that fit the cache, and only where they fit."""

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.kit.attacked import perceptron, pictures, tiny_cnn, tiny_vit
from tests.lens.tiny import images, ours, timm_model
from vitlens.lens import quick_passes as quick
from vitlens.lens.quick_passes import quick_batch_size, quick_convolutions, quick_layers, quick_linear, quick_passes
from vitlens.models.hooks import overridden
from vitlens.models.loading import load
from vitlens.models.model import Model

CPU = torch.device("cpu")
CLOSE = {"atol": 1e-6, "rtol": 1e-4}
Product = tuple[tuple[int, ...], str]  # the shape of what is multiplied, and what follows


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Those that oneDNN computes."""
    found: list[Product] = []
    product = quick._product
    monkeypatch.setattr(
        quick, "_product", lambda *given: found.append((tuple(given[0].shape), given[3])) or product(*given)
    )
    return found


def both(model: Model, batch: Tensor, *, within: bool) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the pixels."""
    leaf = batch.clone().requires_grad_()
    with quick_linear(CPU) if within else nullcontext():
        logits = model(leaf)
    (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), leaf)
    return logits.detach(), gradient


def test_the_same_to_rounding_and_only_inside():
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7, bias=False)).eval()
    tokens = torch.randn(5, 9, 24, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    with torch.no_grad():
        plain = model(tokens)
        with quick_linear(CPU):
            torch.testing.assert_close(model(tokens), plain, **CLOSE)
            torch.testing.assert_close(model(tokens[0]), plain[0], **CLOSE)
        assert torch.equal(model(tokens), plain)
        with quick_linear(torch.device("meta")):
            assert not _get_current_function_mode_stack()
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("make", [perceptron, tiny_vit])
def test_gradients_through_frozen_weights_are_the_same_to_rounding(make, products):
    model, batch = make(), pictures(3)
    plain, quickly = both(model, batch, within=False), both(model, batch, within=True)
    for one, other in zip(quickly, plain):
        torch.testing.assert_close(one, other, **CLOSE)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(products) == 2 * layers * hasattr(torch.ops.mkldnn, "_linear_pointwise")  # forward and back


def test_weights_that_want_a_gradient_get_theirs(products):
    model = perceptron().requires_grad_(True)
    with quick_linear(CPU):
        model(pictures(3).requires_grad_()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not products


@pytest.mark.parametrize("precision", ["double", "autocast"])
def test_other_precisions_are_left_alone(precision):
    model, batch = perceptron(), pictures(3)
    if precision == "double":
        model, batch = model.double(), batch.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        plain, within = both(model, batch, within=False), both(model, batch, within=True)
    assert all(torch.equal(one, other) for one, other in zip(within, plain))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_a_model_may_change_a_layers_output_in_place(shape):
    """As timm's NaFlexViT adds its positions."""
    layer = nn.Linear(4, 5).requires_grad_(False)
    tokens = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradients = []
    for fast in (False, True):
        with quick_linear(CPU) if fast else nullcontext():
            output = layer(tokens).add_(1.0).square()
            gradients.append(torch.autograd.grad(output.sum(), tokens)[0])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224")])
def test_an_mlp_with_its_gelu_in_one_call_is_itself(build, products):
    model = build()
    batch = images(model.input_size)
    with torch.no_grad():
        plain = model(batch)
        assert not products
        with quick_layers(model):
            torch.testing.assert_close(model(batch), plain, atol=1e-5, rtol=1e-5)
        assert [then for _, then in products].count("gelu") == 2  # a block each
        assert torch.equal(model(batch), plain)
    with quick_layers(model):
        assert model(batch.clone().requires_grad_()).grad_fn is not None


def test_an_mlp_that_somebody_listens_to_is_left_alone(products):
    model, heard = ours(), []
    activation = model.module.blocks[0].mlp.activation
    handle = activation.register_forward_hook(lambda _module, _inputs, output: heard.append(output.shape))
    with torch.no_grad(), quick_layers(model):
        model(images(model.input_size))
    handle.remove()
    assert len(heard) == 1
    assert [then for _, then in products].count("gelu") == 1
    model = model.to("meta")
    with torch.no_grad(), quick_layers(model):
        assert not any("forward" in vars(module) for module in model.modules())


def test_convolutions_with_channels_last_are_the_same_and_their_weights_come_back():
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
        torch.testing.assert_close(one, other, **CLOSE)
    assert [(weight.data_ptr(), weight.stride()) for weight in weights] == places
    patches = tiny_vit()  # which only cuts patches
    pointers = [weight.data_ptr() for weight in patches.parameters()]
    with quick_convolutions(patches):
        assert [weight.data_ptr() for weight in patches.parameters()] == pointers


@pytest.mark.parametrize(
    "build", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224"), lambda: load("cnn-digits")]
)
def test_the_same_logits_in_parts(build, monkeypatch):
    model = build()
    batch, sizes = images(model.input_size, batch=7), []
    with torch.no_grad():
        plain = model(batch)
        monkeypatch.setattr(quick, "quick_batch_size", lambda _model: 3)
        monkeypatch.setattr(model, "run", lambda prepared, run=model.run: sizes.append(len(prepared)) or run(prepared))
        with suppress(KeyError), quick_passes(model):
            torch.testing.assert_close(model(batch), plain, atol=1e-5, rtol=1e-5)
            raise KeyError
        assert sizes == [3, 3, 1]
        assert torch.equal(model(batch), plain)
    assert not _get_current_function_mode_stack()
    assert "forward" not in vars(model)


def test_gradients_and_watched_models_get_the_whole_batch(monkeypatch):
    model = ours()
    batch, sizes = images(model.input_size, batch=5), []
    monkeypatch.setattr(quick, "quick_batch_size", lambda _model: 2)
    handle = model.module.register_forward_hook(lambda _m, args, _o: sizes.append(len(args[0])))
    with quick_passes(model), torch.no_grad():
        model(batch)
    handle.remove()
    assert sizes == [5]

    def watched(forward):
        return lambda tokens: sizes.append(len(tokens)) or forward(tokens)

    first = model.module.get_submodule(model.anatomy.blocks[0])
    with quick_passes(model), torch.no_grad():
        with overridden(first, watched):
            model(batch)
        assert sizes == [5, 5]
        monkeypatch.setattr(model, "run", lambda prepared, run=model.run: sizes.append(len(prepared)) or run(prepared))
        model(batch)
    assert sizes == [5, 5, 2, 2, 1]
    pixels = batch.clone().requires_grad_(True)
    expected = torch.autograd.grad(model(pixels)[:, 0].sum(), pixels)[0]
    with quick_passes(model):
        found = torch.autograd.grad(model(pixels)[:, 0].sum(), pixels)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_size_follows_the_widest_activation():
    assert quick_batch_size(ours()) > quick_batch_size(ours(dim=32)) >= 1
    assert quick_batch_size(load("vit-digits")) == (12 << 20) // (65 * 512 * 4)
